"""Everything that a cluster would refuse of a run's Job, found before the first call, all of it in one list.

Spellings are those of https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and of quantities.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diloco.errors import ConfigurationError
from diloco.executors.kubernetes_manifest import FOR_GPU
from diloco.executors.kubernetes_rayjob import entrypoint
from diloco.executors.local import arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.kubernetes_manifest import PodSettings

MOST_REPLICAS = 100_000
"""An Indexed Job with `backoffLimitPerIndex`."""
MOST_ARGUMENTS = 128 * 2**10
"""Characters of one argument that Linux passes on (MAX_ARG_STRLEN)."""

MOST_OF_RAYJOB = 47
"""Characters of a RayJob's name: KubeRay's own limit, since it makes longer ones of it."""

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"\S+")


def check(settings: PodSettings, specs: Sequence[ReplicaSpec]) -> None:
    """Raise one ConfigurationError that lists all that can't work; nothing is asked of anybody."""
    problems = list(problems_of(settings, specs))
    if problems:
        count = "" if len(problems) == 1 else f"{len(problems)} problems: "
        numbered = problems if len(problems) == 1 else [f"({n}) {text}" for n, text in enumerate(problems, 1)]
        raise ConfigurationError(count + "; ".join(numbered))


def problems_of(settings: PodSettings, specs: Sequence[ReplicaSpec]) -> Iterator[str]:
    """All that the cluster would refuse, and what it would accept to nobody's use."""
    yield from _name_problems(settings, len(specs))
    yield from _resource_problems(settings)
    unknown = sorted({spec.gpu for spec in specs if spec.gpu is not None} - set(FOR_GPU))
    if unknown:
        yield f"gpu {', '.join(unknown)}: known are {', '.join(FOR_GPU)}"
    if specs and max(map(len, _words(settings, specs[0]))) > MOST_ARGUMENTS:
        yield f"--trainer-kwargs-json is longer than the {MOST_ARGUMENTS} characters that a process can be given"
    for uri in {spec.rendezvous_uri for spec in specs}:
        if not uri.startswith("s3://"):
            yield f"--rendezvous {uri}: pods share no files: use s3://bucket/prefix"
    if settings.user < 1:
        yield f"user {settings.user}: replicas don't run as root: use 1 or more"


def _words(settings: PodSettings, spec: ReplicaSpec) -> list[str]:
    """What a process is given: a RayJob's entrypoint is one word of a shell's."""
    return [entrypoint(spec, spec.rank)] if settings.workload == "rayjob" else arguments(spec)


def _name_problems(settings: PodSettings, replicas: int) -> Iterator[str]:
    between = "-replica" if settings.workload == "volcano" else ""  # its task's name
    longest = f"{settings.name}{between}-{max(replicas - 1, 0)}"
    most = MOST_OF_RAYJOB if settings.workload == "rayjob" else 63
    if not _LABEL.fullmatch(settings.name) or len(longest) > most:
        yield (
            f"the Job's name {settings.name!r}: with the rank it must be at most {most} lower-case letters, digits and"
            " hyphens: shorten --run-id"
        )
    for option, value in (("--namespace", settings.namespace), ("--queue", settings.queue)):
        if value is not None and not (_LABEL.fullmatch(value) and len(value) <= 63):
            yield f"{option} {value!r}: use at most 63 lower-case letters, digits and hyphens"
    for option, value in (
        ("--service-account", settings.service_account),
        ("--credentials-secret", settings.credentials_secret),
        ("--hf-token-secret", settings.token_secret),
        ("--priority-class", settings.priority_class),
    ):
        if value is not None and not (_SUBDOMAIN.fullmatch(value) and len(value) <= 253):
            yield f"{option} {value!r}: use at most 253 lower-case letters, digits, hyphens and dots"
    if not _IMAGE.fullmatch(settings.image_uri):
        yield f"--image {settings.image_uri!r}: name an image, best by its digest: registry/name@sha256:…"
    for name in settings.env:
        if not _VARIABLE.fullmatch(name):
            yield f"variable {name!r}: use letters, digits and underscores"
    if replicas > MOST_REPLICAS:
        yield f"--replicas {replicas}: a Job has at most {MOST_REPLICAS} indexes"


def _resource_problems(settings: PodSettings) -> Iterator[str]:
    for option, value in (
        ("--cpu", settings.cpu),
        ("--memory", settings.memory),
        ("--shared-memory", settings.shared_memory),
    ):
        if not _QUANTITY.fullmatch(value):
            yield f"{option} {value!r}: write a quantity such as 500m, 4 or 16Gi"
    for name, number, least in (
        ("--gpus", settings.gpus, 0),
        ("--max-restarts", settings.retries, 0),
        ("grace_seconds", settings.grace_seconds, 1),
    ):
        if number < least:
            yield f"{name} {number}: use at least {least}"
    if settings.max_runtime is not None and settings.max_runtime < 1:
        yield f"--max-runtime {settings.max_runtime}: use at least 1"
    if settings.endpoint_url is not None and not settings.endpoint_url.startswith(("http://", "https://")):
        yield f"--endpoint-url {settings.endpoint_url}: begin it with http:// or https://"
