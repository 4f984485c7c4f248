"""One replica as one SageMaker training job: the request of CreateTrainingJob, built from values and nothing else.

A job never has more than one instance: several in one job would be one coupled machine, and these replicas share
nothing but the bucket. https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from diloco import metrics
from diloco.exchange import layout
from diloco.exchange.settings import ExchangeSettings
from diloco.executors import sagemaker_instances as instances

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.executors.base import ReplicaSpec

ENTRYPOINT = "/usr/local/bin/diloco-replica"
"""The start script of the image (container/Dockerfile)."""
DATA_CHANNEL = "data"
EXCHANGE_VARIABLE = "DILOCO_EXCHANGE_JSON"
MODEL_VARIABLE = "DILOCO_SAGEMAKER_MODEL"
"""Which ranks write the trained model to /opt/ml/model: `rank0`, `all` or `none`."""
SECRET_VARIABLE = "DILOCO_HF_TOKEN_SECRET"  # noqa: S105 - an ARN's variable, no secret
"""ARN of the Secrets Manager secret that holds the Hugging Face token."""

RUN_TAG = "diloco:run-id"
RANK_TAG = "diloco:rank"
SUBMISSION_TAG = "diloco:submission"
RENDEZVOUS_TAG = "diloco:rendezvous"
STACK_TAG = "diloco:stack"

ModelRanks = Literal["rank0", "all", "none"]

_SUFFIX = re.compile(r"-r(?P<rank>\d+)-s(?P<submission>\d+)$")


@dataclass(frozen=True)
class JobSettings:
    """What all jobs of a run have in common. Times are seconds."""

    run_id: str
    region: str
    account: str
    image_uri: str
    role_arn: str
    output_uri: str
    """Parent of what jobs leave behind."""
    prefix: str = "diloco"
    """Jobs are called `<prefix>-<run id>-r<rank>-s<submission>`."""
    instance_types: tuple[str, ...] = (instances.DEFAULT,)
    """In the order of preference."""
    spot: bool = False
    max_runtime: int = 86_400
    max_wait: int | None = None
    """Spot only: running and waiting for capacity together; None: `max_runtime` and a day."""
    keep_alive: int = 0
    """How long an instance is kept warm after its job; 0: not at all."""
    volume_gb: int = 50
    kms_key_arn: str | None = None
    subnet_ids: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    stack: str | None = None
    data_uri: str | None = None
    """`s3://…`, mounted read-only under /opt/ml/input/data/data."""
    token_secret_arn: str | None = None
    model: ModelRanks = "rank0"
    retries: int = 3
    """How often SageMaker itself starts a job again that an internal error of its ended."""
    uses_all_gpus: bool = False
    """Whether the trainer says that it uses every GPU of its instance."""

    @property
    def name_prefix(self) -> str:
        """How the name of every job of this run begins."""
        return f"{self.prefix}-{self.run_id}-r"

    @property
    def longest_wait(self) -> int:
        """Seconds after which a spot job that has not ended is stopped."""
        return self.max_runtime + 86_400 if self.max_wait is None else self.max_wait

    @property
    def uses_preferences(self) -> bool:
        """Whether SageMaker itself chooses among the instance types: it takes that on demand only, and a warm pool is
        of one type.
        """
        return len(self.instance_types) > 1 and not self.spot and not self.keep_alive

    def rotated(self, types: Sequence[str]) -> Self:
        """The same settings with the instance types in another order."""
        return replace(self, instance_types=tuple(types))


def job_name(settings: JobSettings, rank: int, submission: int) -> str:
    """The name of a rank's job; submissions count from 1."""
    return f"{settings.name_prefix}{rank}-s{submission}"


def parse_job_name(name: str) -> tuple[int, int] | None:
    """Rank and submission of a job's name, None for a name of another form."""
    found = _SUFFIX.search(name)
    return (int(found["rank"]), int(found["submission"])) if found else None


def identity(settings: JobSettings, spec: ReplicaSpec) -> dict[str, str]:
    """The tags by which a job is known to be this run's."""
    return {RUN_TAG: settings.run_id, RANK_TAG: str(spec.rank), RENDEZVOUS_TAG: spec.rendezvous_uri}


