"""The tests' own authority: what stored policies allow, conditions included, and IAM's simulation on top of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.support.iam_authority import Authority
from tests.support.sagemaker.ministack import ministack
from tests.support.tls_proxy import FrontEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.iam_authority import Context
    from tests.support.sagemaker import Emulator

ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/worker"
SESSION = f"arn:aws:sts::{ACCOUNT}:assumed-role/worker/session"
USER = f"arn:aws:iam::{ACCOUNT}:user/team/somebody"
JOBS = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job"


def document(*statements: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def allow(action: str, resource: str, **condition: dict[str, Any]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, "Condition": condition}


TRUST = document({"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:root"}})


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A role and a user with a policy in every place where IAM keeps one."""
    with ministack(tmp_path_factory.mktemp("iam"), auth=True) as emulator:
        iam = emulator.client("iam")
        iam.create_role(RoleName="worker", AssumeRolePolicyDocument=TRUST, Tags=[{"Key": "team", "Value": "blue"}])
        iam.put_role_policy(
            RoleName="worker",
            PolicyName="inline",
            PolicyDocument=document(
                allow("sagemaker:StopTrainingJob", f"{JOBS}/run-*"),
                allow(
                    "sagemaker:CreateTrainingJob",
                    f"{JOBS}/run-*",
                    NumericLessThanEqualsIfExists={"sagemaker:KeepAlivePeriod": "600"},
                    **{"ForAllValues:StringLike": {"sagemaker:InstanceTypes": ["ml.g5.*"]}},
                ),
                allow("s3:GetObject", "arn:aws:s3:::data/*", Bool={"aws:SecureTransport": "true"}),
                allow("s3:ListBucket", "arn:aws:s3:::data", StringLike={"s3:prefix": ["runs/*"]}),
                allow("s3:PutObject", "arn:aws:s3:::blue/*", StringEquals={"aws:PrincipalTag/team": "blue"}),
                allow("s3:PutObject", "arn:aws:s3:::red/*", StringEquals={"aws:PrincipalTag/team": "red"}),
                {"Effect": "Deny", "Action": "s3:*", "Resource": "arn:aws:s3:::data/secret/*"},
            ),
        )
        managed = iam.create_policy(
            PolicyName="describe", PolicyDocument=document(allow("sagemaker:DescribeTrainingJob", f"{JOBS}/run-*"))
        )["Policy"]["Arn"]
        iam.attach_role_policy(RoleName="worker", PolicyArn=managed)
        boundary = iam.create_policy(
            PolicyName="boundary", PolicyDocument=document(allow("s3:*", "*"), allow("sagemaker:Describe*", "*"))
        )["Policy"]["Arn"]
        iam.create_role(RoleName="bounded", AssumeRolePolicyDocument=TRUST, PermissionsBoundary=boundary)
        iam.put_role_policy(RoleName="bounded", PolicyName="inline", PolicyDocument=document(allow("sagemaker:*", "*")))
        iam.create_user(UserName="somebody", Path="/team/")
        iam.put_user_policy(
            UserName="somebody", PolicyName="own", PolicyDocument=document(allow("logs:GetLogEvents", "*"))
        )
        iam.attach_user_policy(UserName="somebody", PolicyArn=managed)
        iam.create_group(GroupName="group")
        iam.add_user_to_group(GroupName="group", UserName="somebody")
        iam.put_group_policy(
            GroupName="group", PolicyName="shared", PolicyDocument=document(allow("ecr:DescribeImages", "*"))
        )
        yield emulator


@pytest.fixture(scope="module")
def authority(emulator: Emulator) -> Authority:
    return Authority(emulator.client("iam"))


CREATE = "sagemaker:CreateTrainingJob"
PLAIN: Context = {"aws:SecureTransport": "false"}


