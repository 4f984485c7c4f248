"""Stand-ins of aws.eks, and of the OpenID Connect provider in IAM that goes with a cluster."""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.providers.resource import AutoName, RefusedError, Resource
from tests.support.providers.session import tag_list, tag_map

if TYPE_CHECKING:
    from tests.support.providers.values import Plain

_WAIT_SECONDS = 60.0


class Cluster(Resource):
    """aws.eks.Cluster. What MiniStack does not tell of a cluster is echoed from the state."""

    urn_type = "aws:eks/cluster:Cluster"
    arguments = frozenset(
        {
            "accessConfig",
            "bootstrapSelfManagedAddons",
            "computeConfig",
            "deletionProtection",
            "enabledClusterLogTypes",
            "encryptionConfig",
            "kubernetesNetworkConfig",
            "name",
            "roleArn",
            "storageConfig",
            "version",
            "vpcConfig",
        }
    )
    replace_on = frozenset({"bootstrapSelfManagedAddons", "encryptionConfig", "name", "roleArn"})
    computed = frozenset({"version"})
    auto_name = AutoName("name", 100)
    tagged = True

    def create(self, inputs: Plain) -> str:
        vpc = inputs["vpcConfig"]
        together = {
            bool(inputs.get("computeConfig", {}).get("enabled")),
            bool(inputs.get("storageConfig", {}).get("blockStorage", {}).get("enabled")),
            bool(inputs.get("kubernetesNetworkConfig", {}).get("elasticLoadBalancing", {}).get("enabled")),
        }
        if len(together) > 1:
            raise RefusedError(
                "InvalidParameterException: for EKS Auto Mode, compute, block storage and load balancing must be"
                " enabled or disabled together"
            )
        encryption = inputs.get("encryptionConfig")
        options: dict[str, Any] = {"version": inputs.get("version")}
        self.client("eks").create_cluster(
            name=inputs["name"],
            roleArn=inputs["roleArn"],
            resourcesVpcConfig={
                name: vpc[name]
                for name in ("subnetIds", "endpointPublicAccess", "endpointPrivateAccess", "publicAccessCidrs")
                if vpc.get(name) is not None
            },
            accessConfig=inputs.get("accessConfig", {}),
            encryptionConfig=[
                {"resources": encryption["resources"], "provider": {"keyArn": encryption["provider"]["keyArn"]}}
            ]
            if encryption
            else [],
            logging={"clusterLogging": [{"types": inputs.get("enabledClusterLogTypes", []), "enabled": True}]},
            tags=inputs["tagsAll"],
            **{name: value for name, value in options.items() if value},
        )
        return str(inputs["name"])

    def complete(self, resource_id: str, inputs: Plain) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._describe(resource_id)["status"] != "ACTIVE":
            if time.monotonic() > deadline:
                raise RefusedError(f"cluster {resource_id} does not become active")
            time.sleep(0.1)

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        eks = self.client("eks")
        try:
            found = self._describe(resource_id)
        except eks.exceptions.ResourceNotFoundException:
            return None
        vpc = found["resourcesVpcConfig"]
        enabled = [kind for each in found["logging"]["clusterLogging"] if each["enabled"] for kind in each["types"]]
        return {
            **{name: state.get(name) for name in self.arguments if name in state},
            "arn": found["arn"],
            "certificateAuthority": found["certificateAuthority"],
            "enabledClusterLogTypes": enabled,
            "endpoint": found["endpoint"],
            "identities": [{"oidcs": [{"issuer": found["identity"]["oidc"]["issuer"]}]}],
            "name": found["name"],
            "roleArn": found["roleArn"],
            "status": found["status"],
            "tagsAll": found.get("tags", {}),
            "version": found["version"],
            "vpcConfig": {
                **{name: vpc[name] for name in ("subnetIds", "endpointPublicAccess", "endpointPrivateAccess")},
                **(
                    {"publicAccessCidrs": vpc["publicAccessCidrs"]}
                    if state.get("vpcConfig", {}).get("publicAccessCidrs")
                    else {}
                ),
            },
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        if state.get("deletionProtection"):
            raise RefusedError(f"InvalidRequestException: cluster {resource_id} has deletion protection")
        self.client("eks").delete_cluster(name=resource_id)

    def _describe(self, name: str) -> Plain:
        return dict(self.client("eks").describe_cluster(name=name)["cluster"])


class NodeGroup(Resource):
    """aws.eks.NodeGroup."""

    urn_type = "aws:eks/nodeGroup:NodeGroup"
    arguments = frozenset(
        {
            "amiType",
            "capacityType",
            "clusterName",
            "diskSize",
            "instanceTypes",
            "nodeGroupName",
            "nodeRoleArn",
            "scalingConfig",
            "subnetIds",
            "updateConfig",
        }
    )
    replace_on = arguments - {"scalingConfig", "updateConfig"}
    auto_name = AutoName("nodeGroupName", 63)
    tagged = True

    def create(self, inputs: Plain) -> str:
        scaling = inputs["scalingConfig"]
        self.client("eks").create_nodegroup(
            clusterName=inputs["clusterName"],
            nodegroupName=inputs["nodeGroupName"],
            nodeRole=inputs["nodeRoleArn"],
            subnets=inputs["subnetIds"],
            amiType=inputs["amiType"],
            capacityType=inputs["capacityType"],
            instanceTypes=inputs["instanceTypes"],
            diskSize=inputs["diskSize"],
            scalingConfig={name: int(value) for name, value in scaling.items()},
            tags=inputs["tagsAll"],
        )
        return f"{inputs['clusterName']}:{inputs['nodeGroupName']}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        cluster, _, name = resource_id.partition(":")
        eks = self.client("eks")
        try:
            found = eks.describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]
        except eks.exceptions.ResourceNotFoundException:
            return None
        return {
            **{argument: state.get(argument) for argument in self.arguments if argument in state},
            "arn": found["nodegroupArn"],
            "clusterName": cluster,
            "nodeGroupName": name,
            "status": found["status"],
            "tagsAll": found.get("tags", {}),
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        cluster, _, name = resource_id.partition(":")
        self.client("eks").delete_nodegroup(clusterName=cluster, nodegroupName=name)


class Addon(Resource):
    """aws.eks.Addon."""

    urn_type = "aws:eks/addon:Addon"
    arguments = frozenset({"addonName", "clusterName", "resolveConflictsOnCreate", "resolveConflictsOnUpdate"})
    replace_on = frozenset({"addonName", "clusterName"})
    tagged = True

    def create(self, inputs: Plain) -> str:
        self.client("eks").create_addon(
            clusterName=inputs["clusterName"], addonName=inputs["addonName"], tags=inputs["tagsAll"]
        )
        return f"{inputs['clusterName']}:{inputs['addonName']}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        cluster, _, name = resource_id.partition(":")
        eks = self.client("eks")
        try:
            found = eks.describe_addon(clusterName=cluster, addonName=name)["addon"]
        except eks.exceptions.ResourceNotFoundException:
            return None
        return {
            **{argument: state.get(argument) for argument in self.arguments if argument in state},
            "addonName": name,
            "arn": found["addonArn"],
            "clusterName": cluster,
            "tagsAll": found.get("tags", {}),
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        cluster, _, name = resource_id.partition(":")
        self.client("eks").delete_addon(clusterName=cluster, addonName=name)


class PodIdentityAssociation(Resource):
    """aws.eks.PodIdentityAssociation."""

    urn_type = "aws:eks/podIdentityAssociation:PodIdentityAssociation"
    arguments = frozenset({"clusterName", "namespace", "roleArn", "serviceAccount"})
    replace_on = frozenset({"clusterName", "namespace", "serviceAccount"})
    tagged = True

    def create(self, inputs: Plain) -> str:
        made = self.client("eks").create_pod_identity_association(
            clusterName=inputs["clusterName"],
            namespace=inputs["namespace"],
            serviceAccount=inputs["serviceAccount"],
            roleArn=inputs["roleArn"],
            tags=inputs["tagsAll"],
        )
        return f"{inputs['clusterName']},{made['association']['associationId']}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        cluster, _, association = resource_id.partition(",")
        eks = self.client("eks")
        try:
            found = eks.describe_pod_identity_association(clusterName=cluster, associationId=association)["association"]
        except eks.exceptions.ResourceNotFoundException:
            return None
        return {
            "associationArn": found["associationArn"],
            "associationId": found["associationId"],
            "clusterName": found["clusterName"],
            "namespace": found["namespace"],
            "roleArn": found["roleArn"],
            "serviceAccount": found["serviceAccount"],
            "tagsAll": found.get("tags", {}),
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        cluster, _, association = resource_id.partition(",")
        self.client("eks").update_pod_identity_association(
            clusterName=cluster, associationId=association, roleArn=new["roleArn"]
        )

    def delete(self, resource_id: str, state: Plain) -> None:
        cluster, _, association = resource_id.partition(",")
        self.client("eks").delete_pod_identity_association(clusterName=cluster, associationId=association)


class AccessEntry(Resource):
    """aws.eks.AccessEntry."""

    urn_type = "aws:eks/accessEntry:AccessEntry"
    arguments = frozenset({"clusterName", "principalArn", "type"})
    replace_on = arguments
    defaults: ClassVar[dict[str, Any]] = {"type": "STANDARD"}
    tagged = True

    def create(self, inputs: Plain) -> str:
        self.client("eks").create_access_entry(
            clusterName=inputs["clusterName"],
            principalArn=inputs["principalArn"],
            type=inputs["type"],
            tags=inputs["tagsAll"],
        )
        return f"{inputs['clusterName']}#{inputs['principalArn']}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        cluster, _, principal = resource_id.partition("#")
        eks = self.client("eks")
        try:
            found = eks.describe_access_entry(clusterName=cluster, principalArn=principal)["accessEntry"]
        except eks.exceptions.ResourceNotFoundException:
            return None
        return {
            "accessEntryArn": found["accessEntryArn"],
            "clusterName": cluster,
            "principalArn": principal,
            "tagsAll": found.get("tags", {}),
            "type": found["type"],
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        cluster, _, principal = resource_id.partition("#")
        self.client("eks").delete_access_entry(clusterName=cluster, principalArn=principal)


class AccessPolicyAssociation(Resource):
    """aws.eks.AccessPolicyAssociation."""

    urn_type = "aws:eks/accessPolicyAssociation:AccessPolicyAssociation"
    arguments = frozenset({"accessScope", "clusterName", "policyArn", "principalArn"})
    replace_on = arguments

    def create(self, inputs: Plain) -> str:
        self.client("eks").associate_access_policy(
            clusterName=inputs["clusterName"],
            principalArn=inputs["principalArn"],
            policyArn=inputs["policyArn"],
            accessScope=inputs["accessScope"],
        )
        return f"{inputs['clusterName']}#{inputs['principalArn']}#{inputs['policyArn']}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        cluster, principal, policy = resource_id.split("#")
        eks = self.client("eks")
        try:
            found = eks.list_associated_access_policies(clusterName=cluster, principalArn=principal)
        except eks.exceptions.ResourceNotFoundException:
            return None
        for each in found["associatedAccessPolicies"]:
            if each["policyArn"] == policy:
                scope = {name: value for name, value in each["accessScope"].items() if value}
                return {
                    "accessScope": scope,
                    "clusterName": cluster,
                    "policyArn": policy,
                    "principalArn": principal,
                }
        return None

    def delete(self, resource_id: str, state: Plain) -> None:
        cluster, principal, policy = resource_id.split("#")
        self.client("eks").disassociate_access_policy(clusterName=cluster, principalArn=principal, policyArn=policy)


class OpenIdConnectProvider(Resource):
    """aws.iam.OpenIdConnectProvider."""

    urn_type = "aws:iam/openIdConnectProvider:OpenIdConnectProvider"
    arguments = frozenset({"clientIdLists", "thumbprintLists", "url"})
    replace_on = frozenset({"url"})
    computed = frozenset({"thumbprintLists"})
    tagged = True
    regional = False

    def create(self, inputs: Plain) -> str:
        made = self.client("iam").create_open_id_connect_provider(
            Url=inputs["url"],
            ClientIDList=inputs["clientIdLists"],
            ThumbprintList=inputs.get("thumbprintLists") or [],
            Tags=tag_list(inputs["tagsAll"]),
        )
        return str(made["OpenIDConnectProviderArn"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        iam = self.client("iam")
        try:
            found = iam.get_open_id_connect_provider(OpenIDConnectProviderArn=resource_id)
        except iam.exceptions.NoSuchEntityException:
            return None
        return {
            "arn": resource_id,
            "clientIdLists": found["ClientIDList"],
            "tagsAll": tag_map(found.get("Tags")),
            "thumbprintLists": found.get("ThumbprintList", []),
            "url": state.get("url", found["Url"]),
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("iam").delete_open_id_connect_provider(OpenIDConnectProviderArn=resource_id)


RESOURCES: tuple[type[Resource], ...] = (
    OpenIdConnectProvider,
    Cluster,
    NodeGroup,
    Addon,
    PodIdentityAssociation,
    AccessEntry,
    AccessPolicyAssociation,
)