def training_job(settings: JobSettings, spec: ReplicaSpec, submission: int) -> dict[str, Any]:
    """The request for one rank."""
    if spec.gpu is not None:
        settings = settings.rotated([instances.FOR_GPU[spec.gpu]])
    name = job_name(settings, spec.rank, submission)
    output: dict[str, Any] = {"S3OutputPath": f"{settings.output_uri.rstrip('/')}/{settings.run_id}/r{spec.rank}"}
    stopping: dict[str, Any] = {"MaxRuntimeInSeconds": settings.max_runtime}
    if settings.kms_key_arn is not None:
        output["KmsKeyId"] = settings.kms_key_arn
    if settings.spot:
        stopping["MaxWaitTimeInSeconds"] = settings.longest_wait
    request: dict[str, Any] = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": settings.image_uri,
            "TrainingInputMode": "FastFile",
            "ContainerEntrypoint": [ENTRYPOINT],
            "ContainerArguments": _arguments(spec),
            "MetricDefinitions": metrics.definitions(),
            "EnableSageMakerMetricsTimeSeries": True,
        },
        "RoleArn": settings.role_arn,
        "OutputDataConfig": output,
        # The run's state is in the bucket. This prefix only gives what a trainer of one's own writes to
        # /opt/ml/checkpoints a place that survives a spot interruption.
        "CheckpointConfig": {"S3Uri": f"{output['S3OutputPath']}/checkpoints"},
        "ResourceConfig": _resources(settings),
        "StoppingCondition": stopping,
        "Environment": _environment(settings, spec),
        # Never a knob: an isolated container reaches no bucket, and waits for its peers until the round times out.
        "EnableNetworkIsolation": False,
        "EnableManagedSpotTraining": settings.spot,
        "Tags": _tags(settings, spec, submission),
    }
    if settings.retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": settings.retries}
    if settings.subnet_ids or settings.security_group_ids:
        request["VpcConfig"] = {
            "Subnets": list(settings.subnet_ids),
            "SecurityGroupIds": list(settings.security_group_ids),
        }
    if settings.data_uri is not None:
        request["InputDataConfig"] = [_channel(settings.data_uri)]
    return request


def _arguments(spec: ReplicaSpec) -> list[str]:
    """What trainers get travels through `spec.json`: an argument holds 256 characters at most."""
    return [
        "train",
        *("--rendezvous", spec.rendezvous_uri),
        *("--world-size", str(spec.world_size)),
        *("--rank", str(spec.rank)),
        *("--spec", f"{spec.rendezvous_uri}/{layout.SPEC}"),
    ]


def _environment(settings: JobSettings, spec: ReplicaSpec) -> dict[str, str]:
    defaults = ExchangeSettings().model_dump(mode="json")
    exchange = {name: value for name, value in spec.exchange.items() if defaults.get(name) != value}
    environment = {
        "REPLICA_RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "RENDEZVOUS_URI": spec.rendezvous_uri,
        EXCHANGE_VARIABLE: json.dumps(exchange, separators=(",", ":")),
        MODEL_VARIABLE: settings.model,
        **spec.env,
    }
    if settings.token_secret_arn is not None:
        environment[SECRET_VARIABLE] = settings.token_secret_arn
    return environment


def _resources(settings: JobSettings) -> dict[str, Any]:
    types = settings.instance_types
    resources: dict[str, Any] = {"InstanceCount": 1}
    if settings.uses_preferences:
        resources["InstancePreferences"] = [{"InstanceType": name} for name in types]
    else:
        types = types[:1]
        resources["InstanceType"] = types[0]
    if not all(instances.has_local_disk(name) for name in types):
        resources["VolumeSizeInGB"] = settings.volume_gb
        # One key for all of the preferences is refused if any of them has a disk of its own.
        if settings.kms_key_arn is not None and not any(instances.has_local_disk(name) for name in types):
            resources["VolumeKmsKeyId"] = settings.kms_key_arn
    if settings.keep_alive:
        resources["KeepAlivePeriodInSeconds"] = settings.keep_alive
    return resources


def _channel(uri: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": DATA_CHANNEL, "DataSource": {"S3DataSource": source}, "InputMode": "FastFile"}


def _tags(settings: JobSettings, spec: ReplicaSpec, submission: int) -> list[dict[str, str]]:
    tags = {**settings.tags, **identity(settings, spec), SUBMISSION_TAG: str(submission)}
    if settings.stack is not None:
        tags[STACK_TAG] = settings.stack
    return [{"Key": key, "Value": value} for key, value in tags.items()]
