"""The image that jobs run in: built, pushed, and named by digest; or one that exists."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pulumi
import pulumi_aws as aws
import pulumi_docker_build as docker_build

from infra.lookups import found

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diloco.access import Place

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "container/Dockerfile",
    "container/start",
    "diloco",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "requirements.lock",
)
"""What `.dockerignore` lets into the build, and so what the image is a function of."""
DOCKERFILE = "container/Dockerfile"

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/(?P<name>[^@]+)@(?P<digest>.+)"
)


def content_hash(root: Path, arguments: Mapping[str, str]) -> str:
    """Hash of all that goes into the image, 16 hexadecimal digits: equal sources, equal tag, on every machine."""
    digest = hashlib.sha256(json.dumps(dict(sorted(arguments.items()))).encode())
    for name in SOURCES:
        top = root / name
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for path in files:
            if path.is_file() and "__pycache__" not in path.parts:
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
                digest.update(data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TrainerImageArgs:
    """Arguments of :class:`TrainerImage`."""

    place: Place
    uri: str | None = None
    """An image that exists, by digest; nothing is created."""
    base_image: str | None = None
    keep: int = 10
    """Images that the repository keeps."""
    kms_key_arn: pulumi.Input[str] | None = None
    """Encrypts the repository; None: ECR's own key."""
    force_delete: bool = False
    """Delete the repository with its images; otherwise destroy refuses while there are any."""
    tags: Mapping[str, str] = field(default_factory=dict)


class TrainerImage(pulumi.ComponentResource):
    """A private ECR repository and the trainer's image in it, or an image that exists."""

    uri: pulumi.Output[str]
    """By digest."""
    repository_arn: pulumi.Output[str] | None
    """None: the image is in no ECR."""

    def __init__(self, name: str, args: TrainerImageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:TrainerImage", name, None, opts)
        if args.uri is not None:
            self._adopt(args.uri, args.place)
        else:
            self._build(name, args)
        self.register_outputs({"uri": self.uri, "repositoryArn": self.repository_arn})

    def _adopt(self, uri: str, place: Place) -> None:
        self.uri = pulumi.Output.from_input(uri)
        self.repository_arn = None
        parts = _ECR.fullmatch(uri)
        if parts is None:
            return
        if parts["region"] != place.region:
            raise pulumi.RunError(
                f"diloco:image.uri {uri!r}: it is in {parts['region']}, and SageMaker pulls only from the jobs' own "
                f"region, {place.region}; copy it there"
            )
        image = found(
            "image.uri",
            uri,
            "name an image that exists and that you may read, or leave it out to build one",
            lambda: aws.ecr.get_image(
                repository_name=parts["name"], image_digest=parts["digest"], registry_id=parts["account"]
            ),
        )
        repository = (
            f"arn:{place.partition}:ecr:{parts['region']}:{parts['account']}:repository/{image.repository_name}"
        )
        self.repository_arn = pulumi.Output.from_input(repository)

    def _build(self, name: str, args: TrainerImageArgs) -> None:
        repository = aws.ecr.Repository(
            f"{name}-trainer",
            force_delete=args.force_delete,
            image_tag_mutability="IMMUTABLE",
            image_scanning_configuration={"scan_on_push": True},
            encryption_configurations=[
                {"encryption_type": "AES256"}
                if args.kms_key_arn is None
                else {"encryption_type": "KMS", "kms_key": args.kms_key_arn}
            ],
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=self),
        )
        aws.ecr.LifecyclePolicy(
            f"{name}-trainer",
            repository=repository.name,
            policy=json.dumps(
                {
                    "rules": [
                        {
                            "rulePriority": 1,
                            "description": f"Keep {args.keep} images",
                            "selection": {
                                "tagStatus": "any",
                                "countType": "imageCountMoreThan",
                                "countNumber": args.keep,
                            },
                            "action": {"type": "expire"},
                        }
                    ]
                }
            ),
            opts=pulumi.ResourceOptions(parent=repository, deleted_with=repository),
        )
        arguments = {} if args.base_image is None else {"BASE_IMAGE": args.base_image}
        tag = content_hash(ROOT, arguments)
        token = aws.ecr.get_authorization_token_output(
            registry_id=repository.registry_id, opts=pulumi.InvokeOptions(parent=self)
        )
        image = docker_build.Image(
            f"{name}-trainer",
            context={"location": str(ROOT)},
            dockerfile={"location": str(ROOT / DOCKERFILE)},
            build_args=arguments,
            platforms=[docker_build.Platform.LINUX_AMD64],  # torch has no torchft wheels for others
            tags=[pulumi.Output.concat(repository.repository_url, ":", tag)],
            # SageMaker takes Docker's manifests only; the export that `push` adds has BuildKit's default, OCI's.
            push=False,
            exports=[{"registry": {"oci_media_types": False, "push": True}}],
            build_on_preview=False,
            registries=[
                {
                    "address": repository.repository_url,
                    "username": token.user_name,
                    "password": pulumi.Output.secret(token.password),
                }
            ],
            # Deleting the resource would delete its manifest, and a repository that holds images must be kept.
            opts=pulumi.ResourceOptions(parent=repository, deleted_with=repository),
        )
        self.uri = pulumi.Output.concat(repository.repository_url, "@", image.digest)
        self.repository_arn = repository.arn
