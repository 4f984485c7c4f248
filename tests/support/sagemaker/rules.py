"""The documented rules across fields of CreateTrainingJob and UpdateTrainingJob, which no model states.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html, …/API_ResourceConfig.html,
…/API_StoppingCondition.html, https://docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html (read 2026-11-30)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.sagemaker.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_RUN = 28 * 86400
"""Seconds: what the API takes; an account's quota may be lower."""
LOCAL_STORAGE = (
    "g4dn",
    "g5",
    "g6",
    "g6e",
    "g7",
    "g7e",
    "p3dn",
    "p4d",
    "p4de",
    "p5",
    "p5e",
    "p5en",
    "r5d",
    "trn1",
    "trn1n",
)
"""Families whose storage is fixed NVMe: no volume key."""
PREFERENCES_EXCLUDE = ("InstanceType", "InstanceGroups", "InstancePlacementConfig")


def check_create(request: dict[str, Any]) -> None:
    """Raise the ValidationException of the first rule that a request breaks; its shape was checked before."""
    for problem in _broken(request):
        raise ApiError("ValidationException", problem)


def _broken(request: dict[str, Any]) -> Iterator[str]:
    for field in ("RoleArn", "AlgorithmSpecification", "ResourceConfig", "StoppingCondition"):
        if field not in request:
            yield f"{field} is required for a training job that is not serverless."
    yield from _broken_algorithm(request["AlgorithmSpecification"])
    yield from _broken_stopping(request["StoppingCondition"], spot=request.get("EnableManagedSpotTraining", False))
    yield from _broken_resources(request["ResourceConfig"], spot=request.get("EnableManagedSpotTraining", False))
    if request.get("EnableManagedSpotTraining") and request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
        yield "Managed warm pools (KeepAlivePeriodInSeconds) are not supported with managed spot training."
    channels = [channel["ChannelName"] for channel in request.get("InputDataConfig", ())]
    if len(set(channels)) < len(channels):
        yield "Channel names in InputDataConfig must be unique."
    for channel in request.get("InputDataConfig", ()):
        if len(channel["DataSource"]) != 1:
            yield f"Channel {channel['ChannelName']} must have exactly one data source."
    keys = [tag["Key"] for tag in request.get("Tags", ())]
    if len(set(keys)) < len(keys):
        yield "Tag keys must be unique."
    if any(key.lower().startswith("aws:") for key in keys):
        yield "Tag keys must not begin with aws:."


def _broken_algorithm(algorithm: dict[str, Any]) -> Iterator[str]:
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield "AlgorithmSpecification must have exactly one of TrainingImage and AlgorithmName."


def _broken_stopping(stopping: dict[str, Any], *, spot: bool) -> Iterator[str]:
    longest = stopping.get("MaxRuntimeInSeconds", 86400)
    if longest > LONGEST_RUN:
        yield f"MaxRuntimeInSeconds must not exceed {LONGEST_RUN}."
    wait = stopping.get("MaxWaitTimeInSeconds")
    if spot and wait is None:
        yield "MaxWaitTimeInSeconds is required when EnableManagedSpotTraining is true."
    elif not spot and wait is not None:
        yield "MaxWaitTimeInSeconds is only allowed when EnableManagedSpotTraining is true."
    elif wait is not None and wait < longest:
        yield "MaxWaitTimeInSeconds must be equal to or greater than MaxRuntimeInSeconds."


def _broken_resources(resources: dict[str, Any], *, spot: bool) -> Iterator[str]:
    for field in ("SelectedInstanceType", "SelectedInstanceCount"):
        if field in resources:
            yield f"{field} is read-only."
    preferences = resources.get("InstancePreferences")
    if preferences is None:
        if "InstanceType" not in resources and "InstanceGroups" not in resources:
            yield "ResourceConfig needs InstanceType."
        if resources.get("InstanceCount", 0) < 1 and "InstanceGroups" not in resources:
            yield "InstanceCount must be at least 1."
    else:
        yield from _broken_preferences(resources, preferences, spot=spot)
    types = [entry["InstanceType"] for entry in preferences or [resources] if "InstanceType" in entry]
    if any(family(each) in LOCAL_STORAGE for each in types):
        if "VolumeKmsKeyId" in resources:
            yield "VolumeKmsKeyId is not supported for instance types with local storage."
    elif resources.get("VolumeSizeInGB", 0) < 1:
        yield "VolumeSizeInGB must be at least 1."


def _broken_preferences(resources: dict[str, Any], preferences: list[dict[str, Any]], *, spot: bool) -> Iterator[str]:
    for field in PREFERENCES_EXCLUDE:
        if field in resources:
            yield f"InstancePreferences and {field} are mutually exclusive."
    if spot:
        yield "InstancePreferences and EnableManagedSpotTraining are mutually exclusive."
    types = [entry["InstanceType"] for entry in preferences]
    if len(set(types)) < len(types):
        yield "An instance type can appear only once in InstancePreferences."
    counted = sum("InstanceCount" in entry for entry in preferences)
    if counted not in (0, len(preferences)) or (counted > 0) == ("InstanceCount" in resources):
        yield "InstanceCount must be set for the job or for every preference."


def family(instance_type: str) -> str:
    """`g5` of `ml.g5.2xlarge`."""
    return instance_type.split(".")[1]
