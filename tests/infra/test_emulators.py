"""What the project needs of AWS, on two emulators that know nothing of each other: MiniStack and LocalStack's core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import yaml  # type: ignore[import-untyped]
from botocore.exceptions import ClientError

from diloco.embedded import BUCKET
from tests.infra.conftest import LOOPBACK
from tests.support.engine import ROOT, require
from tests.support.localstack import localstack
from tests.support.pulumi_stack import PulumiStack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.sagemaker.emulator import Emulator

PORT = "127.0.0.1:4566"
EXCHANGE = (
    "tests/integration/test_exchange_stores.py",
    "tests/integration/test_exchange_whole_rounds.py::test_all_get_the_same_bits",
    "tests/integration/test_exchange_whole_rounds.py::test_a_run_from_its_first_claim_to_its_result",
)


@pytest.fixture(scope="module", params=["ministack", "localstack"])
def emulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """Each of the two, one for all tests here."""
    if request.param == "ministack":
        yield request.getfixturevalue("aws")
    else:
        with localstack(tmp_path_factory.mktemp("localstack")) as running:
            yield running


def test_the_stack_file_for_an_emulator_stands_the_environment_up(emulator: Emulator, tmp_path: Path) -> None:
    """`Pulumi.local.yaml` as it is, but for the port: bucket, roles and policies, and who asks for them."""
    require("pulumi", "pulumi-language-python")
    text = (ROOT / "Pulumi.local.yaml").read_text()
    assert text.count(PORT) > 1
    config = yaml.safe_load(text.replace(f"http://{PORT}", emulator.endpoint_url))["config"]
    # The endpoints of the file alone lead to the emulator: nothing in the environment does.
    with PulumiStack(tmp_path, name="local", environment=LOOPBACK, config=config) as stack:
        stack.up().check()
        outputs = stack.outputs()
        stack.preview("--refresh", "--expect-no-changes").check()

        s3, iam = emulator.client("s3"), emulator.client("iam")
        assert outputs["account"] == emulator.account
        assert s3.get_bucket_location(Bucket=outputs["bucket"])["LocationConstraint"] in {None, "us-east-1"}
        assert all(s3.get_public_access_block(Bucket=outputs["bucket"])["PublicAccessBlockConfiguration"].values())
        trust = iam.get_role(RoleName=outputs["sagemakerRoleArn"].rpartition("/")[2])["Role"][
            "AssumeRolePolicyDocument"
        ]
        assert trust["Statement"][0]["Principal"] == {"Service": "sagemaker.amazonaws.com"}

        stack.destroy().check()
        with pytest.raises(ClientError, match="404"):
            s3.head_bucket(Bucket=outputs["bucket"])


@pytest.mark.parametrize("emulator", ["localstack"], indirect=True)
def test_the_exchange_runs(emulator: Emulator) -> None:
    """Its own tests, in a process of their own against this S3; that they pass on MiniStack, they tell themselves."""
    emulator.client("s3").create_bucket(Bucket=BUCKET)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *EXCHANGE, "--stores", "s3", "-k", "s3", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "DILOCO_TEST_S3": emulator.endpoint_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout


def test_who_a_session_of_a_role_is(emulator: Emulator) -> None:
    trust = {
        "Effect": "Allow",
        "Principal": {"AWS": f"arn:aws:iam::{emulator.account}:root"},
        "Action": "sts:AssumeRole",
    }
    iam = emulator.client("iam")
    iam.create_role(
        RoleName="who", AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    )
    try:
        arn = f"arn:aws:iam::{emulator.account}:role/who"
        session = emulator.client("sts").assume_role(RoleArn=arn, RoleSessionName="test")["Credentials"]
        caller = emulator.client("sts", session).get_caller_identity()
        assert caller["Arn"] == f"arn:aws:sts::{emulator.account}:assumed-role/who/test"
    finally:
        iam.delete_role(RoleName="who")


def test_logs_of_a_job_are_read_by_prefix_and_page(emulator: Emulator) -> None:
    logs, group = emulator.client("logs"), "/aws/sagemaker/TrainingJobs"
    logs.create_log_group(logGroupName=group)
    try:
        now = int(time.time() * 1000)
        for rank in range(2):
            stream = f"diloco-dev-run-{rank}/algo-1-1"
            logs.create_log_stream(logGroupName=group, logStreamName=stream)
            logs.put_log_events(
                logGroupName=group,
                logStreamName=stream,
                logEvents=[{"timestamp": now + line, "message": f"rank {rank} line {line}"} for line in range(30)],
            )
        named = logs.describe_log_streams(logGroupName=group, logStreamNamePrefix="diloco-dev-run-1/")["logStreams"]
        assert [stream["logStreamName"] for stream in named] == ["diloco-dev-run-1/algo-1-1"]

        told, token = [], None
        while True:
            page = logs.get_log_events(
                logGroupName=group,
                logStreamName="diloco-dev-run-1/algo-1-1",
                startFromHead=True,
                limit=10,
                **({"nextToken": token} if token else {}),
            )
            told += [event["message"] for event in page["events"]]
            if page["nextForwardToken"] == token:
                break
            token = page["nextForwardToken"]
        assert told == [f"rank 1 line {line}" for line in range(30)]
    finally:
        logs.delete_log_group(logGroupName=group)
