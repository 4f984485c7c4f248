"""Everything that SageMaker would refuse, found before the first call, all of it in one list.

Lengths, ranges, spellings and counts come from botocore's own model of the service, which holds them but does not
enforce them. The rules across fields are the documentation's (API_ResourceConfig, API_StoppingCondition, the pages on
spot and on warm pools; read 2026-11-30).
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError
from diloco.executors import sagemaker_instances as instances
from diloco.executors.sagemaker_request import training_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from diloco.executors.base import ReplicaSpec
    from diloco.executors.sagemaker_request import JobSettings

LONGEST_RUN = 28 * 86_400
"""Seconds. An account's quota may be lower, and by default is."""

_ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/.+")
_ROLE = re.compile(r"arn:(?P<partition>aws[a-z-]*):iam::(?P<account>\d{12}):role/.+")
_SECRET = re.compile(r"arn:aws[a-z-]*:secretsmanager:(?P<region>[a-z0-9-]+):\d{12}:secret:.+")

# Where a value comes from, by its path in the request: the first that matches.
_FIXES = (
    (r"TrainingJobName", "job name", "shorten the stack's jobNamePrefix or --run-id"),
    (r".*TrainingImage", "the stack's imageUri", "give the image a shorter name"),
    (r".*ContainerArguments.*", "argument", "shorten the stack's rendezvousUri or --run-id"),
    (r"Environment\.DILOCO_EXCHANGE_JSON", "the exchange's settings", "shorten --output"),
    (r"Environment.*", "environment", "give fewer or shorter variables"),
    (r"RoleArn", "the stack's sagemakerRoleArn", "give the ARN of an IAM role"),
    (r".*KeepAlivePeriodInSeconds", "--keep-alive", "give another period"),
    (r".*InstancePreferences", "--instance-types", "name fewer types"),
    (r".*InstanceType", "--instance-type", "see https://aws.amazon.com/sagemaker/ai/pricing/"),
    (r".*VolumeSizeInGB", "--volume-gb", "give another size"),
    (r".*MaxRuntimeInSeconds", "--max-runtime", "give another time"),
    (r".*MaxWaitTimeInSeconds", "--max-wait", "give another time"),
    (r".*KmsKeyId", "the stack's kmsKeyArn", "give a key's ARN"),
    (r"Tags", "tags", "give the stack fewer tags"),
    (r"Tags.*", "tag", "change it in the stack's config"),
    (r"VpcConfig.*", "the stack's subnets and security groups", "change them in the stack's config"),
    (r"InputDataConfig.*", "--data", "give an s3:// URI"),
    (r"OutputDataConfig.*|CheckpointConfig.*", "the stack's outputUri", "give an s3:// URI"),
    (r"RetryStrategy.*", "--retries", "give another number"),
)


@cache
def shapes() -> dict[str, Any]:
    """The shapes of the service's model."""
    from botocore.loaders import Loader

    found: dict[str, Any] = Loader().load_service_model("sagemaker", "service-2")["shapes"]
    return found


def check(settings: JobSettings, specs: Sequence[ReplicaSpec], submission: int = 1) -> None:
    """Raise one ConfigurationError that lists all that can't work; nothing is asked of anybody."""
    problems = list(problems_of(settings, specs, submission))
    if problems:
        count = "" if len(problems) == 1 else f"{len(problems)} problems: "
        numbered = problems if len(problems) == 1 else [f"({n}) {text}" for n, text in enumerate(problems, 1)]
        raise ConfigurationError(count + "; ".join(numbered))


def problems_of(settings: JobSettings, specs: Sequence[ReplicaSpec], submission: int = 1) -> Iterator[str]:
    """All that SageMaker would refuse of these jobs, and what it would accept to nobody's use."""
    unknown = sorted({spec.gpu for spec in specs if spec.gpu is not None} - set(instances.FOR_GPU))
    if unknown:
        yield f"gpu {', '.join(unknown)}: known are {', '.join(instances.FOR_GPU)}"
        return
    if not settings.instance_types:
        yield "no instance type: give --instance-type"
        return
    seen = set()
    for spec in specs:
        for problem in _in_shape("CreateTrainingJobRequest", training_job(settings, spec, submission), ""):
            if problem not in seen:
                seen.add(problem)
                yield problem
    yield from _of_times(settings)
    yield from _of_instances(settings)
    yield from _of_places(settings)
    if settings.data_uri is not None and not settings.data_uri.startswith("s3://"):
        yield f"--data {settings.data_uri}: a job reads s3://bucket/prefix, or what its image or the Hub holds"
    if bool(settings.subnet_ids) != bool(settings.security_group_ids):
        yield "the stack has subnets without security groups, or the reverse: a VPC needs both"


def _in_shape(shape_name: str, value: Any, path: str) -> Iterator[str]:
    shape = shapes()[shape_name]
    kind = shape["type"]
    if kind == "structure":
        for name, item in value.items():
            yield from _in_shape(shape["members"][name]["shape"], item, f"{path}.{name}" if path else name)
    elif kind == "list":
        yield from _bounds(shape, len(value), path, f"{len(value)} of them", "entries")
        for item in value:
            yield from _in_shape(shape["member"]["shape"], item, path + ".")
    elif kind == "map":
        yield from _bounds(shape, len(value), path, f"{len(value)} of them", "entries")
        for key, item in value.items():
            yield from _in_shape(shape["key"]["shape"], key, f"{path}.{key}")
            yield from _in_shape(shape["value"]["shape"], item, f"{path}.{key}")
    elif kind == "string":
        yield from _in_string(shape, value, path)
    elif kind in ("integer", "long"):
        yield from _bounds(shape, value, path, str(value), "")


