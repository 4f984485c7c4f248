"""The image on the real engine: built by buildah, pushed to the emulator's registry, named by digest.

The Dockerfile here is a small one over no base, so that a build takes a second; the real one is built and run in
`tests/container`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.infra.conftest import inventory
from tests.support import images

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.infra.conftest import MakeStack
    from tests.support.pulumi_stack import PulumiStack
    from tests.support.sagemaker.emulator import Emulator

SMALL = "FROM scratch\nCOPY pyproject.toml /\nCOPY diloco/__init__.py /diloco/\n"


@pytest.fixture
def building(make_stack: MakeStack) -> Callable[..., PulumiStack]:
    """Makes stacks that build an image of their own."""
    if not images.available():
        pytest.skip("building images needs root, buildah and debootstrap")

    def make(**config: Any) -> PulumiStack:
        stack = make_stack({"image": None, **config})
        (stack.project / "container" / "Dockerfile").write_text(SMALL)
        return stack

    return make


def test_an_image_is_built_once_and_named_by_digest(building: Callable[..., PulumiStack], aws: Emulator) -> None:
    before = inventory(aws)
    stack = building()
    first = stack.up().check()
    uri = stack.outputs()["imageUri"]
    repository, digest = _parts(uri)
    assert _images(aws, repository) == {digest}
    stack.preview("--refresh", "--expect-no-changes").check()

    with (stack.project / "pyproject.toml").open("a") as sources:
        sources.write("# changed\n")
    rebuilt = stack.up().check()
    assert rebuilt.of("update") == {"Image diloco-dev-trainer"}
    changed = stack.outputs()["imageUri"]
    assert changed != uri
    # Runs that were started from the first image can still pull it.
    assert _images(aws, repository) == {digest, _parts(changed)[1]}
    stack.preview("--expect-no-changes").check()

    # A stack for development takes its images along.
    stack.destroy().check()
    assert inventory(aws) == before
    assert "Traceback" not in first.text


def test_outside_dev_a_repository_with_images_is_kept_and_says_how_to_delete_it(
    building: Callable[..., PulumiStack], aws: Emulator
) -> None:
    before = inventory(aws)
    stack = building(dev=False, protect=False)
    stack.up().check()
    repository, digest = _parts(stack.outputs()["imageUri"])

    refused = stack.destroy().failed()

    assert repository in refused.errors
    assert "not empty" in refused.errors
    assert _images(aws, repository) == {digest}

    aws.client("ecr").batch_delete_image(repositoryName=repository, imageIds=[{"imageDigest": digest}])
    stack.destroy().check()
    assert inventory(aws) == before


def test_an_image_that_does_not_build_is_an_error_and_the_next_up_goes_on(
    building: Callable[..., PulumiStack], aws: Emulator
) -> None:
    stack = building()
    dockerfile = stack.project / "container" / "Dockerfile"
    dockerfile.write_text("FROM scratch\nCOPY no-such-file /\n")

    refused = stack.up().failed()
    assert "no-such-file" in refused.errors
    assert "Traceback" not in refused.text

    dockerfile.write_text(SMALL)
    stack.up().check()
    assert _images(aws, _parts(stack.outputs()["imageUri"])[0])
    stack.destroy().check()


def _parts(uri: str) -> tuple[str, str]:
    name, _, digest = uri.partition("@")
    return name.partition("/")[2], digest


def _images(aws: Emulator, repository: str) -> set[str]:
    return {
        image["imageDigest"] for image in aws.client("ecr").describe_images(repositoryName=repository)["imageDetails"]
    }
