"""The image: built on a small base, pushed to a registry, pulled by digest, and run to the end of a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.base_image import INSTALLER, PREFIX, local_base
from tests.support.images import ROOT, Buildah, ImageError, available, build_and_push
from tests.support.sagemaker.ministack import ministack

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.support.images import Container
    from tests.support.sagemaker import Emulator

pytestmark = [
    pytest.mark.timeout(2400),  # the first test's set-up makes a base image from nothing
    pytest.mark.xdist_group("image"),
    pytest.mark.skipif(not available(), reason="needs root: apt-get install buildah debootstrap"),
]

REPOSITORY = "diloco/trainer"
BUCKET = "diloco-sagemaker-test"
INPUTS = ("container", "diloco", "LICENSE", "README.md", "pyproject.toml", "requirements.lock", ".dockerignore")
WRITABLE = ("/tmp", "/opt/ml")  # noqa: S108 - in the image
LEFTOVERS = ("/wheels", "/source", "/hatchling", "/root/.cache", "/tmp/")  # noqa: S108 - in the image
MODULE = ("python", "-m", "diloco.replica_entrypoint")
KWARGS = {"steps": 4, "sync_every": 2, "fragments": 1, "sync_delay": 0, "seed": 0, "batch_size": 2, "eval_batches": 1}


class Published(NamedTuple):
    """The image as its users get it."""

    digest: str
    image: str
    """Id of what was pulled."""
    base: str


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A registry and a bucket."""
    with ministack(tmp_path_factory.mktemp("ministack")) as emulator:
        emulator.client("ecr").create_repository(repositoryName=REPOSITORY, imageTagMutability="IMMUTABLE")
        emulator.client("s3").create_bucket(Bucket=BUCKET)
        yield emulator


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image is built from; the checkout may change while the tests run."""
    folder = tmp_path_factory.mktemp("context")
    for name in INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def repository(emulator: Emulator) -> str:
    return f"{emulator.endpoint_url.removeprefix('http://')}/{REPOSITORY}"


def publish(emulator: Emulator, context: Path, tag: str, base: str) -> str:
    dockerfile = context / "container" / "Dockerfile"
    return build_and_push(
        f"{repository(emulator)}:{tag}", context, dockerfile=dockerfile, build_args={"BASE_IMAGE": base}
    )


@pytest.fixture(scope="module")
def published(emulator: Emulator, context: Path) -> Iterator[Published]:
    buildah = Buildah()
    base = local_base(buildah)
    digest = publish(emulator, context, "first", base)
    image = buildah.pull(f"{repository(emulator)}@{digest}")
    yield Published(digest, image, base)
    buildah.remove(image)


@pytest.fixture
def container(published: Published) -> Iterator[Container]:
    with Buildah().container(published.image) as container:
        yield container


def env(emulator: Emulator, run: str, **more: str) -> dict[str, str]:
    """What a backend gives a replica: where AWS is, and the contract."""
    return {
        "AWS_ENDPOINT_URL": emulator.endpoint_url,
        "AWS_ACCESS_KEY_ID": emulator.access_key,
        "AWS_SECRET_ACCESS_KEY": emulator.secret_key,
        "AWS_REGION": emulator.region,
        "RENDEZVOUS_URI": f"s3://{BUCKET}/runs/{run}",
        "WORLD_SIZE": "1",
        "DILOCO_TRAINER_KWARGS_JSON": json.dumps(KWARGS),
        "DILOCO_EXCHANGE_JSON": json.dumps({"timeout": 600}),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The replica's own last line: buildah adds the exit code below it."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("diloco: ")]
    return lines[-1] if lines else done.stderr


def objects(emulator: Emulator, run: str) -> set[str]:
    pages = emulator.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"runs/{run}/")
    return {entry["Key"].removeprefix(f"runs/{run}/") for page in pages for entry in page.get("Contents", ())}


def test_the_registry_holds_it_by_digest(emulator: Emulator, published: Published) -> None:
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", published.digest)
    (found,) = emulator.client("ecr").describe_images(repositoryName=REPOSITORY)["imageDetails"]
    assert (found["imageDigest"], found["imageTags"]) == (published.digest, ["first"])
    assert found["imageManifestMediaType"] == "application/vnd.docker.distribution.manifest.v2+json"


def test_says_what_it_is_and_how_it_starts(published: Published) -> None:
    config = Buildah().inspect(published.image)["config"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = {
        name.removeprefix("org.opencontainers.image."): value
        for name, value in config["Labels"].items()
        if name.startswith("org.opencontainers.image.")
    }
    assert labels.pop("description")
    assert labels == {
        "title": project["name"],
        "licenses": project["license"],
        "version": project["version"],
        "revision": "",
        "base.name": published.base,
    }
    assert config["Entrypoint"] == ["/usr/local/bin/diloco-replica"]
    assert not config.get("Cmd")


def test_the_same_inputs_make_the_same_layers(
    emulator: Emulator, context: Path, published: Published, tmp_path: Path
) -> None:
    """Whoever builds it: other times, other modes, a secret and byte code lying about in the checkout."""
    other = tmp_path / "elsewhere"
    shutil.copytree(context, other, copy_function=shutil.copyfile)
    for path in other.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1_700_000_000, 1_700_000_000))
    (other / ".env").write_text("AWS_SECRET_ACCESS_KEY=not-a-key")
    (other / "Pulumi.prod.yaml").write_text("secret: not-a-secret")
    (other / "diloco" / "__pycache__").mkdir()
    (other / "diloco" / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"old")
    assert publish(emulator, other, "second", published.base) == published.digest


def test_holds_the_locks_versions_and_the_bases_torch(container: Container) -> None:
    script = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in m.distributions()}))"
    )
    held = json.loads(container.run("-c", script, entrypoint=["python"]).stdout)
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    assert held.pop("torch") == importlib.metadata.version("torch")
    assert {
        name: version for name, version in held.items() if locked.get(name, version).lower() != version.lower()
    } == {}
    assert {"torchft", "transformers", "datasets", "s3fs", "obstore", "boto3", "pydantic"} <= held.keys()
    assert not {"ministack", "pytest", "pulumi"} & held.keys()
    installer = container.run("-c", f"cat /{PREFIX}/lib/python*/site-packages/torch-*/INSTALLER", entrypoint=["sh"])
    assert installer.stdout == INSTALLER


def test_a_base_without_torch_is_refused(published: Published, context: Path, tmp_path: Path) -> None:
    buildah = Buildah()
    torch = f"/{PREFIX}/lib/python*/site-packages/torch"
    (tmp_path / "Dockerfile").write_text(f"FROM {published.base}\nRUN rm -r {torch} {torch}-*\n")
    base = buildah.build(tmp_path, tag="localhost/diloco-test-base:without-torch")
    try:
        with pytest.raises(ImageError, match="BASE_IMAGE has no torch: give one that has"):
            buildah.build(
                context,
                dockerfile=context / "container" / "Dockerfile",
                build_args={"BASE_IMAGE": "localhost/diloco-test-base:without-torch"},
            )
    finally:
        buildah.remove(base)


def test_keeps_nothing_of_the_build(container: Container) -> None:
    held = {path for path, _ in container.files()}
    assert not {path for path in held if path.startswith(LEFTOVERS)}
    ours = {path for path in held if "/site-packages/diloco/" in path}
    assert any(path.endswith("/diloco/replica_entrypoint.py") for path in ours)
    assert not {path for path in ours if path.endswith(".pyc")}
    pip = container.run("-c", "cat /etc/pip.conf", entrypoint=["sh"])
    assert pip.stdout == ""


@pytest.mark.parametrize(
    "entrypoint", [None, ("/usr/local/bin/diloco-replica",), MODULE], ids=["image", "path", "module"]
)
@pytest.mark.parametrize(
    ("arguments", "more", "code", "line"),
    [
        (["train"], {"RENDEZVOUS_URI": "s3://a/b"}, 78, "missing: --world-size or WORLD_SIZE, --rank or REPLICA_RANK"),
        (["serve"], {}, 78, "argument command: invalid choice: 'serve'"),
    ],
    ids=["missing", "serve"],
)
def test_bad_configuration_ends_with_78_however_it_is_started(
    container: Container,
    entrypoint: tuple[str, ...] | None,
    arguments: list[str],
    more: Mapping[str, str],
    code: int,
    line: str,
) -> None:
    done = container.run(*arguments, entrypoint=entrypoint, env=more)
    assert (done.returncode, done.stdout) == (code, "")
    assert last_line(done).startswith(f"diloco: error: {line}")
    assert "Traceback" not in done.stderr


def test_a_lost_rendezvous_ends_with_69(container: Container, emulator: Emulator) -> None:
    missing = env(emulator, "lost", REPLICA_RANK="0", RENDEZVOUS_URI="s3://no-such-bucket/runs/lost")
    done = container.run("train", env=missing)
    assert done.returncode == 69
    assert "no-such-bucket" in last_line(done)


def test_one_replica_as_root_writes_nowhere_else(container: Container, emulator: Emulator) -> None:
    """Root could write anywhere, so what it writes shows where a replica needs to."""
    container.run("-c", "pass", entrypoint=["python"])  # buildah makes its own mount points
    before = dict(container.files())
    done = container.run("train", env=env(emulator, "alone", REPLICA_RANK="0"))
    assert done.returncode == 0, done.stderr
    after = dict(container.files())
    written = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    touched_by_buildah = {"/", "/run"}  # its mount points come and go there
    assert {path for path in written if not path.startswith(WRITABLE)} <= touched_by_buildah
    assert {"final/result.json", "final/model/model.safetensors"} <= objects(emulator, "alone")


def test_two_replicas_of_two_backends_finish_one_run(published: Published, emulator: Emulator) -> None:
    """Rank 0 as SageMaker starts it, as root; rank 1 as a pod of an Indexed Job, as a user without a name or home."""
    buildah = Buildah()
    common = {"WORLD_SIZE": "2"}
    with (
        buildah.container(published.image) as first,
        buildah.container(published.image) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        ends = [
            pool.submit(first.run, "train", env=env(emulator, "pair", REPLICA_RANK="0", **common)),
            pool.submit(
                second.run,
                *("--world-size", "2"),
                entrypoint=MODULE,
                env=env(emulator, "pair", JOB_COMPLETION_INDEX="1", **common),
                user="12345:6789",
            ),
        ]
        done = [end.result() for end in ends]
    assert [end.returncode for end in done] == [0, 0], "\n".join(end.stderr for end in done)
    held = objects(emulator, "pair")
    assert {"final/result.json", "final/model/config.json"} <= held
    commits = sorted(key for key in held if key.startswith("commits/"))
    assert len(commits) >= 2
    record = json.loads(emulator.client("s3").get_object(Bucket=BUCKET, Key=f"runs/pair/{commits[0]}")["Body"].read())
    assert len(record["participants"]) == 2


def test_a_trainer_beside_it_is_found(published: Published, emulator: Emulator, tmp_path: Path) -> None:
    """`FROM this image`, `COPY trainer.py .`: no path to set."""
    buildah = Buildah()
    end = "raise SystemExit(f'rank {rank} got {sorted(kwargs)}')"
    (tmp_path / "mine.py").write_text(f"def train(*, manager, rank, world_size, **kwargs):\n    {end}\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {published.image}\nCOPY mine.py .\n")
    image = buildah.build(tmp_path)
    try:
        with buildah.container(image) as container:
            given = env(emulator, "mine", REPLICA_RANK="0", DILOCO_TRAINER_MODULE="mine", DILOCO_TRAINER_FN="train")
            done = container.run("train", env=given)
    finally:
        buildah.remove(image)
    assert "rank 0 got ['batch_size'," in last_line(done)
