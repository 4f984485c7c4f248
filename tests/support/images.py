"""Container images without Docker: buildah in a storage folder of its own, in chroots, on the host's network.

`buildah run` ignores ENTRYPOINT; :meth:`Container.run` prepends it as a container engine does.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
STORAGE = ROOT / ".cache" / "images"
"""Where images stay from one test run to the next (git-ignored)."""

EPOCH = 0
"""The time stamp of every file and layer: the same inputs give the same digest."""


class ImageError(Exception):
    """buildah failed; the message ends with what it said last."""


@dataclass(frozen=True)
class Buildah:
    """One storage of images. Builds of different processes in one storage are safe: buildah locks it."""

    storage: Path = STORAGE

    def __call__(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a subcommand in this storage; ImageError if it fails and `check`."""
        self.storage.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [
                "buildah",
                *("--root", str(self.storage / "root"), "--runroot", str(self.storage / "run")),
                *arguments,
            ],
            capture_output=True,
            text=True,
            check=False,
            **options,
        )
        if check and done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:]
            raise ImageError(f"buildah {arguments[0]} ended with {done.returncode}: " + "\n".join(said))
        return done

    def build(
        self,
        context: Path,
        *,
        dockerfile: Path | None = None,
        build_args: Mapping[str, str] | None = None,
        target: str | None = None,
        tag: str | None = None,
        timestamp: int | None = EPOCH,
    ) -> str:
        """Build `dockerfile` (default: `context`/Dockerfile) and return the image's id. pip inside sees this machine's
        index and certificates, as a secret, so no layer keeps them. Raises ImageError.
        """
        command = ["bud", "--isolation", "chroot", "--network", "host", "--no-cache", "--pull-never"]
        command.append("--identity-label=false")  # or buildah's version is in the digest
        command += [f"--build-arg={name}={value}" for name, value in (build_args or {}).items()]
        if target is not None:
            command += ["--target", target]
        if tag is not None:
            command += ["--tag", tag]
        if timestamp is not None:
            command += ["--timestamp", str(timestamp)]
        with tempfile.TemporaryDirectory(prefix="diloco-build-") as folder:
            identity, pip = Path(folder) / "iid", Path(folder) / "pip.conf"
            pip.write_text(_pip_configuration())
            command += ["--iidfile", str(identity), "--secret", f"id=pip.conf,src={pip}"]
            self(*command, "--file", str(dockerfile or context / "Dockerfile"), str(context))
            return identity.read_text().strip().removeprefix("sha256:")

    def push(self, image: str, reference: str) -> str:
        """Push to `host:port/repository:tag` of a registry on this machine (plain HTTP); returns `sha256:…`."""
        with tempfile.TemporaryDirectory(prefix="diloco-push-") as folder:
            digest = Path(folder) / "digest"
            # SageMaker refuses OCI's media types (https://github.com/aws/amazon-sagemaker-feedback/issues/180). Not at
            # the build: buildah then writes a container's name, another each time, into the image.
            options = ("--format", "v2s2", "--tls-verify=false", "--digestfile", str(digest))
            self("push", *options, image, f"docker://{reference}")
            return digest.read_text().strip()

    def pull(self, reference: str) -> str:
        """Pull `host:port/repository@sha256:…` (or a tag) over plain HTTP; returns the image's id."""
        return self("pull", "--tls-verify=false", "--policy", "always", reference).stdout.strip().splitlines()[-1]

    def inspect(self, image: str) -> dict[str, Any]:
        """The OCI configuration: `config` with Env, Entrypoint, Cmd, Labels, WorkingDir, User; `rootfs`, `history`."""
        described = json.loads(self("inspect", "--type", "image", image).stdout)
        return dict(described["OCIv1"])

    def remove(self, *images: str) -> None:
        """Remove images and the containers made of them."""
        if images:
            self("rmi", "--force", *images)

    def container(self, image: str) -> Container:
        """A writable container of the image; use it as a context manager."""
        return Container(self, self("from", "--pull-never", image).stdout.strip(), image)


@dataclass(frozen=True)
class Container:
    """A container whose file system lasts until the end of the `with` block."""

    buildah: Buildah
    name: str
    image: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.buildah("rm", self.name)

    def run(
        self,
        *arguments: str,
        entrypoint: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        volumes: Mapping[Path, str] | None = None,
        timeout: float = 900,
    ) -> subprocess.CompletedProcess[str]:
        """What `docker run [--entrypoint] IMAGE arguments` does; its exit code is the process's."""
        prefix = self.buildah.inspect(self.image)["config"].get("Entrypoint", []) if entrypoint is None else entrypoint
        command = ["run", "--isolation", "chroot", "--network", "host"]
        command += [f"--env={name}={value}" for name, value in (env or {}).items()]
        command += [f"--volume={host}:{inside}" for host, inside in (volumes or {}).items()]
        if user is not None:
            command += ["--user", user]
        return self.buildah(*command, self.name, "--", *prefix, *arguments, check=False, timeout=timeout)

    def files(self) -> Iterator[tuple[str, int]]:
        """Path (from `/`) and change time in ns of everything in its file system, /proc, /sys and /dev aside."""
        root = Path(self.buildah("mount", self.name).stdout.strip())
        for folder, folders, names in os.walk(root):
            inside = Path("/") / Path(folder).relative_to(root)
            if inside == Path("/"):
                folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
            for name in (".", *names):
                yield str(inside / name), (Path(folder) / name).lstat().st_ctime_ns


def build_and_push(
    reference: str,
    context: Path,
    *,
    dockerfile: Path | None = None,
    build_args: Mapping[str, str] | None = None,
    target: str | None = None,
    storage: Path = STORAGE,
) -> str:
    """Build `context` and push it to `reference` (`127.0.0.1:port/repository:tag`, plain HTTP).

    Returns the manifest's digest, `sha256:…`, which is the same for the same inputs. Raises ImageError.
    """
    buildah = Buildah(storage)
    # A name of its own, so that another image with the same content, thus the same id, is not removed with it.
    name = f"localhost/build:{secrets.token_hex(8)}"
    buildah.build(context, dockerfile=dockerfile, build_args=build_args, target=target, tag=name)
    try:
        return buildah.push(name, reference)
    finally:
        buildah("rmi", name)


def available() -> bool:
    """Whether this machine can build images, base image included."""
    return os.geteuid() == 0 and all(map(shutil.which, ("buildah", "debootstrap")))


def _pip_configuration() -> str:
    """pip's settings for inside a build: the index that this machine's environment names, the certificates of the base
    image.
    """
    lines = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt"]
    for variable, key in (("PIP_INDEX_URL", "index-url"), ("PIP_DEFAULT_TIMEOUT", "timeout")):
        if value := os.environ.get(variable):
            lines.append(f"{key} = {value}")
    return "\n".join((*lines, ""))