@pytest.mark.parametrize(
    ("principal", "action", "resource", "context", "kind"),
    [
        pytest.param(ROLE, "sagemaker:StopTrainingJob", f"{JOBS}/run-1", {}, "allowed", id="inline"),
        pytest.param(SESSION, "sagemaker:StopTrainingJob", f"{JOBS}/run-1", {}, "allowed", id="a session is its role"),
        pytest.param(ROLE, "sagemaker:StopTrainingJob", f"{JOBS}/other", {}, "implicitDeny", id="another resource"),
        pytest.param(ROLE, "sagemaker:DeleteTrainingJob", f"{JOBS}/run-1", {}, "implicitDeny", id="another action"),
        pytest.param(ROLE, "sagemaker:DescribeTrainingJob", f"{JOBS}/run-1", {}, "allowed", id="attached"),
        pytest.param(
            ROLE, CREATE, f"{JOBS}/run-1", {"sagemaker:InstanceTypes": ["ml.g5.xlarge"]}, "allowed", id="like"
        ),
        pytest.param(
            ROLE,
            CREATE,
            f"{JOBS}/run-1",
            {"sagemaker:InstanceTypes": ["ml.g5.xlarge", "ml.p5.48xlarge"]},
            "implicitDeny",
            id="one of several values is not allowed",
        ),
        pytest.param(
            ROLE, CREATE, f"{JOBS}/run-1", {"sagemaker:KeepAlivePeriod": "600"}, "allowed", id="number at its bound"
        ),
        pytest.param(
            ROLE, CREATE, f"{JOBS}/run-1", {"SAGEMAKER:keepaliveperiod": "601"}, "implicitDeny", id="keys have no case"
        ),
        pytest.param(ROLE, "s3:GetObject", "arn:aws:s3:::data/a", {}, "allowed", id="TLS unless said otherwise"),
        pytest.param(ROLE, "s3:GetObject", "arn:aws:s3:::data/a", PLAIN, "implicitDeny", id="plain HTTP"),
        pytest.param(ROLE, "s3:ListBucket", "arn:aws:s3:::data", {"s3:prefix": "runs/1"}, "allowed", id="prefix"),
        pytest.param(ROLE, "s3:ListBucket", "arn:aws:s3:::data", {}, "implicitDeny", id="a key that is absent"),
        pytest.param(ROLE, "s3:GetObject", "arn:aws:s3:::data/secret/a", {}, "explicitDeny", id="a deny wins"),
        pytest.param(ROLE, "s3:PutObject", "arn:aws:s3:::blue/a", {}, "allowed", id="the principal's tag"),
        pytest.param(ROLE, "s3:PutObject", "arn:aws:s3:::red/a", {}, "implicitDeny", id="a tag that it has not"),
        pytest.param(USER, "logs:GetLogEvents", "*", {}, "allowed", id="user's inline"),
        pytest.param(USER, "sagemaker:DescribeTrainingJob", f"{JOBS}/run-1", {}, "allowed", id="user's attached"),
        pytest.param(USER, "ecr:DescribeImages", "*", {}, "allowed", id="group's"),
        pytest.param(USER, "ecr:PutImage", "*", {}, "implicitDeny", id="nobody's"),
        pytest.param(
            f"arn:aws:iam::{ACCOUNT}:role/bounded",
            "sagemaker:DescribeTrainingJob",
            f"{JOBS}/a",
            {},
            "allowed",
            id="within the boundary",
        ),
        pytest.param(
            f"arn:aws:iam::{ACCOUNT}:role/bounded", CREATE, f"{JOBS}/a", {}, "implicitDeny", id="beyond the boundary"
        ),
        pytest.param(
            f"arn:aws:iam::{ACCOUNT}:role/bounded",
            "s3:GetObject",
            "*",
            {},
            "implicitDeny",
            id="a boundary grants nothing",
        ),
        pytest.param(f"arn:aws:iam::{ACCOUNT}:role/nobody", CREATE, "*", {}, "implicitDeny", id="no such role"),
        pytest.param(f"arn:aws:iam::{ACCOUNT}:root", CREATE, "*", {}, "allowed", id="root"),
    ],
)
def test_decides_as_iam_does(
    authority: Authority, principal: str, action: str, resource: str, context: Context, kind: str
) -> None:
    decision = authority.authorise(principal, action, resource, context)
    assert decision.kind == kind
    assert bool(decision) is (kind == "allowed")
    if kind != "allowed":
        assert decision.reason.startswith(f"User: {principal} is not authorized to perform: {action} on resource: ")


def test_a_change_of_policies_counts_at_once(emulator: Emulator, authority: Authority) -> None:
    iam = emulator.client("iam")
    iam.create_role(RoleName="changing", AssumeRolePolicyDocument=TRUST)
    arn = f"arn:aws:iam::{ACCOUNT}:role/changing"
    assert not authority.authorise(arn, "s3:GetObject", "arn:aws:s3:::a/b")
    iam.put_role_policy(RoleName="changing", PolicyName="p", PolicyDocument=document(allow("s3:GetObject", "*")))
    assert authority.authorise(arn, "s3:GetObject", "arn:aws:s3:::a/b")
    iam.delete_role_policy(RoleName="changing", PolicyName="p")
    assert not authority.authorise(arn, "s3:GetObject", "arn:aws:s3:::a/b")


def test_an_arn_of_another_kind_is_an_error(authority: Authority) -> None:
    with pytest.raises(ValueError, match="is neither a user, nor a role, nor a role's session"):
        authority.authorise(f"arn:aws:iam::{ACCOUNT}:group/group", "s3:GetObject", "*")