def _in_string(shape: Mapping[str, Any], value: str, path: str) -> Iterator[str]:
    if "enum" in shape:
        if value not in shape["enum"]:
            near = difflib.get_close_matches(value, shape["enum"], n=1)
            yield _said(path, repr(value), "is none that SageMaker knows", f"did you mean {near[0]}?" if near else None)
        return
    too_long = list(_bounds(shape, len(value), path, f"{_short(value)!r} has {len(value)} characters", "characters"))
    yield from too_long
    pattern = shape.get("pattern")
    if not too_long and pattern is not None and re.fullmatch(_python(pattern), value) is None:
        yield _said(path, repr(value), f"does not have the form {pattern}", None)


def _bounds(shape: Mapping[str, Any], number: int, path: str, shown: str, unit: str) -> Iterator[str]:
    if number > shape.get("max", number):
        yield _said(path, shown, f"at most {shape['max']} {unit}".strip(), None)
    if number < shape.get("min", number):
        yield _said(path, shown, f"at least {shape['min']} {unit}".strip(), None)


def _said(path: str, value: str, limit: str, fix: str | None) -> str:
    name, usual = next(
        ((name, usual) for pattern, name, usual in _FIXES if re.fullmatch(pattern, path.rstrip("."))),
        (path, "change it"),
    )
    return f"{name} {value}: {limit}: {fix or usual}"


def _short(value: str) -> str:
    return value if len(value) <= 80 else f"{value[:60]}…"


def _python(pattern: str) -> str:
    """The model's patterns are Java's; Python's `re` has no classes of Unicode properties."""
    for java, python in ((r"\p{L}", r"\w"), (r"\p{N}", ""), (r"\p{Z}", " "), (r"\p{Alnum}", "a-zA-Z0-9")):
        pattern = pattern.replace(java, python)
    return pattern


def _of_times(settings: JobSettings) -> Iterator[str]:
    if settings.max_runtime > LONGEST_RUN:
        yield (
            f"--max-runtime {settings.max_runtime} s is above the {LONGEST_RUN} s (28 days) that SageMaker takes:"
            " give less; a run goes on with the same run id"
        )
    if settings.spot and settings.longest_wait < settings.max_runtime:
        yield (
            f"--max-wait {settings.longest_wait} s is below --max-runtime {settings.max_runtime} s, which it includes:"
            " give at least as much"
        )
    if not settings.spot and settings.max_wait is not None:
        yield "--max-wait is for spot jobs: add --spot, or leave it out"
    if settings.spot and settings.keep_alive:
        yield "--keep-alive does not go with --spot: SageMaker keeps no spot instance; leave one out"


def _of_instances(settings: JobSettings) -> Iterator[str]:
    types = settings.instance_types
    if len(set(types)) < len(types):
        yield f"--instance-types {','.join(types)} names one twice: name each once"
    if not settings.uses_preferences:  # those that a later submission may use are in no request yet
        for name in types[1:]:
            yield from _in_shape("TrainingInstanceType", name, "ResourceConfig.InstanceType")
    with_volume = [name for name in types if not instances.has_local_disk(name)]
    if with_volume and settings.volume_gb < 1:
        yield f"--volume-gb {settings.volume_gb}: {with_volume[0]} has no disk of its own; give at least 1"
    for name in types:
        if instances.is_trainium(name):
            yield f"--instance-type {name} is Trainium, and the trainer and its image are for CPUs and NVIDIA GPUs"
            continue
        gpus = instances.gpus(name)
        if gpus == 1 or gpus == 0 or settings.uses_all_gpus:
            continue
        has = "an unknown number of" if gpus is None else str(gpus)
        yield (
            f"--instance-type {name} has {has} GPUs, and the trainer uses one: the others would idle at full price;"
            " use a type with one GPU, or say --uses-all-gpus for a trainer of your own that does"
        )


def _of_places(settings: JobSettings) -> Iterator[str]:
    image = _ECR.fullmatch(settings.image_uri)
    if image is not None and image["region"] != settings.region:
        yield (
            f"the image is in {image['region']} and the jobs are in {settings.region}: SageMaker pulls from its own"
            " region only; push it there"
        )
    role = _ROLE.fullmatch(settings.role_arn)
    if role is not None and role["account"] != settings.account:
        yield (
            f"the role is of account {role['account']} and the jobs are of {settings.account}:"
            " a job's role must be of its own account"
        )
    if settings.token_secret_arn is not None:
        secret = _SECRET.fullmatch(settings.token_secret_arn)
        if secret is None:
            yield (
                "--hf-token-secret must be the ARN of a Secrets Manager secret, never the token itself:"
                " arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME"
            )
        elif secret["region"] != settings.region:
            yield f"the secret is in {secret['region']} and the jobs are in {settings.region}: replicate it there"
