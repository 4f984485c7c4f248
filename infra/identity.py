"""As whom jobs run, and what their launcher may do. The documents are :mod:`diloco.access`'s."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pulumi
import pulumi_aws as aws

from diloco.access import (
    LONGEST_KEEP_ALIVE,
    OBJECT_ACTIONS,
    Place,
    Storage,
    Vpc,
    launcher_policy,
    parse_s3,
    sagemaker_role_policy,
    sagemaker_trust,
)
from infra.lookups import found

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class StorageInputs:
    """What runs use of a bucket: :class:`diloco.access.Storage`, still unknown."""

    bucket: pulumi.Input[str]
    prefixes: tuple[str, ...]
    kms_key_arn: pulumi.Input[str] | None = None

    @property
    def value(self) -> pulumi.Output[Storage]:
        """It, once it is known."""
        return pulumi.Output.all(self.bucket, self.kms_key_arn).apply(
            lambda known: Storage(bucket=known[0], prefixes=self.prefixes, kms_key_arn=known[1])
        )


@dataclass(frozen=True)
class VpcInputs:
    """Where jobs get their network interfaces: :class:`diloco.access.Vpc`, still unknown."""

    subnet_ids: pulumi.Input[Sequence[str]]
    security_group_ids: pulumi.Input[Sequence[str]]


@dataclass(frozen=True)
class SageMakerRoleArgs:
    """Arguments of :class:`SageMakerRole`."""

    place: Place
    storage: StorageInputs
    job_name_prefix: str
    repository_arn: pulumi.Input[str] | None
    """Of the image; None: in no ECR."""
    adopt: str | None = None
    """Name of a role that exists; nothing of it is changed, but it must reach the bucket, data and secrets."""
    data_uris: Sequence[str] = ()
    secret_arns: Sequence[str] = ()
    vpc: VpcInputs | None = None
    permissions_boundary: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


class SageMakerRole(pulumi.ComponentResource):
    """The role that training jobs run as."""

    arn: pulumi.Output[str]
    name: pulumi.Output[str]

    def __init__(self, name: str, args: SageMakerRoleArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:SageMakerRole", name, None, opts)
        if args.adopt is not None:
            self._adopt(args.adopt, args)
        else:
            self._create(name, args)
        self.register_outputs({"arn": self.arn, "name": self.name})

    def _create(self, name: str, args: SageMakerRoleArgs) -> None:
        role = aws.iam.Role(
            f"{name}-jobs",
            description="Training jobs of DiLoCo runs",
            assume_role_policy=json.dumps(sagemaker_trust(args.place, args.job_name_prefix)),
            permissions_boundary=args.permissions_boundary,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=self),
        )
        vpc = args.vpc
        document = pulumi.Output.all(
            args.storage.value,
            args.repository_arn,
            None if vpc is None else vpc.subnet_ids,
            None if vpc is None else vpc.security_group_ids,
        ).apply(
            lambda known: json.dumps(
                sagemaker_role_policy(
                    args.place,
                    known[0],
                    job_name_prefix=args.job_name_prefix,
                    repository_arn=known[1],
                    data_uris=args.data_uris,
                    secret_arns=args.secret_arns,
                    vpc=None if vpc is None else Vpc(tuple(known[2]), tuple(known[3])),
                )
            )
        )
        policy = aws.iam.RolePolicy(
            f"{name}-jobs", role=role.name, policy=document, opts=pulumi.ResourceOptions(parent=role)
        )
        # A role that is handed on has its permissions.
        self.arn = pulumi.Output.all(role.arn, policy.id).apply(lambda known: str(known[0]))
        self.name = role.name

    def _adopt(self, adopt: str, args: SageMakerRoleArgs) -> None:
        role = found(
            "role.adopt",
            adopt,
            "name a role that exists and that SageMaker may assume, or leave it out to create one",
            lambda: aws.iam.get_role(name=adopt),
        )
        if "sagemaker.amazonaws.com" not in role.assume_role_policy:
            raise pulumi.RunError(
                f"diloco:role.adopt {adopt!r}: its trust policy does not name sagemaker.amazonaws.com, so no job could "
                "run as it; add the service there, or leave role.adopt out to create a role"
            )
        # The ARN comes out of the checks, so that nothing is built on a role that can't do its work.
        self.arn = self._reaches(role.arn, adopt, args)
        self.name = pulumi.Output.from_input(role.name)

    def _reaches(self, arn: str, adopt: str, args: SageMakerRoleArgs) -> pulumi.Output[str]:
        """The role's ARN if it may do everything in the bucket; RunError that names what it may not."""
        place, storage = args.place, args.storage

        def simulate(
            actions: Sequence[str], resource: pulumi.Input[str], **context: str
        ) -> pulumi.Output[aws.iam.GetPrincipalPolicySimulationResult]:
            return aws.iam.get_principal_policy_simulation_output(
                policy_source_arn=arn,
                action_names=list(actions),
                # One a call: given several, a role that reaches one of them only could pass.
                resource_arns=pulumi.Output.from_input(resource).apply(lambda known: [known]),
                contexts=[
                    {"key": name.replace("_", ":"), "type": "string", "values": [value]}
                    for name, value in context.items()
                ],
                opts=pulumi.InvokeOptions(parent=self),
            )

        bucket = pulumi.Output.from_input(storage.bucket).apply(place.bucket)
        checks = [
            simulate(OBJECT_ACTIONS, pulumi.Output.concat(bucket, f"/{prefix}/probe")) for prefix in storage.prefixes
        ]
        checks += [simulate(["s3:ListBucket"], bucket, s3_prefix=f"{prefix}/") for prefix in storage.prefixes]
        if storage.kms_key_arn is not None:
            service = f"s3.{place.region}.{place.domain}"
            checks.append(simulate(["kms:Decrypt", "kms:GenerateDataKey"], storage.kms_key_arn, kms_ViaService=service))
        for uri in args.data_uris:
            name, prefix = parse_s3(uri)
            checks.append(simulate(["s3:GetObject"], place.bucket(name, f"{prefix}/probe" if prefix else "probe")))
        checks += [simulate(["secretsmanager:GetSecretValue"], secret) for secret in args.secret_arns]

        def judge(answers: Sequence[aws.iam.GetPrincipalPolicySimulationResult]) -> str:
            denied: dict[str, set[str]] = {}
            for result in (result for answer in answers for result in answer.results):
                if not result.allowed:
                    denied.setdefault(result.resource_arn, set()).add(result.action_name)
            if denied:
                missing = "; ".join(f"{', '.join(sorted(actions))} on {what}" for what, actions in denied.items())
                raise pulumi.RunError(
                    f"diloco:role.adopt {adopt!r}: it may not {missing}. Grant it (scripts/launch.py access prints the "
                    "policy), or leave role.adopt out to create a role that may"
                )
            return arn

        return pulumi.Output.all(*checks).apply(judge)


