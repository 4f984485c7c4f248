"""The stand-in for the docker-build provider: images built with buildah, and pushed to the emulator's registry.

A tag on an ECR host goes to `$DILOCO_TEST_REGISTRY` (else the host of `$AWS_ENDPOINT_URL`) under the same repository
and tag. As the real provider does: any change rebuilds in place, the hash of the context included, a registry's
password is no change, and deleting the resource deletes its manifest.
"""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pathspec import GitIgnoreSpec
from pulumi.provider.experimental.provider import PropertyDiffKind as Kind

from tests.support.images import ImageError, build_and_push
from tests.support.providers.provider import StandInProvider, serve
from tests.support.providers.resource import RefusedError, Resource
from tests.support.providers.values import Plain, has_unknown, same

if TYPE_CHECKING:
    from collections.abc import Iterator

_ECR_HOST = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com")
_MANIFESTS = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Session:
    """What the resource needs to know of the provider's configuration: nothing."""

    def __init__(self, _: Plain) -> None:
        self.region = ""


class Image(Resource):
    """docker_build.Image of one platform, pushed."""

    urn_type = "docker-build:index:Image"
    arguments = frozenset(
        {"buildArgs", "buildOnPreview", "context", "dockerfile", "exports", "network", "platforms", "push"}
        | {"registries", "tags", "target"}
    )
    recomputed = frozenset({"contextHash", "digest", "ref"})
    regional = False

    def check(self, logical: str, inputs: Plain, old: Plain, seed: bytes) -> tuple[Plain, dict[str, str]]:
        checked, problems = super().check(logical, inputs, old, seed)
        if inputs.get("network", "default") != "default":
            problems["network"] = "the stand-in builds in the default network only"
        if inputs.get("push") or inputs.get("exports") != [{"registry": {"ociMediaTypes": False, "push": True}}]:
            problems["exports"] = "the stand-in builds only what is pushed, with Docker's manifests"
        return checked, problems

    def create(self, inputs: Plain) -> str:
        return str(self._build(inputs))

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        # The id stays that of the first build; the digest is the last one's.
        digest = state.get("digest") or resource_id
        kept = [tag for tag in state["tags"] if _manifest("HEAD", _local(tag), digest)]
        if not kept:
            return None
        return {
            "contextHash": state.get("contextHash") or context_hash(state),
            "digest": digest,
            "ref": f"{kept[0]}@{digest}",
            "tags": kept,
        }

    def diff(self, state: Plain, inputs: Plain, ignored: frozenset[str], default_tags: Plain) -> dict[str, Kind]:
        changes = {
            name: Kind.UPDATE
            for name in self.arguments - ignored - {"registries"}
            if has_unknown(inputs.get(name)) or not same(inputs.get(name), state.get(name))
        }
        if not has_unknown(inputs.get("context")) and context_hash(inputs) != state.get("contextHash"):
            changes["contextHash"] = Kind.UPDATE
        if _logins(inputs) != _logins(state):
            changes["registries"] = Kind.UPDATE
        return changes

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        new["digest"] = self._build(new)
        new.pop("contextHash", None)

    def delete(self, resource_id: str, state: Plain) -> None:
        for tag in state["tags"]:
            _manifest("DELETE", _local(tag), state["digest"])

    def _build(self, inputs: Plain) -> str:
        context = Path(inputs["context"]["location"])
        dockerfile = inputs.get("dockerfile", {}).get("location")
        digest = ""
        for tag in inputs["tags"]:
            try:
                digest = build_and_push(
                    _local(tag),
                    context,
                    dockerfile=Path(dockerfile) if dockerfile else None,
                    build_args=inputs.get("buildArgs"),
                    target=inputs.get("target"),
                )
            except ImageError as problem:
                raise RefusedError(f"building {tag}: {problem}") from problem
        return digest


def context_hash(inputs: Plain) -> str:
    """Hash of the files that the build sees, `.dockerignore` respected, and of the Dockerfile."""
    root = Path(inputs["context"]["location"])
    digest = hashlib.sha256()
    dockerfile = inputs.get("dockerfile", {}).get("location") or root / "Dockerfile"
    digest.update(Path(dockerfile).read_bytes())
    for path in _context(root):
        digest.update(f"\0{path.relative_to(root).as_posix()}\0{path.stat().st_mode & 0o111}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _context(root: Path) -> Iterator[Path]:
    ignore = root / ".dockerignore"
    lines = ignore.read_text().splitlines() if ignore.exists() else []
    # Docker's patterns are Git's, but always from the root.
    patterns = [re.sub(r"^(!?)/?", r"\1/", line) for line in map(str.strip, lines) if line and not line.startswith("#")]
    spec = GitIgnoreSpec.from_lines(patterns)
    named = [re.sub(r"^!/", "", pattern).rstrip("/") for pattern in patterns if pattern.startswith("!/")]
    # Under `*` only what is named again is looked at: a checkout's virtual environment is large.
    tops = [root / name for name in named] if "/*" in patterns else [root]
    found = {
        path
        for top in tops
        for path in (top.rglob("*") if top.is_dir() else [top])
        if path.is_file() and not spec.match_file(path.relative_to(root).as_posix())
    }
    yield from sorted(found)


def _logins(properties: Plain) -> list[tuple[Any, Any]]:
    return [(entry.get("address"), entry.get("username")) for entry in properties.get("registries", [])]


def _local(tag: str) -> str:
    """The reference in the emulator's registry that stands for one in ECR."""
    host, _, rest = tag.partition("/")
    if not _ECR_HOST.fullmatch(host):
        raise RefusedError(f"the stand-in pushes to ECR only, not to {tag}")
    registry = os.environ.get("DILOCO_TEST_REGISTRY") or urlsplit(os.environ.get("AWS_ENDPOINT_URL", "")).netloc
    if not registry:
        raise RefusedError("no registry: set DILOCO_TEST_REGISTRY to the emulator's host:port")
    return f"{registry}/{rest}"


def _manifest(method: str, reference: str, digest: str) -> bool:
    registry, _, rest = reference.partition("/")
    repository = rest.rpartition(":")[0]
    request = urllib.request.Request(
        f"http://{registry}/v2/{repository}/manifests/{digest}", method=method, headers={"Accept": _MANIFESTS}
    )
    try:
        with _DIRECT.open(request, timeout=30):
            return True
    except urllib.error.HTTPError as problem:
        if problem.code in {404, 405}:
            return False
        raise RefusedError(f"{method} {reference}@{digest}: {json.dumps(problem.reason)}") from problem


def main() -> None:
    """Serve under the version of the installed pulumi_docker_build."""
    serve(version("pulumi-docker-build"), StandInProvider("docker-build", {Image.urn_type: Image}, {}, Session))
