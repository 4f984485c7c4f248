"""Who calls, and whether the policies that the emulator stores let them.

A signature names an access key; whose it is, the emulator knows: IAM for a user's key, and STS for sessions, which tell
it only to their holder, so a test that uses one registers it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from tests.support.sagemaker.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.iam_authority import Authority
    from tests.support.sagemaker.emulator import Emulator

SERVICE = "sagemaker.amazonaws.com"


class Callers:
    """Authorises calls."""

    def __init__(self, emulator: Emulator, authority: Authority) -> None:
        self._emulator = emulator
        self._authority = authority
        self._arns: dict[str, str] = {}
        self._lock = threading.Lock()

    def register(self, credentials: Mapping[str, str]) -> str:
        """Make a session's key known; returns whose it is."""
        arn = str(self._emulator.client("sts", credentials).get_caller_identity()["Arn"])
        with self._lock:
            self._arns[credentials["AccessKeyId"]] = arn
        return arn

    def check(self, access_key: str, operation: str, resource: str, request: Mapping[str, Any]) -> None:
        """Raise the service's AccessDeniedException unless the caller may do this, and all that comes with it."""
        if access_key == self._emulator.access_key:
            return
        arn = self._arn(access_key)
        self._require(arn, f"sagemaker:{operation}", resource, context(request))
        if operation == "CreateTrainingJob":
            self._require(arn, "iam:PassRole", request["RoleArn"], {"iam:PassedToService": SERVICE})
            if request.get("Tags"):
                self._require(arn, "sagemaker:AddTags", resource, context(request))

    def refusal(self, principal: str, action: str, resource: str) -> str | None:
        """Why a principal may not do something, None if it may."""
        decision = self._authority.authorise(principal, action, resource)
        return None if decision else decision.reason

    def _require(self, arn: str, action: str, resource: str, values: Mapping[str, Any]) -> None:
        decision = self._authority.authorise(arn, action, resource, values)
        if not decision:
            raise ApiError("AccessDeniedException", decision.reason)

    def _arn(self, access_key: str) -> str:
        with self._lock:
            known = self._arns.get(access_key)
        if known is not None:
            return known
        iam = self._emulator.client("iam")
        try:
            user = iam.get_access_key_last_used(AccessKeyId=access_key)["UserName"]
            arn = str(iam.get_user(UserName=user)["User"]["Arn"])
        except (ClientError, KeyError):
            raise ApiError(
                "UnrecognizedClientException", "The security token included in the request is invalid.", 403
            ) from None
        with self._lock:
            self._arns[access_key] = arn
        return arn


def context(request: Mapping[str, Any]) -> dict[str, Any]:
    """The condition keys of a call.

    https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsagemaker.html
    """
    values: dict[str, Any] = {}
    resources = request.get("ResourceConfig", {})
    types = [entry["InstanceType"] for entry in resources.get("InstancePreferences", ())]
    types += [resources["InstanceType"]] if "InstanceType" in resources else []
    if types:
        values["sagemaker:InstanceTypes"] = types
    if "KeepAlivePeriodInSeconds" in resources:
        values["sagemaker:KeepAlivePeriod"] = str(resources["KeepAlivePeriodInSeconds"])
    stopping = request.get("StoppingCondition", {})
    if "MaxRuntimeInSeconds" in stopping:
        values["sagemaker:MaxRuntimeInSeconds"] = str(stopping["MaxRuntimeInSeconds"])
    if "EnableNetworkIsolation" in request:
        values["sagemaker:NetworkIsolation"] = str(request["EnableNetworkIsolation"]).lower()
    vpc = request.get("VpcConfig")
    if vpc is not None:
        values["sagemaker:VpcSubnets"] = vpc["Subnets"]
        values["sagemaker:VpcSecurityGroupIds"] = vpc["SecurityGroupIds"]
    for field, key in (("VolumeKmsKeyId", "sagemaker:VolumeKmsKey"),):
        if field in resources:
            values[key] = resources[field]
    if "KmsKeyId" in request.get("OutputDataConfig", {}):
        values["sagemaker:OutputKmsKey"] = request["OutputDataConfig"]["KmsKeyId"]
    tags = request.get("Tags") or ()
    if tags:
        values["aws:TagKeys"] = [tag["Key"] for tag in tags]
        values |= {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in tags}
    return values
