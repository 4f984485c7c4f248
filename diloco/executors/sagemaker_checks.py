"""What a launcher asks AWS before it starts anything: quotas, the jobs' role, and where the bucket is.

Each answer is a problem, which ends the launch, or a warning: what can't be asked is said, and tried.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from diloco.access import OBJECT_ACTIONS, parse_s3
from diloco.errors import ConfigurationError
from diloco.executors import sagemaker_errors as errors
from diloco.executors import sagemaker_jobs as jobs
from diloco.executors.sagemaker_submit import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.executors.sagemaker_clients import Clients
    from diloco.executors.sagemaker_request import JobSettings

SERVICE = "sagemaker"
LONGEST_RUN_QUOTA = "Longest run time for a training job"
"""Seconds; its default is 5 days, the API takes 28."""
LONGEST_LIFE = timedelta(days=29)
"""A job that was created before that has ended: it waits and runs for 28 days at most."""
RUNNING_JOBS_SEEN = 1000
"""How many running jobs of the account are looked at."""


@dataclass
class Findings:
    """What was found."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    quotas: dict[str, float | None] = field(default_factory=dict)
    """Those that matter to the launch, by name; None: not known."""
    in_use: dict[str, int] = field(default_factory=dict)
    """Instances of other jobs that count against them, as far as these jobs may be described."""

    def raise_problems(self) -> None:
        """Raise one ConfigurationError that lists all problems."""
        if self.problems:
            raise ConfigurationError("; ".join(self.problems))


def usage_quota(instance_type: str, *, spot: bool = False) -> str:
    """The quota that a running job counts against."""
    return f"{instance_type} for {'spot ' if spot else ''}training job usage"


def warm_quota(instance_type: str) -> str:
    """The quota that a kept instance counts against; 0 by default."""
    return f"{instance_type} for training warm pool usage"


def check(clients: Clients, settings: JobSettings, *, replicas: int, rendezvous_uri: str) -> Findings:
    """Ask for everything; nothing is changed."""
    findings = Findings()
    _check_quotas(clients, settings, replicas, findings)
    _check_bucket(clients, settings, rendezvous_uri, findings)
    _check_role(clients, settings, rendezvous_uri, findings)
    return findings


def _check_quotas(clients: Clients, settings: JobSettings, replicas: int, findings: Findings) -> None:
    values = _quotas(clients, findings)
    names = [usage_quota(name, spot=settings.spot) for name in settings.instance_types]
    asked = [*names, LONGEST_RUN_QUOTA]
    asked += [warm_quota(settings.instance_types[0])] if settings.keep_alive else []
    findings.quotas = {name: values.get(name) for name in asked}
    if values:
        findings.warnings += [
            f"the quota {name!r} is not known to Service Quotas here: not checked"
            for name in asked
            if values.get(name) is None
        ]
    enough = [name for name in names if (values.get(name, replicas) or 0) >= replicas]
    short = [
        f"the quota {name!r} is {values[name]:g} and {replicas} are needed: raise it, or use another type"
        for name in names
        if name not in enough
    ]
    (findings.warnings if enough else findings.problems).extend(short)
    limits = {name: values[name] for name in enough if name in values}
    if limits:
        _check_headroom(clients, settings, replicas, limits, findings, others=len(enough) > len(limits))
    longest = values.get(LONGEST_RUN_QUOTA)
    if longest is not None and settings.max_runtime > longest:
        findings.problems.append(
            f"--max-runtime {settings.max_runtime} s is above the quota {LONGEST_RUN_QUOTA!r} ({longest:g} s): give"
            " less, or raise it in Service Quotas"
        )
    if settings.keep_alive:
        warm = warm_quota(settings.instance_types[0])
        limit = values.get(warm)
        if limit is not None and limit < replicas:
            findings.problems.append(
                f"--keep-alive: the quota {warm!r} is {limit:g} and {replicas} are needed; SageMaker would keep fewer"
                " and not say so: raise it in Service Quotas, or leave out --keep-alive"
            )


def _check_headroom(
    clients: Clients,
    settings: JobSettings,
    replicas: int,
    limits: Mapping[str, float],
    findings: Findings,
    *,
    others: bool,
) -> None:
    """Compare quotas, by name, with what the account's other jobs use of them now; `others`: there are types with no
    known limit to fall back on.
    """
    used = _instances_in_use(clients, settings, findings)
    if used is None:
        return
    findings.in_use = {name: used[name] for name in limits}
    full = {name: limit for name, limit in limits.items() if used[name] + replicas > limit}
    said = [
        f"the quota {name!r} is {limit:g}, other running jobs use {used[name]} of it, and {replicas} are needed: wait"
        " for them, raise it in Service Quotas, or use another type"
        for name, limit in full.items()
    ]
    (findings.warnings if others or len(full) < len(limits) else findings.problems).extend(said)
    unknown = used[_NOT_DESCRIBED]
    findings.warnings += [
        f"{unknown} more training jobs run in this account, and may not be described: if they use {name!r}"
        f" ({limit:g}, {used[name]} known to be in use), not all of {replicas} can start"
        for name, limit in limits.items()
        if unknown and name not in full and used[name] + unknown + replicas > limit
    ]


