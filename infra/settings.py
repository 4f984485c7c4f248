"""The stack's configuration, typed and validated: one error lists every problem with key, value and what is allowed.

Keys are those of the project's namespace (`pulumi config set --path 'bucket.versioning' true`); `aws:*` is the
provider's own. `docs/infrastructure.md` describes each.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from diloco.access import LONGEST_KEEP_ALIVE, parse_s3
from diloco.errors import ConfigurationError
from infra.cluster_settings import EksSettings, JobSettings  # noqa: TC001 - pydantic reads the annotations
from infra.fields import Principal, checked

if TYPE_CHECKING:
    from collections.abc import Mapping

PROJECT = "diloco"
DEV_STACKS = frozenset({"dev", "local"})
"""Stacks that may be thrown away, unless config says otherwise."""
MOST_PREFIX = 24
"""Characters of a job name's prefix: a name has 63, and run id, rank and submission must fit."""

_BUCKET = re.compile(r"(?!\d+\.\d+\.\d+\.\d+$)(?!xn--|sthree-|amzn-s3-demo-)[a-z0-9](?:[a-z0-9.-]{1,61})[a-z0-9]")
_RESERVED_ENDS = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3", "-an")
_DIGEST = re.compile(r"[a-z0-9.-]+(?::\d+)?/[a-z0-9._/-]+@sha256:[0-9a-f]{64}")
_SLUG = re.compile(r"[^a-z0-9]+")


def _is_bucket(value: str) -> str:
    if not _BUCKET.fullmatch(value) or ".." in value or value.endswith(_RESERVED_ENDS):
        raise ValueError("3 to 63 of a-z, 0-9, hyphen and dot, beginning and ending with a letter or digit")
    return value


def _is_range(value: str) -> str:
    """AWS takes a VPC of at most /16; below /22 its quarters are too small for jobs."""
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError:
        network = ipaddress.IPv4Network("0.0.0.0/0")
    if not (network.is_private and 16 <= network.prefixlen <= 22):
        raise ValueError("a private range between /16 and /22, such as 10.42.0.0/16")
    return value


def _is_data(value: str) -> str:
    try:
        parse_s3(value)
    except ConfigurationError as problem:
        raise ValueError("s3://bucket/prefix, without wildcards") from problem
    return value


Bucket = Annotated[str, AfterValidator(_is_bucket)]
KeyPrefix = Annotated[
    str,
    checked(r"(?:[A-Za-z0-9!_.-]+(?:/[A-Za-z0-9!_.-]+)*)?", "folders of letters, digits and ! _ . -, no / at the ends"),
]
RoleName = Annotated[
    str, checked(r"[\w+=,.@-]{1,64}", "a role's name (not its ARN): 1 to 64 of letters, digits, + = , . @ _ -")
]
InstanceType = Annotated[
    str, checked(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "an instance type of SageMaker, such as ml.g5.2xlarge")
]
InstancePattern = Annotated[
    str, checked(r"ml\.[a-z0-9*-]+\.[a-z0-9*]+", "an instance type or a pattern of them, such as ml.g5.*")
]
KeyArn = r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[A-Za-z0-9-]+"


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, allow_inf_nan=False, str_strip_whitespace=True
    )


class BucketSettings(_Section):
    """`bucket`: where runs live."""

    name: Bucket | None = None
    """Of a bucket to create; None: generated."""
    adopt: Bucket | None = None
    """An existing bucket, of which nothing is changed."""
    prefix: KeyPrefix = ""
    """Folder in the bucket above `rendezvous/` and `output/`."""
    versioning: bool = False
    log_bucket: Bucket | None = None
    """Existing bucket that gets the access logs."""
    log_prefix: KeyPrefix = "access-logs"

    def problems(self) -> list[str]:
        """What of it can't be together."""
        if self.adopt is None:
            return []
        given = [name for name in ("name", "versioning", "log_bucket") if name in self.model_fields_set]
        return [
            f"bucket.{to_camel(name)}: an adopted bucket is left as it is; allowed: bucket.adopt without it"
            for name in given
        ]


class EncryptionSettings(_Section):
    """`encryption`: by which key objects, and images if wanted, are encrypted."""

    key: Annotated[str, checked(rf"s3|create|{KeyArn}", "s3 (Amazon S3's own keys), create, or a KMS key's ARN")] = "s3"
    repository: bool = False
    """The image repository, too."""

    @property
    def adopted_key(self) -> str | None:
        """The ARN of a key that exists."""
        return self.key if self.key.startswith("arn:") else None

    def problems(self) -> list[str]:
        """What of it can't be together."""
        if self.repository and self.key == "s3":
            return ["encryption.repository true: there is no key; allowed with encryption.key create or a key's ARN"]
        return []


