"""Which policy documents a stack, or a bucket without one, needs: :mod:`diloco.access` for given names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from diloco.access import (
    Place,
    Storage,
    Vpc,
    bucket_policy,
    entra_trust,
    google_trust,
    key_policy,
    launcher_policy,
    parse_s3,
    replica_policy,
    sagemaker_role_policy,
    sagemaker_trust,
)
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from diloco.access import Document
    from diloco.stack import StackOutputs

_ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.[a-z.]+/(?P<name>[^@:]+)")
AUDIENCE = "sts.amazonaws.com"
"""What GCP's tokens are asked for, unless another is named."""


@dataclass(frozen=True)
class Grants:
    """The names that documents are made of."""

    place: Place
    storage: Storage
    job_name_prefix: str
    role_arn: str
    repository_arn: str | None
    vpc: Vpc | None = None
    data_uris: tuple[str, ...] = ()
    secret_arns: tuple[str, ...] = ()

    @classmethod
    def checked(
        cls,
        *,
        bucket: str | None,
        region: str | None,
        account: str | None,
        partition: str,
        prefix: str,
        job_name_prefix: str,
        role_arn: str | None,
        repository_arn: str | None,
        kms_key_arn: str | None,
    ) -> Self:
        """From the command line's options. Raises ConfigurationError naming those that are missing or malformed."""
        if bucket is None or region is None or account is None:
            needed = {"--bucket": bucket, "--region": region, "--account": account}
            missing = ", ".join(name for name, value in needed.items() if value is None)
            raise ConfigurationError(f"give a stack by --stack or --outputs, or {missing}")
        if not re.fullmatch(r"\d{12}", account):
            raise ConfigurationError(f"--account {account}: an account has 12 digits")
        place = Place(region=region, account=account, partition=partition)
        above = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        return cls(
            place=place,
            storage=Storage(bucket, (f"{above}rendezvous", f"{above}output"), kms_key_arn),
            job_name_prefix=job_name_prefix,
            role_arn=role_arn or f"arn:{partition}:iam::{account}:role/{job_name_prefix}-jobs",
            repository_arn=repository_arn,
        )

    def documents(self) -> dict[str, Document]:
        """Every document of an environment on AWS, by name."""
        return {
            "sagemakerTrust": sagemaker_trust(self.place, self.job_name_prefix),
            "sagemakerRole": sagemaker_role_policy(
                self.place,
                self.storage,
                job_name_prefix=self.job_name_prefix,
                repository_arn=self.repository_arn,
                data_uris=self.data_uris,
                secret_arns=self.secret_arns,
                vpc=self.vpc,
            ),
            "launcher": launcher_policy(
                self.place,
                self.storage,
                job_name_prefix=self.job_name_prefix,
                role_arn=self.role_arn,
                repository_arn=self.repository_arn,
            ),
            "bucket": bucket_policy(self.place, self.storage.bucket),
            "replica": self.replica(),
        } | ({} if self.storage.kms_key_arn is None else {"key": key_policy(self.place)})

    def replica(self) -> Document:
        """What a replica may do that runs neither on SageMaker nor as the stack's pods."""
        return replica_policy(self.place, self.storage, data_uris=self.data_uris, secret_arns=self.secret_arns)


def grants_of(outputs: StackOutputs) -> Grants:
    """The names of a stack."""
    partition = outputs.sagemaker_role_arn.split(":")[1]
    found = _ECR.match(outputs.image_uri)
    vpc = Vpc(tuple(outputs.subnet_ids), tuple(outputs.security_group_ids)) if outputs.subnet_ids else None
    return Grants(
        place=Place(region=outputs.region, account=outputs.account, partition=partition),
        storage=Storage(
            outputs.bucket,
            (parse_s3(outputs.rendezvous_uri)[1], parse_s3(outputs.output_uri)[1]),
            outputs.kms_key_arn,
        ),
        job_name_prefix=outputs.job_name_prefix,
        role_arn=outputs.sagemaker_role_arn,
        repository_arn=None
        if found is None
        else f"arn:{partition}:ecr:{found['region']}:{found['account']}:repository/{found['name']}",
        vpc=vpc,
    )


def federated_documents(
    grants: Grants, cloud: str, *, subject: str | None, audience: str | None, tenant: str | None
) -> dict[str, Document]:
    """Trust and permissions of an AWS role for replicas on another cloud, which show that cloud's own token.

    There is no key to copy anywhere: the replica's environment names the role (AWS_ROLE_ARN) and a file with the token
    (AWS_WEB_IDENTITY_TOKEN_FILE). Raises ConfigurationError naming the options that are missing.
    """
    if cloud == "gcp":
        if subject is None:
            raise ConfigurationError(
                "--cloud gcp needs --subject, the unique id of the replicas' service account: gcloud iam "
                "service-accounts describe EMAIL --format 'value(uniqueId)'"
            )
        trust = google_trust(subject, audience or AUDIENCE)
    else:
        needed = {"--subject": subject, "--audience": audience, "--tenant": tenant}
        if missing := [name for name, value in needed.items() if not value]:
            raise ConfigurationError(
                f"--cloud azure needs {', '.join(missing)}: the managed identity's object id, the application id URI "
                "that tokens are asked for, and the tenant's id"
            )
        trust = entra_trust(grants.place, str(tenant), str(subject), str(audience))
    return {"trust": trust, "replica": grants.replica()}
