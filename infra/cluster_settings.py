"""`eks` and `job` of the stack's configuration: a cluster, and a run that the stack itself starts on it."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from diloco.exchange import layout
from infra.fields import Principal, checked


def _is_any_range(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as problem:
        raise ValueError("a range of addresses, such as 203.0.113.0/24") from problem
    return value


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, allow_inf_nan=False, str_strip_whitespace=True
    )


class NodeSettings(_Section):
    """`eks.nodes`: the managed node group of a cluster that is created with `eks.mode nodes`."""

    instance_types: list[
        Annotated[str, checked(r"[a-z0-9-]+\.[a-z0-9]+", "an EC2 instance type, such as g5.2xlarge")]
    ] = Field(["m7i.xlarge"], min_length=1)
    ami_type: Literal[
        "AL2023_x86_64_NVIDIA", "AL2023_x86_64_STANDARD", "BOTTLEROCKET_x86_64", "BOTTLEROCKET_x86_64_NVIDIA"
    ] = "BOTTLEROCKET_x86_64"
    device_plugin: (
        Annotated[
            str,
            checked(
                r"[^\s@]+(?:@sha256:[0-9a-f]{64}|:(?!latest$)[\w][\w.-]{0,127})",
                "an image with its version or digest: registry/nvidia/k8s-device-plugin:v…",
            ),
        ]
        | None
    ) = None
    """NVIDIA's device plugin, which AL2023's nodes do not bring."""
    spot: bool = False
    disk_gb: int = Field(100, ge=20, le=16_384)
    min: int = Field(0, ge=0, le=450)
    desired: int = Field(2, ge=0, le=450)
    max: int = Field(8, ge=1, le=450)

    def problems(self) -> list[str]:
        """What of it can't be together."""
        found = []
        if not self.min <= self.desired <= self.max:
            found.append(f"eks.nodes.desired {self.desired}: allowed: from eks.nodes.min to eks.nodes.max")
        if (self.ami_type == "AL2023_x86_64_NVIDIA") != (self.device_plugin is not None):
            found.append(
                "eks.nodes.devicePlugin: allowed with eks.nodes.amiType AL2023_x86_64_NVIDIA, and needed there: without"
                " it no node has nvidia.com/gpu"
            )
        with_gpu = [name for name in self.instance_types if name.startswith(("g", "p"))]
        if with_gpu and not self.ami_type.endswith("NVIDIA"):
            found.append(
                f"eks.nodes.amiType {self.ami_type!r}: nodes of {', '.join(with_gpu)} would have no nvidia.com/gpu; "
                "allowed: AL2023_x86_64_NVIDIA, BOTTLEROCKET_x86_64_NVIDIA"
            )
        return found


class EksSettings(_Section):
    """`eks`: a cluster for runs as Indexed Jobs."""

    adopt: Annotated[str, checked(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", "a cluster's name")] | None = None
    """A cluster that exists; only what a run needs in it is made."""
    mode: Literal["auto", "nodes"] = "auto"
    version: Annotated[str, checked(r"1\.\d{2}", "a Kubernetes version, such as 1.34")] | None = None
    private: bool = False
    """No public endpoint: the API is reached from the VPC only."""
    public_access_cidrs: list[Annotated[str, AfterValidator(_is_any_range)]] = []
    admins: list[Principal] = []
    """IAM principals that administer the cluster that is created; `pulumi up` must be one of them."""
    nodes: NodeSettings = NodeSettings()
    namespace: Annotated[
        str, checked(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", "a-z, 0-9 and hyphens, not at the ends")
    ] = "diloco"
    service_account: Annotated[
        str, checked(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", "a-z, 0-9 and hyphens, not at the ends")
    ] = "diloco-replica"
    identity: Literal["pod-identity", "irsa"] = "pod-identity"
    oidc_provider_arn: (
        Annotated[str, checked(r"arn:aws[a-z-]*:iam::\d{12}:oidc-provider/.+", "an OIDC provider's ARN")] | None
    ) = None
    """IRSA: the cluster's provider in IAM, if it exists; else one is created."""
    kubeconfig: str | None = None
    """Path of a file that is used instead of the cluster's own address."""
    endpoint_url: Annotated[str, checked(r"https?://\S+", "http://… or https://…")] | None = None
    """An S3 that is not Amazon's, as pods reach it."""

    def problems(self) -> list[str]:
        """What of it can't be together."""
        found = []
        if self.adopt is not None:
            given = [
                name
                for name in ("mode", "version", "private", "public_access_cidrs", "admins", "nodes")
                if name in self.model_fields_set
            ]
            found += [
                f"eks.{to_camel(name)}: an adopted cluster is left as it is; allowed without eks.adopt"
                for name in given
            ]
        else:
            if not self.admins:
                found.append(
                    "eks.admins: missing; allowed: the ARNs of who administers it, `pulumi up`'s own among them"
                )
            if self.private and self.public_access_cidrs:
                found.append("eks.publicAccessCidrs: there is no public endpoint; allowed without eks.private")
            if not self.private and not self.public_access_cidrs:
                found.append(
                    "eks.publicAccessCidrs: missing; allowed: the ranges that reach the API, such as 203.0.113.0/24, or"
                    " eks.private true"
                )
            if self.mode == "auto" and "nodes" in self.model_fields_set:
                found.append("eks.nodes: Auto Mode chooses its nodes; allowed with eks.mode nodes")
            found += self.nodes.problems()
        if self.oidc_provider_arn is not None and self.identity != "irsa":
            found.append("eks.oidcProviderArn: allowed with eks.identity irsa")
        if self.identity == "irsa" and self.adopt is None:
            found.append("eks.identity 'irsa': a cluster that is created has Pod Identity; allowed with eks.adopt")
        return found


class JobSettings(_Section):
    """`job`: a run that the stack itself starts, as an Indexed Job of `eks`."""

    run_id: Annotated[str, checked(layout.RUN_ID, "1 to 40 of a-z, 0-9 and hyphens, not at the ends")]
    replicas: int = Field(ge=1)
    steps: int = Field(ge=1)
    sync_every: int = Field(ge=1)
    fragments: int = Field(1, ge=1)
    sync_delay: int = Field(0, ge=0)
    seed: int = Field(0, ge=0)
    policy: Literal["strict", "skip"] = "strict"
    min_replicas: int | None = Field(None, ge=1)
    trainer_module: str = "diloco.training"
    trainer_fn: str = "diloco_train"
    trainer_kwargs: dict[str, Any] = {}
    cpu: str = "1"
    memory: str = "4Gi"
    shared_memory: str = "1Gi"
    gpus: int = Field(0, ge=0)
    retries: int = Field(3, ge=0)
    queue: str | None = None
    priority_class: str | None = None
    node_selector: dict[str, str] = {}
    token_secret: str | None = None
    """A Secret of the namespace with the key HF_TOKEN."""
    credentials_secret: str | None = None
    """A Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, where pods have no role."""