_NOT_DESCRIBED = ""


def _instances_in_use(clients: Clients, settings: JobSettings, findings: Findings) -> Counter[str] | None:
    """Instances of running jobs of other runs, by the quota that they count against; those of jobs that may not be
    described, one each, by none. None if jobs can't be listed.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    since = datetime.now(UTC) - LONGEST_LIFE
    names: list[str] = []
    try:
        for status in ("InProgress", "Stopping"):
            pages = clients.sagemaker.get_paginator("list_training_jobs").paginate(
                StatusEquals=status,
                CreationTimeAfter=since,
                PaginationConfig={"PageSize": 100, "MaxItems": RUNNING_JOBS_SEEN},
            )
            names += [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]
    except (BotoCoreError, ClientError) as problem:
        findings.warnings.append(
            f"running jobs could not be listed, so they were not counted against the quotas: {_said(problem)}"
        )
        return None

    def instances(name: str) -> Counter[str]:
        try:
            job = clients.sagemaker.describe_training_job(TrainingJobName=name)
        except (BotoCoreError, ClientError):
            return Counter({_NOT_DESCRIBED: 1})
        resources, spot = job["ResourceConfig"], bool(job.get("EnableManagedSpotTraining"))
        alone = (jobs.instance_type(job), resources.get("InstanceCount", 1))
        groups: list[tuple[str, int]] = [
            (group["InstanceType"], group["InstanceCount"]) for group in resources.get("InstanceGroups", ())
        ]
        found: Counter[str] = Counter()
        for kind, count in groups or [alone]:
            found[usage_quota(kind, spot=spot)] += count
        return found

    theirs = [name for name in names if not name.startswith(settings.name_prefix)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(instances, theirs), Counter())


def _quotas(clients: Clients, findings: Findings) -> Mapping[str, float]:
    """All quotas of the service in this account, by name; none if they can't be read."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found: dict[str, float] = {}
        for operation in ("list_aws_default_service_quotas", "list_service_quotas"):  # the account's own win
            pages = clients.quotas.get_paginator(operation).paginate(ServiceCode=SERVICE)
            found |= {quota["QuotaName"]: quota["Value"] for page in pages for quota in page["Quotas"]}
    except (BotoCoreError, ClientError) as problem:
        findings.warnings.append(f"quotas could not be read, so they were not checked: {_said(problem)}")
        return {}
    return found


def _check_bucket(clients: Clients, settings: JobSettings, uri: str, findings: Findings) -> None:
    """Find out where the bucket is: the answer carries its region even to those who may not see it."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = parse_s3(uri)[0]
    try:
        answer = clients.s3.head_bucket(Bucket=bucket)
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
    except ClientError as problem:
        if errors.code(problem) in ("404", "NoSuchBucket"):
            findings.problems.append(f"the bucket {bucket} does not exist: run `pulumi up`")
            return
        headers = problem.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    except BotoCoreError as problem:
        findings.warnings.append(f"the region of bucket {bucket} could not be asked for: {_said(problem)}")
        return
    region = headers.get("x-amz-bucket-region")
    if region is not None and region != settings.region:
        findings.problems.append(
            f"the bucket {bucket} is in {region} and the jobs are in {settings.region}: SageMaker refuses that, and"
            " every exchanged byte would be billed; use a bucket of the same region"
        )


def _check_role(clients: Clients, settings: JobSettings, uri: str, findings: Findings) -> None:
    """Ask IAM whether the role lets the service in, and reaches the run's objects: one resource a call."""
    from botocore.exceptions import BotoCoreError, ClientError

    name = settings.role_arn.rsplit("/", 1)[-1]
    bucket, prefix = parse_s3(uri)
    arn = f"arn:{settings.role_arn.split(':')[1]}:s3:::{bucket}/{prefix}/run.json"
    secure = {"ContextKeyName": "aws:SecureTransport", "ContextKeyValues": ["true"], "ContextKeyType": "boolean"}
    try:
        clients.iam.get_role(RoleName=name)
        answer = clients.iam.simulate_principal_policy(
            PolicySourceArn=settings.role_arn,
            ActionNames=list(OBJECT_ACTIONS),
            ResourceArns=[arn],
            ContextEntries=[secure],  # type: ignore[list-item]
        )
    except ClientError as problem:
        if errors.code(problem) == "NoSuchEntity":
            findings.problems.append(f"the role {settings.role_arn} does not exist: run `pulumi up`")
        else:
            findings.warnings.append(f"the jobs' role could not be checked: {_said(problem)}")
        return
    except BotoCoreError as problem:
        findings.warnings.append(f"the jobs' role could not be checked: {_said(problem)}")
        return
    denied = [result["EvalActionName"] for result in answer["EvaluationResults"] if result["EvalDecision"] != "allowed"]
    if denied:
        findings.problems.append(
            f"the jobs' role {name} may not {', '.join(denied)} on s3://{bucket}/{prefix}/: give it the policy that"
            " `access` prints, or run `pulumi up`"
        )


def _said(problem: Exception) -> str:
    from botocore.exceptions import ClientError

    return errors.text(problem) if isinstance(problem, ClientError) else str(problem)
