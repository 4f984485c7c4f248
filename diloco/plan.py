"""What a run on a stack would create, worked out from the stack's outputs alone: nothing is asked of AWS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from diloco.errors import ConfigurationError
from diloco.exchange import layout
from diloco.executors.sagemaker_request import job_name
from diloco.sagemaker_run import job_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.stack import QuotaOutput, StackOutputs

MOST_NAME = 63
"""Characters of a training job's name."""
MOST_JOBS = 1000


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class Job(_Part):
    """One replica."""

    rank: int
    name: str
    output_uri: str


class QuotaNeed(_Part):
    """One quota that the run counts against."""

    name: str
    needed: int
    value: float | None
    """As the stack knows it; None: it does not look after this one."""
    status: str

    @property
    def problem(self) -> str | None:
        """Why the run would not fit, if that is known."""
        if self.value is None or self.value >= self.needed:
            return None
        return f"{self.name} is {self.value:g} ({self.status}), and the run needs {self.needed}"


class Network(_Part):
    """Where the jobs' network interfaces are; no subnets: in SageMaker's own network."""

    subnet_ids: list[str]
    security_group_ids: list[str]


class Kubernetes(_Part):
    """The cluster that the same run could use."""

    cluster_name: str
    namespace: str | None
    service_account: str | None
    pod_role_arn: str | None


class Plan(_Part):
    """A run before it exists."""

    run_id: str
    region: str
    account: str
    bucket: str
    rendezvous_uri: str
    """Of the run itself."""
    output_uri: str
    image_uri: str
    sagemaker_role_arn: str
    launcher_policy_arn: str
    """What the caller's identity needs."""
    kms_key_arn: str | None
    instance_type: str | None
    spot: bool
    keep_alive_seconds: int
    jobs: list[Job]
    network: Network
    tags: dict[str, str]
    quotas: list[QuotaNeed]
    other_quotas: list[str]
    """Quotas of the stack that this run does not count against."""
    kubernetes: Kubernetes | None

    @property
    def problems(self) -> list[str]:
        """What is known to keep the run from starting."""
        return [problem for quota in self.quotas if (problem := quota.problem) is not None]

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return self.model_dump(by_alias=True, mode="json") | {"problems": self.problems}


def make_plan(
    outputs: StackOutputs,
    *,
    run_id: str,
    replicas: int,
    instance_type: str | None = None,
    spot: bool = False,
    keep_alive_seconds: int = 0,
) -> Plan:
    """Plan a run of N replicas, one training job each.

    Raises one ConfigurationError that lists every argument that can't work, and every output that contradicts another.
    """
    problems = [
        *_argument_problems(outputs, run_id, replicas, spot=spot, keep_alive_seconds=keep_alive_seconds),
        *_contradictions(outputs),
    ]
    if problems:
        raise ConfigurationError("; ".join(problems))
    quotas = _needs(outputs.quotas, replicas, instance_type, spot=spot, keep_alive=keep_alive_seconds > 0)
    counted = {quota.name for quota in quotas}
    output_uri = f"{outputs.output_uri}/{run_id}"
    settings = job_settings(outputs, run_id)
    cluster = outputs.cluster_name
    return Plan(
        run_id=run_id,
        region=outputs.region,
        account=outputs.account,
        bucket=outputs.bucket,
        rendezvous_uri=f"{outputs.rendezvous_uri}/{run_id}",
        output_uri=output_uri,
        image_uri=outputs.image_uri,
        sagemaker_role_arn=outputs.sagemaker_role_arn,
        launcher_policy_arn=outputs.launcher_policy_arn,
        kms_key_arn=outputs.kms_key_arn,
        instance_type=instance_type,
        spot=spot,
        keep_alive_seconds=keep_alive_seconds,
        jobs=[
            Job(rank=rank, name=job_name(settings, rank, 1), output_uri=f"{output_uri}/r{rank}")
            for rank in range(replicas)
        ],
        network=Network(subnet_ids=outputs.subnet_ids, security_group_ids=outputs.security_group_ids),
        tags=outputs.tags,
        quotas=quotas,
        other_quotas=[
            f"{quota.name}: {quota.value:g} ({quota.status})" for quota in outputs.quotas if quota.name not in counted
        ],
        kubernetes=None
        if cluster is None
        else Kubernetes(
            cluster_name=cluster,
            namespace=outputs.namespace,
            service_account=outputs.service_account,
            pod_role_arn=outputs.pod_role_arn,
        ),
    )