class RoleSettings(_Section):
    """`role`: as whom the jobs run."""

    adopt: RoleName | None = None
    permissions_boundary: (
        Annotated[str, checked(r"arn:aws[a-z-]*:iam::(?:\d{12}|aws):policy/[\w+=,.@/-]+", "a policy's ARN")] | None
    ) = None

    def problems(self) -> list[str]:
        """What of it can't be together."""
        if self.adopt is not None and self.permissions_boundary is not None:
            return ["role.permissionsBoundary: an adopted role is left as it is; allowed: role.adopt without it"]
        return []


class LauncherSettings(_Section):
    """`launcher`: what the launcher may start, and who is one."""

    instance_types: list[InstancePattern] = []
    """None: any."""
    max_keep_alive_seconds: int = Field(LONGEST_KEEP_ALIVE, ge=0, le=LONGEST_KEEP_ALIVE)
    attach_to: list[Principal] = []
    """Empty: the policy is only exported."""


class ImageSettings(_Section):
    """`image`: what the jobs run in."""

    uri: (
        Annotated[str, checked(_DIGEST, "registry/repository@sha256:…: an image by its digest, since tags can move")]
        | None
    ) = None
    """An existing image; nothing is built."""
    base_image: str | None = None
    """Instead of the Dockerfile's own."""
    keep: int = Field(10, ge=1, le=1000)
    """Images that the repository keeps."""

    def problems(self) -> list[str]:
        """What of it can't be together."""
        given = [name for name in ("base_image", "keep") if name in self.model_fields_set]
        if self.uri is None:
            return []
        return [f"image.{to_camel(name)}: nothing is built; allowed without image.uri" for name in given]


class QuotaSettings(_Section):
    """One entry of `quotas`: what is wanted of an instance type."""

    instance_type: InstanceType
    training: int | None = Field(None, ge=1, le=10_000)
    spot: int | None = Field(None, ge=1, le=10_000)
    warm_pool: int | None = Field(None, ge=1, le=10_000)


class NetworkSettings(_Section):
    """`network`: the VPC of the jobs; without it they run in SageMaker's own network."""

    subnet_ids: list[Annotated[str, checked(r"subnet-[0-9a-f]+", "a subnet's id, subnet-…")]] = []
    security_group_ids: list[Annotated[str, checked(r"sg-[0-9a-f]+", "a security group's id, sg-…")]] = []
    egress: Literal["none", "endpoints", "nat"] | None = None
    """Ways out of the VPC that is created, besides Amazon S3."""
    cidr: Annotated[str, AfterValidator(_is_range)] = "10.42.0.0/16"
    hugging_face: bool = False
    """Jobs load models or data by Hugging Face names."""

    @property
    def adopts(self) -> bool:
        """Whether the VPC exists already."""
        return bool(self.subnet_ids or self.security_group_ids)

    def problems(self) -> list[str]:
        """What of it can't be together."""
        found = []
        if self.adopts:
            if not (self.subnet_ids and self.security_group_ids):
                found.append("network: an adopted VPC needs both network.subnetIds and network.securityGroupIds")
            found += [
                f"network.{name}: an adopted VPC is left as it is; allowed without network.subnetIds"
                for name in ("egress", "cidr")
                if name in self.model_fields_set
            ]
        elif self.egress is None:
            found.append(
                "network: allowed: network.egress none, endpoints or nat (creates a VPC), or network.subnetIds"
            )
        if self.hugging_face and self.egress in ("none", "endpoints"):
            found.append(
                f"network.egress {self.egress!r}: Hugging Face is on the internet, and network.huggingFace is true; "
                "allowed: nat"
            )
        return found