@dataclass(frozen=True)
class LauncherPolicyArgs:
    """Arguments of :class:`LauncherPolicy`."""

    place: Place
    storage: StorageInputs
    job_name_prefix: str
    role_arn: pulumi.Input[str]
    repository_arn: pulumi.Input[str] | None
    instance_types: Sequence[str] = ()
    max_keep_alive_seconds: int = LONGEST_KEEP_ALIVE
    attach_to: Sequence[str] = ()
    """ARNs of users, groups and roles."""
    tags: Mapping[str, str] = field(default_factory=dict)


class LauncherPolicy(pulumi.ComponentResource):
    """What `scripts/launch.py` needs, as a managed policy."""

    arn: pulumi.Output[str]

    def __init__(self, name: str, args: LauncherPolicyArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:LauncherPolicy", name, None, opts)
        document = pulumi.Output.all(args.storage.value, args.role_arn, args.repository_arn).apply(
            lambda known: json.dumps(
                launcher_policy(
                    args.place,
                    known[0],
                    job_name_prefix=args.job_name_prefix,
                    role_arn=known[1],
                    repository_arn=known[2],
                    instance_types=args.instance_types,
                    max_keep_alive_seconds=args.max_keep_alive_seconds,
                )
            )
        )
        policy = aws.iam.Policy(
            f"{name}-launcher",
            description="Launching DiLoCo runs",
            policy=document,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.arn = policy.arn
        for principal in args.attach_to:
            self._attach(name, principal, policy)
        self.register_outputs({"arn": self.arn})

    @staticmethod
    def _attach(name: str, principal: str, policy: aws.iam.Policy) -> None:
        kind, _, path = principal.rpartition(":")[2].partition("/")
        who = path.rpartition("/")[2]  # a path is no part of the name
        opts = pulumi.ResourceOptions(parent=policy)
        if kind == "user":
            aws.iam.UserPolicyAttachment(f"{name}-user-{who}", user=who, policy_arn=policy.arn, opts=opts)
        elif kind == "group":
            aws.iam.GroupPolicyAttachment(f"{name}-group-{who}", group=who, policy_arn=policy.arn, opts=opts)
        else:
            aws.iam.RolePolicyAttachment(f"{name}-role-{who}", role=who, policy_arn=policy.arn, opts=opts)