def _argument_problems(
    outputs: StackOutputs, run_id: str, replicas: int, *, spot: bool, keep_alive_seconds: int
) -> list[str]:
    found = []
    if not layout.RUN_ID.fullmatch(run_id):
        found.append(f"--run-id {run_id}: use lower case, digits and hyphens, at most 40")
    if not 1 <= replicas <= MOST_JOBS:
        found.append(f"--replicas {replicas}: use 1 to {MOST_JOBS}")
    else:
        longest = job_name(job_settings(outputs, run_id), replicas - 1, 1)
        if len(longest) > MOST_NAME:
            found.append(
                f"--run-id {run_id}: the job's name {longest} has {len(longest)} characters, and SageMaker takes "
                f"{MOST_NAME}: shorten it, or the stack's jobNamePrefix"
            )
    if not 0 <= keep_alive_seconds <= 3600:
        found.append(f"--keep-alive {keep_alive_seconds}: use 0 to 3600 seconds")
    if spot and keep_alive_seconds:
        found.append("--keep-alive: spot instances have no warm pools: leave out --spot or --keep-alive")
    return found


def _contradictions(outputs: StackOutputs) -> list[str]:
    """Outputs that can't belong to one stack: of a file that was edited, or mixed from two."""
    found = []
    for name, uri in (("rendezvousUri", outputs.rendezvous_uri), ("outputUri", outputs.output_uri)):
        if uri.split("/")[2] != outputs.bucket:
            found.append(f"{name} {uri} is not in bucket {outputs.bucket}")
    for name, arn in (("sagemakerRoleArn", outputs.sagemaker_role_arn), ("podRoleArn", outputs.pod_role_arn)):
        if arn is not None and f":{outputs.account}:" not in arn:
            found.append(f"{name} {arn} is not of account {outputs.account}")
    registry = outputs.image_uri.partition("/")[0].split(".")
    if registry[1:3] == ["dkr", "ecr"] and registry[3] != outputs.region:
        found.append(f"imageUri {outputs.image_uri} is in {registry[3]}, not in {outputs.region}")
    return found


def _needs(
    quotas: Sequence[QuotaOutput], replicas: int, instance_type: str | None, *, spot: bool, keep_alive: bool
) -> list[QuotaNeed]:
    if instance_type is None:
        return []
    usages = ["spot training job" if spot else "training job", *(["training warm pool"] if keep_alive else [])]
    known = {quota.name: quota for quota in quotas}
    found = []
    for name in (f"{instance_type} for {usage} usage" for usage in usages):
        quota = known.get(name)
        status = "not looked after by the stack" if quota is None else quota.status
        value = None if quota is None else quota.value
        found.append(QuotaNeed(name=name, needed=replicas, value=value, status=status))
    return found


def lines(plan: Plan) -> list[str]:
    """The plan for people."""
    network = plan.network
    where = (
        f"subnets {', '.join(network.subnet_ids)}; security groups {', '.join(network.security_group_ids)}"
        if network.subnet_ids
        else "SageMaker's own"
    )
    machine = plan.instance_type or "no instance type chosen (--instance-type)"
    extras = ", ".join(
        word
        for word, given in (
            ("spot", plan.spot),
            (f"kept warm for {plan.keep_alive_seconds} s", plan.keep_alive_seconds),
        )
        if given
    )
    rows = [
        ("run", plan.run_id),
        ("account", f"{plan.account} in {plan.region}"),
        ("jobs", f"{len(plan.jobs)} on {machine}{f' ({extras})' if extras else ''}"),
        *((f"rank {job.rank}", f"{job.name} → {job.output_uri}") for job in plan.jobs),
        ("image", plan.image_uri),
        ("role", plan.sagemaker_role_arn),
        ("rendezvous", f"{plan.rendezvous_uri}/ in bucket {plan.bucket}"),
        ("output", f"{plan.output_uri}/"),
        ("encryption", plan.kms_key_arn or "Amazon S3's own keys"),
        ("network", where),
        ("tags", ", ".join(f"{name}={value}" for name, value in sorted(plan.tags.items())) or "none"),
        *(("quota", _told(quota)) for quota in plan.quotas),
        *(("other quota", quota) for quota in plan.other_quotas),
        ("launcher", f"needs {plan.launcher_policy_arn}"),
    ]
    if plan.kubernetes is not None:
        found = plan.kubernetes
        rows += [
            ("cluster", f"{found.cluster_name}, namespace {found.namespace or '-'}"),
            ("pods", f"service account {found.service_account or '-'}, role {found.pod_role_arn or '-'}"),
        ]
    rows += [("problem", problem) for problem in plan.problems]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _told(quota: QuotaNeed) -> str:
    value = "unknown" if quota.value is None else f"{quota.value:g}"
    return f"{quota.name}: {quota.needed} needed, {value} ({quota.status})"
