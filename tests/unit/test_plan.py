"""`plan` and `access`: every output of a stack is used, and what contradicts another, or does not fit, is said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diloco.cli import main
from diloco.plan import lines, make_plan
from diloco.stack import NAMES, parse
from tests.unit.test_stack import OPTIONAL, REQUIRED

if TYPE_CHECKING:
    from pathlib import Path

FULL = REQUIRED | OPTIONAL
RUN: dict[str, Any] = {"run_id": "r1", "replicas": 3}


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    path = tmp_path / "outputs.json"
    path.write_text(json.dumps(FULL))
    return path


# Another value of each output that leaves the whole consistent.
OTHER: dict[str, Any] = {
    "region": ("us-east-1", {"imageUri": FULL["imageUri"].replace("us-west-2", "us-east-1")}),
    "account": (
        "210987654321",
        {name: FULL[name].replace("123456789012", "210987654321") for name in ("sagemakerRoleArn", "podRoleArn")},
    ),
    "bucket": ("b2", {"rendezvousUri": "s3://b2/rendezvous", "outputUri": "s3://b2/output"}),
    "rendezvousUri": (f"s3://{FULL['bucket']}/elsewhere", {}),
    "outputUri": (f"s3://{FULL['bucket']}/elsewhere", {}),
    "imageUri": (FULL["imageUri"].replace("trainer", "other"), {}),
    "sagemakerRoleArn": (FULL["sagemakerRoleArn"] + "x", {}),
    "launcherPolicyArn": (FULL["launcherPolicyArn"] + "x", {}),
    "jobNamePrefix": ("other", {}),
    "kmsKeyArn": (None, {}),
    "tags": ({"team": "a"}, {}),
    "quotas": ([{"name": "ml.p4d.24xlarge for training job usage", "value": 1, "wanted": 1, "status": "enough"}], {}),
    "subnetIds": ([], {}),
    "securityGroupIds": (["sg-2"], {}),
    "clusterName": (None, {}),
    "namespace": ("other", {}),
    "serviceAccount": ("other", {}),
    "podRoleArn": (FULL["podRoleArn"] + "x", {}),
}


def told(document: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    plan = make_plan(parse(document, "f"), **RUN)
    return lines(plan), plan.document()


def test_every_output_is_known_to_these_tests() -> None:
    assert OTHER.keys() == NAMES - {"schemaVersion"}  # what a wrong version gets is tested with the stack


@pytest.mark.parametrize("name", OTHER)
def test_every_output_is_used(name: str) -> None:
    value, others = OTHER[name]
    text, document = told(FULL)
    other_text, other_document = told(FULL | others | {name: value})
    without_it = told(FULL | others)[0] if name not in ("region", "account", "bucket") else text
    assert other_text != without_it
    assert other_document != document


def test_jobs_are_named_by_prefix_run_rank_and_submission() -> None:
    document = told(FULL)[1]
    assert [job["name"] for job in document["jobs"]] == [f"diloco-dev-r1-r{rank}-s1" for rank in range(3)]
    assert len({job["outputUri"] for job in document["jobs"]}) == 3
    assert document["rendezvousUri"] == f"{FULL['rendezvousUri']}/r1"


def test_a_quota_that_is_too_low_is_a_problem(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--outputs", str(outputs), "--instance-type", "ml.g5.2xlarge"]
    assert main([*arguments, "--replicas", "4"]) == 0
    assert "4 needed, 4 (requested)" in capsys.readouterr().out
    assert main([*arguments, "--replicas", "5"]) == 1
    assert "is 4 (requested), and the run needs 5" in capsys.readouterr().out


def test_quotas_follow_spot_and_warm_pools() -> None:
    stack = parse(FULL, "f")
    spot = make_plan(stack, **RUN, instance_type="ml.g5.2xlarge", spot=True)
    assert [quota.name for quota in spot.quotas] == ["ml.g5.2xlarge for spot training job usage"]
    assert spot.quotas[0].value is None
    assert spot.problems == []
    warm = make_plan(stack, **RUN, instance_type="ml.g5.2xlarge", keep_alive_seconds=600)
    assert [quota.name for quota in warm.quotas] == [
        "ml.g5.2xlarge for training job usage",
        "ml.g5.2xlarge for training warm pool usage",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "0"], "--replicas 0: use 1 to 1000"),
        (["--run-id", "Nope"], "--run-id Nope: use lower case"),
        (["--run-id", "a" * 40, "--replicas", "1000"], ""),
        (["--keep-alive", "3601"], "--keep-alive 3601: use 0 to 3600 seconds"),
        (["--keep-alive", "60", "--spot"], "spot instances have no warm pools"),
    ],
)
def test_arguments_that_cannot_work(
    outputs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code = main(["plan", "--outputs", str(outputs), *arguments])
    error = capsys.readouterr().err
    assert (code, error == "") == ((2, False) if said else (0, True))
    assert said in error


def test_a_name_that_is_too_long_for_sagemaker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(json.dumps(FULL | {"jobNamePrefix": "a" * 24}))
    assert main(["plan", "--outputs", str(path), "--run-id", "b" * 33]) == 2
    assert "has 64 characters, and SageMaker takes 63" in capsys.readouterr().err
    assert main(["plan", "--outputs", str(path), "--run-id", "b" * 32]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rendezvousUri": "s3://other/rendezvous"}, "rendezvousUri s3://other/rendezvous is not in bucket"),
        ({"outputUri": "s3://other/output"}, "outputUri s3://other/output is not in bucket"),
        ({"region": "eu-west-1"}, "is in us-west-2, not in eu-west-1"),
        ({"account": "210987654321"}, "is not of account 210987654321"),
    ],
)
def test_outputs_that_contradict_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(json.dumps(FULL | change))
    assert main(["plan", "--outputs", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_json_alone_is_on_standard_output(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--outputs", str(outputs), "--json", "--run-id", "r1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["imageUri"] == FULL["imageUri"]
    assert printed["kubernetes"]["podRoleArn"] == FULL["podRoleArn"]


def printed_access(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["access", *arguments]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_stacks_documents_name_its_resources(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed_access(capsys, "--cloud", "aws", "--outputs", str(outputs), "--data-uri", "s3://data/x")
    assert found.keys() == {"sagemakerTrust", "sagemakerRole", "launcher", "bucket", "replica", "key"}
    text = json.dumps(found["sagemakerRole"])
    repository = "arn:aws:ecr:us-west-2:123456789012:repository/diloco-dev-trainer"
    for expected in (
        f"arn:aws:s3:::{FULL['bucket']}/rendezvous/*",
        repository,
        FULL["kmsKeyArn"],
        "subnet-1",
        "data/x",
    ):
        assert f'{expected}"' in text
    assert FULL["sagemakerRoleArn"] in json.dumps(found["launcher"])


def test_documents_without_a_stack(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bucket", "b", "--region", "eu-west-1", "--account", "123456789012", "--prefix", "team/"]
    found = printed_access(capsys, "--cloud", "aws", *arguments, "--document", "replica")
    assert found["Statement"][0]["Resource"] == ["arn:aws:s3:::b/team/rendezvous/*", "arn:aws:s3:::b/team/output/*"]


def test_other_clouds_get_a_trust_and_the_replicas_permissions(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--outputs", str(outputs)]
    gcp = printed_access(capsys, "--cloud", "gcp", *where, "--subject", "112233")
    assert gcp["trust"]["Statement"][0]["Principal"] == {"Federated": "accounts.google.com"}
    azure = ["--subject", "object", "--audience", "api://diloco", "--tenant", "t"]
    found = printed_access(capsys, "--cloud", "azure", *where, *azure)
    assert found["replica"] == gcp["replica"]
    assert ":oidc-provider/sts.windows.net/t/" in json.dumps(found["trust"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cloud", "aws"], "give a stack by --stack or --outputs, or --bucket, --region, --account"),
        (["--cloud", "aws", "--bucket", "b", "--region", "r", "--account", "12"], "an account has 12 digits"),
        (["--cloud", "gcp", "--outputs", "FILE"], "--cloud gcp needs --subject"),
        (["--cloud", "azure", "--outputs", "FILE", "--subject", "x"], "--cloud azure needs --audience, --tenant"),
        (["--cloud", "aws", "--outputs", "FILE", "--document", "x"], "--document x: there are bucket, key"),
        (["--cloud", "aws", "--outputs", "FILE", "--bucket", "b"], "leave out the options without a stack"),
        (["--cloud", "moon", "--outputs", "FILE"], "Invalid value for '--cloud'"),
    ],
)
def test_what_access_refuses(
    outputs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["access", *(str(outputs) if word == "FILE" else word for word in arguments)]) == 2
    assert said in capsys.readouterr().err
