"""The policy documents: linted, narrow, and each statement for one purpose. The calls themselves are tested against an
emulator that enforces them (tests/infra).
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import botocore.session
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # parliament still uses pkg_resources
    import parliament  # type: ignore[import-untyped]

from diloco import access
from diloco.access import Document, Place, Storage, Vpc
from diloco.errors import ConfigurationError

PLACE = Place("us-west-2", "123456789012")
KEY = "arn:aws:kms:us-west-2:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
STORAGE = Storage("diloco-sagemaker-1a2b3c4", ("rendezvous", "output"))
ENCRYPTED = Storage("diloco-sagemaker-1a2b3c4", ("team/rendezvous", "team/output"), KEY)
REPOSITORY = "arn:aws:ecr:us-west-2:123456789012:repository/trainer"
ROLE = "arn:aws:iam::123456789012:role/diloco-jobs"
DATA = ("s3://data/tokens", "s3://data/more/", "s3://other")
SECRETS = ("arn:aws:secretsmanager:us-west-2:123456789012:secret:hugging-face-AbCdEf",)
VPC = Vpc(("subnet-0a1", "subnet-0b2"), ("sg-0c3",))

PERMISSIONS: dict[str, Document] = {
    "role": access.sagemaker_role_policy(PLACE, STORAGE, job_name_prefix="diloco-dev", repository_arn=REPOSITORY),
    "role, image elsewhere": access.sagemaker_role_policy(
        PLACE, STORAGE, job_name_prefix="diloco-dev", repository_arn=None
    ),
    "role with everything": access.sagemaker_role_policy(
        PLACE,
        ENCRYPTED,
        job_name_prefix="diloco-dev",
        repository_arn=REPOSITORY,
        data_uris=DATA,
        secret_arns=SECRETS,
        vpc=VPC,
    ),
    "replica": access.replica_policy(PLACE, ENCRYPTED, data_uris=DATA, secret_arns=SECRETS),
    "launcher": access.launcher_policy(
        PLACE, STORAGE, job_name_prefix="diloco-dev", role_arn=ROLE, repository_arn=REPOSITORY
    ),
    "launcher with limits": access.launcher_policy(
        PLACE,
        ENCRYPTED,
        job_name_prefix="diloco-dev",
        role_arn=ROLE,
        repository_arn=None,
        instance_types=("ml.m5.xlarge", "ml.g5.*"),
        max_keep_alive_seconds=0,
    ),
}
TRUST: dict[str, Document] = {
    "sagemaker": access.sagemaker_trust(PLACE, "diloco-dev"),
    "pods": access.pod_trust(PLACE, "cluster", "diloco", "replica"),
    "google": access.google_trust("112233445566778899000", "sts.amazonaws.com"),
    "entra": access.entra_trust(PLACE, "11111111-2222-3333-4444-555555555555", "object", "api://diloco"),
}
RESOURCES: dict[str, Document] = {"bucket": access.bucket_policy(PLACE, "b-sagemaker"), "key": access.key_policy(PLACE)}
ALL = PERMISSIONS | TRUST | RESOURCES

# What the linter says of actions that jobs can't do without, and nothing else.
EXPLAINED = {
    ("UNKNOWN_ACTION", "sagemaker:DeleteTrainingJob"): "the linter's list is older than the API: see the test below",
    ("CREDENTIALS_EXPOSURE", "ecr:GetAuthorizationToken"): "a token is how an image is pulled",
    ("PERMISSIONS_MANAGEMENT_ACTIONS", "kms:CreateGrant"): "how a job's volume is encrypted; for AWS resources only",
    ("PERMISSIONS_MANAGEMENT_ACTIONS", "iam:PassRole"): "a job's role is passed; one, to one service",
    ("PERMISSIONS_MANAGEMENT_ACTIONS", "ec2:CreateNetworkInterfacePermission"): "SageMaker's own way into a VPC",
}


def statements(document: Document) -> list[dict[str, Any]]:
    return list(document["Statement"])


def findings(document: Document) -> set[str]:
    policy = parliament.analyze_policy_string(json.dumps(document), include_community_auditors=True)
    return {str(finding.issue) for finding in policy.findings}


def without(document: Document, actions: set[str]) -> Document:
    kept = [
        {**statement, "Action": left}
        for statement in statements(document)
        if (left := [action for action in _listed(statement["Action"]) if action not in actions])
    ]
    return {**document, "Statement": kept}


@pytest.mark.parametrize("name", PERMISSIONS)
def test_the_linter_finds_nothing_that_is_not_explained(name: str) -> None:
    assert findings(without(PERMISSIONS[name], {action for _, action in EXPLAINED})) == set()


def test_every_explanation_is_needed() -> None:
    for issue, action in EXPLAINED:
        others = {other for _, other in EXPLAINED if other != action}
        assert any(issue in findings(without(document, others)) for document in PERMISSIONS.values()), issue


def test_the_linter_finds_something_in_a_bad_document() -> None:
    bad = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:GetObjekt", "Resource": "*"}]}
    assert findings(bad)


def test_what_the_linter_does_not_know_is_in_the_api() -> None:
    operations = botocore.session.get_session().get_service_model("sagemaker").operation_names
    unknown = {action.partition(":")[2] for issue, action in EXPLAINED if issue == "UNKNOWN_ACTION"}
    assert unknown <= set(operations)


@pytest.mark.parametrize("name", ALL)
def test_every_statement_has_a_sid_of_its_own(name: str) -> None:
    sids = [statement["Sid"] for statement in statements(ALL[name])]
    assert len(set(sids)) == len(sids)
    assert all(sid.isalnum() for sid in sids)


@pytest.mark.parametrize("name", ALL)
def test_a_star_is_the_resource_only_where_nothing_is_narrower(name: str) -> None:
    for statement in statements(ALL[name]):
        if statement["Effect"] == "Allow" and "*" in _listed(statement.get("Resource")):
            assert set(_listed(statement["Action"])) <= access.UNSCOPED.keys()


def test_every_exception_is_used() -> None:
    used = {
        action
        for document in ALL.values()
        for statement in statements(document)
        if "*" in _listed(statement.get("Resource"))
        for action in _listed(statement["Action"])
    }
    assert used == access.UNSCOPED.keys()


def _listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


@pytest.mark.parametrize("name", ALL)
def test_no_action_is_a_pattern_but_the_keys_own(name: str) -> None:
    actions = {action for statement in statements(ALL[name]) for action in _listed(statement["Action"])}
    allowed = {"key": {"kms:*"}, "bucket": {"s3:*"}}.get(name, set())  # the bucket's is a Deny
    assert {action for action in actions if "*" in action} == allowed


def named(document: Document, sid: str) -> dict[str, Any]:
    return next(statement for statement in statements(document) if statement["Sid"] == sid)


def test_objects_are_reached_below_the_prefixes_only() -> None:
    objects = named(PERMISSIONS["role with everything"], "RunObjects")
    assert objects["Resource"] == [
        "arn:aws:s3:::diloco-sagemaker-1a2b3c4/team/rendezvous/*",
        "arn:aws:s3:::diloco-sagemaker-1a2b3c4/team/output/*",
    ]
    listed = named(PERMISSIONS["role with everything"], "ListRuns")
    assert listed["Condition"] == {"StringLike": {"s3:prefix": ["team/rendezvous/*", "team/output/*"]}}


def test_data_is_read_only_and_grouped_by_bucket() -> None:
    document = PERMISSIONS["replica"]
    assert named(document, "ReadData0")["Resource"] == [
        "arn:aws:s3:::data/more",
        "arn:aws:s3:::data/more/*",
        "arn:aws:s3:::data/tokens",
        "arn:aws:s3:::data/tokens/*",
    ]
    assert named(document, "ReadData1")["Resource"] == ["arn:aws:s3:::other/*"]
    assert {action for number in (0, 1) for action in named(document, f"ReadData{number}")["Action"]} == {
        "s3:GetObject"
    }


@pytest.mark.parametrize("uri", ["data/tokens", "gs://data", "s3://", "s3://data/*", "s3://data/$x"])
def test_a_uri_that_is_none_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="no S3 URI"):
        access.data_statements(PLACE, [uri])


def test_the_role_is_assumed_for_this_stacks_jobs_only() -> None:
    condition = named(TRUST["sagemaker"], "TrainingJobsOfThisStack")["Condition"]
    assert condition == {
        "StringEquals": {"aws:SourceAccount": "123456789012"},
        "ArnLike": {"aws:SourceArn": "arn:aws:sagemaker:us-west-2:123456789012:training-job/diloco-dev-*"},
    }


def test_the_launcher_is_held_to_instance_types_and_warm_pools() -> None:
    condition = named(PERMISSIONS["launcher with limits"], "StartJobs")["Condition"]
    assert condition["ForAllValues:StringLike"] == {"sagemaker:InstanceTypes": ["ml.g5.*", "ml.m5.xlarge"]}
    assert condition["NumericLessThanEqualsIfExists"] == {"sagemaker:KeepAlivePeriod": "0"}


def test_the_launcher_passes_one_role_to_sagemaker_only() -> None:
    statement = named(PERMISSIONS["launcher"], "PassRole")
    assert statement["Resource"] == [ROLE]
    assert statement["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}


def test_every_stack_writes_the_logs_of_its_own_jobs_only() -> None:
    for name, sid in (("role", "WriteLogs"), ("launcher", "ReadLogs")):
        resource = "log-group:/aws/sagemaker/TrainingJobs:log-stream:diloco-dev-*"
        assert named(PERMISSIONS[name], sid)["Resource"] == [f"arn:aws:logs:us-west-2:123456789012:{resource}"]


def test_the_key_is_used_through_the_bucket_only() -> None:
    for name in ("role with everything", "replica", "launcher with limits"):
        statement = named(PERMISSIONS[name], "BucketKey")
        assert statement["Resource"] == [KEY]
        assert statement["Condition"] == {"StringEquals": {"kms:ViaService": "s3.us-west-2.amazonaws.com"}}


def test_other_partitions_have_their_own_names() -> None:
    place = Place("cn-north-1", "123456789012", "aws-cn")
    document = access.replica_policy(place, Storage("b", ("rendezvous",), KEY))
    assert named(document, "RunObjects")["Resource"] == ["arn:aws-cn:s3:::b/rendezvous/*"]
    assert (
        named(document, "BucketKey")["Condition"]["StringEquals"]["kms:ViaService"] == "s3.cn-north-1.amazonaws.com.cn"
    )


def test_a_federated_token_must_match_subject_and_audience() -> None:
    assert named(TRUST["google"], "WebIdentity")["Condition"]["StringEquals"] == {
        "accounts.google.com:aud": "112233445566778899000",
        "accounts.google.com:oaud": "sts.amazonaws.com",
        "accounts.google.com:sub": "112233445566778899000",
    }
    entra = named(TRUST["entra"], "WebIdentity")
    issuer = "sts.windows.net/11111111-2222-3333-4444-555555555555/"
    assert entra["Principal"] == {"Federated": f"arn:aws:iam::123456789012:oidc-provider/{issuer}"}
    assert entra["Condition"]["StringEquals"] == {f"{issuer}:aud": "api://diloco", f"{issuer}:sub": "object"}


def test_documents_fit_into_iam() -> None:
    """A managed policy takes 6,144 characters, a role's inline policies 10,240 in all; white space is not counted."""
    most = {"role": 10_240, "role, image elsewhere": 10_240, "role with everything": 10_240}
    for name, document in PERMISSIONS.items():
        assert len(json.dumps(document, separators=(",", ":"))) <= most.get(name, 6_144), name


def test_every_permission_is_explained_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "infrastructure.md").read_text()
    for document in PERMISSIONS.values():
        for statement in statements(document):
            if not re.fullmatch(r"(Read|List)Data[1-9]", statement["Sid"]):  # as those of the first bucket
                assert f"`{statement['Sid']}`" in text, statement["Sid"]