@pytest.fixture(scope="module")
def simulated(emulator: Emulator, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An IAM client whose simulations are complete."""
    with FrontEnd(emulator.endpoint_url, tmp_path_factory.mktemp("tls"), authority=authority) as front:
        yield _through(emulator, front).client("iam")


def _through(emulator: Emulator, front: FrontEnd) -> Emulator:
    from dataclasses import replace

    return replace(emulator, endpoint_url=front.endpoint_url, ca_bundle=front.ca_bundle)


def results(answer: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {
        (result["EvalActionName"], result["EvalResourceName"]): result["EvalDecision"]
        for result in answer["EvaluationResults"]
    }


def test_simulation_evaluates_every_resource(simulated: Any) -> None:
    answer = simulated.simulate_principal_policy(
        PolicySourceArn=ROLE,
        ActionNames=["sagemaker:StopTrainingJob", "s3:GetObject"],
        ResourceArns=[f"{JOBS}/run-1", f"{JOBS}/other", "arn:aws:s3:::data/secret/a"],
    )
    assert results(answer) == {
        ("sagemaker:StopTrainingJob", f"{JOBS}/run-1"): "allowed",
        ("sagemaker:StopTrainingJob", f"{JOBS}/other"): "implicitDeny",
        ("sagemaker:StopTrainingJob", "arn:aws:s3:::data/secret/a"): "implicitDeny",
        ("s3:GetObject", f"{JOBS}/run-1"): "implicitDeny",
        ("s3:GetObject", f"{JOBS}/other"): "implicitDeny",
        ("s3:GetObject", "arn:aws:s3:::data/secret/a"): "explicitDeny",
    }


@pytest.mark.parametrize(("prefix", "decision"), [("runs/1", "allowed"), ("elsewhere", "implicitDeny")])
def test_simulation_evaluates_context_entries(simulated: Any, prefix: str, decision: str) -> None:
    answer = simulated.simulate_principal_policy(
        PolicySourceArn=ROLE,
        ActionNames=["s3:ListBucket"],
        ResourceArns=["arn:aws:s3:::data"],
        ContextEntries=[{"ContextKeyName": "s3:prefix", "ContextKeyValues": [prefix], "ContextKeyType": "string"}],
    )
    assert results(answer) == {("s3:ListBucket", "arn:aws:s3:::data"): decision}


def test_simulation_evaluates_lists(simulated: Any) -> None:
    entry = {
        "ContextKeyName": "sagemaker:InstanceTypes",
        "ContextKeyValues": ["ml.g5.xlarge", "ml.p5.48xlarge"],
        "ContextKeyType": "stringList",
    }
    answer = simulated.simulate_principal_policy(
        PolicySourceArn=ROLE, ActionNames=[CREATE], ResourceArns=[f"{JOBS}/run-1"], ContextEntries=[entry]
    )
    assert results(answer) == {(CREATE, f"{JOBS}/run-1"): "implicitDeny"}


def test_simulation_does_not_assume_tls(simulated: Any) -> None:
    asked = {"PolicySourceArn": ROLE, "ActionNames": ["s3:GetObject"], "ResourceArns": ["arn:aws:s3:::data/a"]}
    entry = {
        "ContextKeyName": "aws:SecureTransport",
        "ContextKeyValues": ["true"],
        "ContextKeyType": "boolean",
    }
    without = simulated.simulate_principal_policy(**asked)
    given = simulated.simulate_principal_policy(**asked, ContextEntries=[entry])
    assert [*results(without).values(), *results(given).values()] == ["implicitDeny", "allowed"]


def test_simulation_refuses_what_it_does_not_evaluate(simulated: Any) -> None:
    with pytest.raises(ClientError, match="does not evaluate ResourcePolicy"):
        simulated.simulate_principal_policy(
            PolicySourceArn=ROLE, ActionNames=["s3:GetObject"], ResourcePolicy=document(allow("s3:*", "*"))
        )


def test_a_caller_who_may_not_simulate_is_refused(emulator: Emulator, authority: Authority) -> None:
    key = emulator.client("iam").create_access_key(UserName="somebody")["AccessKey"]
    credentials = {"AccessKeyId": key["AccessKeyId"], "SecretAccessKey": key["SecretAccessKey"]}
    with FrontEnd(emulator.endpoint_url, authority=authority) as front:
        iam = _through(emulator, front).client("iam", credentials)
        with pytest.raises(ClientError, match="AccessDenied"):
            iam.simulate_principal_policy(PolicySourceArn=ROLE, ActionNames=["s3:GetObject"])
