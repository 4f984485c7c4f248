"""The contract of outputs: what a launch reads, and what it says of outputs that it can't read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from diloco import stack
from diloco.errors import ConfigurationError
from diloco.stack import NAMES, SCHEMA_VERSION, parse, read_outputs

DIGEST = "sha256:" + "0123456789abcdef" * 4
BUCKET = "diloco-dev-sagemaker-1a2b3c4"
REQUIRED: dict[str, Any] = {
    "schemaVersion": SCHEMA_VERSION,
    "region": "us-west-2",
    "account": "123456789012",
    "bucket": BUCKET,
    "rendezvousUri": f"s3://{BUCKET}/rendezvous",
    "outputUri": f"s3://{BUCKET}/output",
    "imageUri": f"123456789012.dkr.ecr.us-west-2.amazonaws.com/diloco-dev-trainer@{DIGEST}",
    "sagemakerRoleArn": "arn:aws:iam::123456789012:role/diloco-dev-jobs-1234567",
    "launcherPolicyArn": "arn:aws:iam::123456789012:policy/diloco-dev-launcher-1234567",
    "jobNamePrefix": "diloco-dev",
}
OPTIONAL: dict[str, Any] = {
    "kmsKeyArn": "arn:aws:kms:us-west-2:123456789012:key/1234abcd",
    "tags": {"diloco:stack": "dev"},
    "quotas": [
        {
            "name": "ml.g5.2xlarge for training job usage",
            "value": 4,
            "wanted": 8,
            "status": "requested",
            "requestId": "r-1",
        }
    ],
    "subnetIds": ["subnet-1", "subnet-2"],
    "securityGroupIds": ["sg-1"],
    "clusterName": "cluster",
    "namespace": "diloco",
    "serviceAccount": "replica",
    "podRoleArn": "arn:aws:iam::123456789012:role/pods",
}


def test_the_tests_know_every_output() -> None:
    assert REQUIRED.keys() | OPTIONAL.keys() == NAMES


def test_outputs_are_read() -> None:
    outputs = parse(REQUIRED | OPTIONAL, "stack dev")
    assert outputs.bucket == BUCKET
    assert outputs.quotas[0].request_id == "r-1"
    assert outputs.service_account == "replica"
    assert outputs.subnet_ids == ["subnet-1", "subnet-2"]


def test_optional_outputs_may_be_absent_or_null() -> None:
    absent = parse(REQUIRED, "stack dev")
    assert absent.kms_key_arn is None
    assert absent.cluster_name is None
    assert (absent.tags, absent.quotas, absent.subnet_ids) == ({}, [], [])
    assert parse(REQUIRED | dict.fromkeys(OPTIONAL), "stack dev") == absent


def test_outputs_of_ones_own_are_ignored() -> None:
    assert parse(REQUIRED | {"dashboard": "https://example.com", "note": "[secret]"}, "f") == parse(REQUIRED, "f")


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as refused:
        parse(document, "stack dev")
    return str(refused.value)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_output_is_named(name: str) -> None:
    message = refusal({key: value for key, value in REQUIRED.items() if key != name})
    assert message == f"stack dev: missing: {name} (run `pulumi up`)"


def test_all_missing_are_named_and_only_those() -> None:
    message = refusal({"schemaVersion": 1, "region": "us-west-2"})
    assert all(name in message for name in REQUIRED.keys() - {"schemaVersion", "region"})
    assert not any(name in message for name in OPTIONAL)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_secret_is_named(name: str) -> None:
    message = refusal(REQUIRED | OPTIONAL | {name: "[secret]"})
    assert message.startswith(f"stack dev: secret: {name} (")
    assert "missing" not in message


def test_everything_wrong_is_told_at_once() -> None:
    document = REQUIRED | {"bucket": "[secret]", "account": "12", "imageUri": "trainer:latest"}
    del document["region"]
    message = refusal(document)
    assert message.startswith("stack dev: missing: region (run `pulumi up`); secret: bucket (")
    assert "account is '12'" in message
    assert "imageUri is 'trainer:latest'" in message


@pytest.mark.parametrize(("version", "side"), [(0, "the stack (pulumi up)"), (2, "this checkout (git pull)")])
def test_another_version_says_which_side_is_old(version: int, side: str) -> None:
    assert side in refusal(REQUIRED | {"schemaVersion": version})


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(json.dumps(REQUIRED))
    assert read_outputs(path).region == "us-west-2"


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(REQUIRED)))
    assert read_outputs(Path("-")).region == "us-west-2"


@pytest.mark.parametrize(
    ("text", "said"), [("", "no JSON"), ("[1]", "no JSON object"), ("\xff", "no JSON"), (None, "No such file")]
)
def test_a_file_that_holds_no_outputs_is_named_with_the_fix(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "outputs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_outputs(path)
    assert str(path) in str(refused.value)
    assert "pulumi stack output --json" in str(refused.value)


@pytest.mark.parametrize("given", [{}, {"path": Path("f"), "stack": "dev"}])
def test_a_source_is_needed_and_only_one(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="--stack NAME or by --outputs FILE"):
        read_outputs(**given)


# A stand-in for the CLI: what `pulumi stack output` prints is tested with the real one (tests/infra).


def pulumi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "bin" / "pulumi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_a_stack_is_asked_by_name_in_the_projects_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs.json").write_text(json.dumps(REQUIRED))
    pulumi(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/outputs.json')
    monkeypatch.chdir(tmp_path)
    assert read_outputs(stack="dev").bucket == BUCKET
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:3] == ["stack", "output", "--json"]
    assert asked[asked.index("--stack") + 1] == "dev"
    assert "--show-secrets" not in asked
    assert (Path(asked[asked.index("--cwd") + 1]) / "Pulumi.yaml").exists()


def test_what_pulumi_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulumi(tmp_path, monkeypatch, "echo \"error: no stack named 'dev' found\" >&2; exit 255")
    with pytest.raises(ConfigurationError, match="--stack dev: pulumi: no stack named 'dev' found"):
        read_outputs(stack="dev")


def test_no_pulumi_is_told_with_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"no pulumi on PATH: install it .* --outputs"):
        read_outputs(stack="dev")


def test_a_pulumi_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulumi(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(stack, "PULUMI_SECONDS", 0.2)
    with pytest.raises(ConfigurationError, match="no answer"):
        read_outputs(stack="dev")