class Settings(_Section):
    """All of the project's namespace."""

    dev: bool = False
    """The environment may be thrown away: nothing is protected, images are deleted with their repository."""
    protect: bool | None = None
    job_name_prefix: Annotated[
        str, checked(r"[a-z0-9](?:-?[a-z0-9])*", "a-z, 0-9 and single hyphens, not at the ends")
    ] = Field(max_length=MOST_PREFIX)
    tags: dict[str, str] = {}
    bucket: BucketSettings = BucketSettings()
    encryption: EncryptionSettings = EncryptionSettings()
    role: RoleSettings = RoleSettings()
    launcher: LauncherSettings = LauncherSettings()
    image: ImageSettings = ImageSettings()
    quotas: list[QuotaSettings] = []
    network: NetworkSettings | None = None
    eks: EksSettings | None = None
    job: JobSettings | None = None
    data_uris: list[Annotated[str, AfterValidator(_is_data)]] = []
    secret_arns: list[
        Annotated[
            str,
            checked(r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[\w/+=.@-]+", "the ARN of a secret"),
        ]
    ] = []

    @property
    def protected(self) -> bool:
        """Whether what holds data is protected from deletion."""
        return not self.dev if self.protect is None else self.protect

    @classmethod
    def parse(cls, config: Mapping[str, str], stack: str) -> Self:
        """Read the namespace's keys as the engine hands them over: text, JSON for all that is no text.

        Raises one ConfigurationError that lists every problem.
        """
        problems: list[str] = []
        values: dict[str, Any] = {"dev": stack in DEV_STACKS, "jobNamePrefix": f"{PROJECT}-{slug(stack)}"}
        for key, text in config.items():
            try:
                values[key] = json.loads(text) if _is_structured(key) else text
            except ValueError:
                problems.append(f"{key} {text!r}: allowed: {_shape(key)}; set it with `pulumi config set --path`")
        try:
            settings = cls.model_validate(values)
        except ValidationError as problem:
            problems += [_explain(dict(error)) for error in problem.errors() if error["loc"][0] not in _keys(problems)]
        else:
            problems += settings.problems()
        if problems:
            raise ConfigurationError(
                f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the configuration of stack {stack}:"
                + "".join(f"\n  {PROJECT}:{line}" for line in problems)
            )
        return settings

    def problems(self) -> list[str]:
        """What can't be together, each with what is allowed."""
        found = [
            line
            for section in (self.bucket, self.encryption, self.role, self.image, self.network, self.eks)
            if section is not None
            for line in section.problems()
        ]
        found += [
            f"tags.{name}: allowed: keys that don't begin with aws:" for name in self.tags if name[:4].lower() == "aws:"
        ]
        if self.secret_arns and self.network is not None and self.network.egress == "none":
            found.append(
                "network.egress 'none': jobs could not reach Secrets Manager for secretArns; allowed: endpoints, nat"
            )
        if self.eks is not None and self.eks.adopt is None:
            if self.network is None:
                found.append("network: a cluster needs subnets; allowed: network.egress nat, or network.subnetIds")
            elif self.network.egress in ("none", "endpoints"):
                found.append(
                    f"network.egress {self.network.egress!r}: nodes of EKS need the internet to join; allowed: nat"
                )
        if self.job is not None and self.eks is None:
            found.append("job: there is no cluster; allowed with eks.adopt, or eks to create one")
        types = [quota.instance_type for quota in self.quotas]
        found += [
            f"quotas: {name} is there twice; allowed: once" for name in sorted({t for t in types if types.count(t) > 1})
        ]
        found += [
            f"quotas: {quota.instance_type} wants nothing; allowed: one or more of training, spot, warmPool"
            for quota in self.quotas
            if quota.training is quota.spot is quota.warm_pool is None
        ]
        return found


def slug(stack: str) -> str:
    """A stack's name as it can be part of resources' names."""
    return _SLUG.sub("-", stack.lower()).strip("-")


_FIELDS = {to_camel(name): field for name, field in Settings.model_fields.items()}


def _is_structured(key: str) -> bool:
    field = _FIELDS.get(key)
    if field is None:
        return False
    kinds = [field.annotation, *get_args(field.annotation)]
    return any(
        get_origin(kind) in (list, dict) or (isinstance(kind, type) and issubclass(kind, BaseModel)) for kind in kinds
    )


def _shape(key: str) -> str:
    return "a list" if get_origin(_FIELDS[key].annotation) is list else "an object of keys and values"


def _keys(problems: list[str]) -> set[str]:
    return {line.split()[0] for line in problems}


_WORDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object of keys and values",
    "model_type": "an object of keys and values",
    "missing": "it is needed",
}


def _explain(error: dict[str, Any]) -> str:
    """One problem as `key value: allowed: …`."""
    key = _path(error["loc"])
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{key}: unknown; allowed{_inside(error['loc'])}: {', '.join(_known(error['loc']))}"
    if kind == "missing":
        return f"{key}: missing; it is needed"
    if kind == "value_error":
        allowed = str(context["error"])
    elif kind == "literal_error":
        allowed = str(context["expected"]).replace("'", "")
    elif kind in ("greater_than_equal", "less_than_equal"):
        allowed = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
    elif kind == "string_too_long":
        allowed = f"at most {context['max_length']} characters"
    else:
        allowed = _WORDS.get(kind, error["msg"])
    return f"{key} {error['input']!r}: allowed: {allowed}"


def _path(loc: tuple[str | int, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _inside(loc: tuple[str | int, ...]) -> str:
    return f" in {_path(loc[:-1])}" if len(loc) > 1 else ""


def _known(loc: tuple[str | int, ...]) -> list[str]:
    """The keys that exist beside the one at `loc`."""
    model: type[BaseModel] = Settings
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = next(field for name, field in model.model_fields.items() if to_camel(name) == part)
        kinds = [field.annotation, *get_args(field.annotation)]
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return sorted(to_camel(name) for name in model.model_fields)
