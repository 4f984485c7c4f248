"""A cluster without an engine: what is made of each kind, with which inputs, after what, and that no policy objects."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pulumi
import pytest
from pulumi.runtime.mocks import MockMonitor

from diloco.access import Place, Storage, pod_trust, replica_policy, service_trust, web_identity_trust
from diloco.cluster_access import launcher_rules
from diloco.eks import kubeconfig_document
from infra.cluster_settings import EksSettings
from infra.eks import EksCluster, EksClusterArgs
from infra.identity import StorageInputs
from infra.policies.rules import RULES
from tests.infra.test_unit_components import Recorder, made, mocked

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pulumi_aws")  # its own old names, at import

PLACE = Place("us-west-2", "123456789012")
ADMIN = "arn:aws:iam::123456789012:role/platform"
PLUGIN = "registry.test/nvidia/k8s-device-plugin:v1.2.3"
ADOPTED = {"adopt": "theirs"}
CREATED = {"admins": [ADMIN], "publicAccessCidrs": ["203.0.113.0/24"]}
GPU_NODES = {"instanceTypes": ["g5.2xlarge"], "min": 1, "desired": 2, "max": 4}
BOTTLEROCKET = {"amiType": "BOTTLEROCKET_x86_64_NVIDIA", **GPU_NODES}
AL2023 = {"amiType": "AL2023_x86_64_NVIDIA", "devicePlugin": PLUGIN, **GPU_NODES}


def cluster(settings: Mapping[str, Any], *, key_arn: str | None = None, protect: bool = True) -> Any:
    parsed = EksSettings.model_validate(settings)
    assert parsed.problems() == []
    arguments = EksClusterArgs(
        place=PLACE,
        settings=parsed,
        storage=StorageInputs("b", ("rendezvous", "output"), None),
        subnet_ids=["subnet-1", "subnet-2"],
        key_arn=key_arn,
        data_uris=["s3://data/x"],
        protect=protect,
        tags={"team": "a"},
    )
    it = EksCluster("dev", arguments)
    return [it.cluster_name, it.namespace, it.pod_role_arn, it.service_account, it.provider.id]


def built(settings: Mapping[str, Any], **more: Any) -> tuple[Recorder, Any]:
    recorder, known = made(lambda: cluster(settings, **more))
    return recorder, known


def of_aws(recorder: Recorder) -> list[str]:
    return sorted(args.typ.rpartition(":")[2] for args in recorder.made if args.typ.startswith("aws:"))


def role(recorder: Recorder, name: str) -> dict[str, Any]:
    [found] = [args.inputs for args in recorder.of("Role") if args.name == name and args.typ.startswith("aws:")]
    return dict(found)


# Adopted.


def test_an_adopted_cluster_is_left_as_it_is() -> None:
    recorder, known = built(ADOPTED)
    assert known[:4] == ["theirs", "diloco", "arn:aws:iam::123456789012:role/dev-pods-1a2b3c4", "diloco-replica"]
    assert of_aws(recorder) == ["PodIdentityAssociation", "Role", "RolePolicy"]
    kubeconfig = json.loads(recorder.one("kubernetes")["kubeconfig"])
    assert kubeconfig == kubeconfig_document(
        "theirs", "us-west-2", "https://theirs.test", "dGhlaXJz", python=sys.executable
    )


def test_a_cluster_that_is_not_there_is_named_with_the_fix() -> None:
    mocked(getCluster=Exception("ResourceNotFoundException"))
    with pytest.raises(pulumi.RunError, match=r"^diloco:eks.adopt 'theirs': ResourceNotFoundException; name a cluster"):
        cluster(ADOPTED)


def test_pods_become_their_role_by_pod_identity() -> None:
    recorder, known = built(ADOPTED | {"namespace": "runs", "serviceAccount": "replica"})
    association = recorder.one("PodIdentityAssociation")
    assert association["roleArn"] == known[2]
    assert (association["clusterName"], association["namespace"], association["serviceAccount"]) == (
        "theirs",
        "runs",
        "replica",
    )
    pods = role(recorder, "dev-pods")
    trust = json.loads(pods["assumeRolePolicy"])
    assert trust == pod_trust(PLACE, "theirs", "runs", "replica")
    [statement] = trust["Statement"]
    assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert statement["Action"] == ["sts:AssumeRole", "sts:TagSession"]
    policy = json.loads(recorder.one("RolePolicy")["policy"])
    storage = Storage("b", ("rendezvous", "output"))
    assert policy == replica_policy(PLACE, storage, data_uris=["s3://data/x"])
    accounts = {args.name: args.inputs for args in recorder.of("ServiceAccount")}
    assert accounts["dev-replica"]["metadata"].get("annotations", {}) == {}
    assert accounts["dev-replica"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("given", [None, "arn:aws:iam::123456789012:oidc-provider/oidc.eks.test/id/THEIRS"])
def test_pods_become_their_role_by_a_token_of_the_cluster(given: str | None) -> None:
    settings = ADOPTED | {"identity": "irsa", "namespace": "runs"}
    recorder, known = built(settings if given is None else settings | {"oidcProviderArn": given})
    provider = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.test/id/THEIRS"
    claims = {"aud": "sts.amazonaws.com", "sub": "system:serviceaccount:runs:diloco-replica"}
    assert json.loads(role(recorder, "dev-pods")["assumeRolePolicy"]) == web_identity_trust(provider, claims)
    if given is None:
        made_provider = recorder.one("OpenIdConnectProvider")
        assert made_provider["url"] == "https://oidc.eks.test/id/THEIRS"
        assert made_provider["clientIdLists"] == ["sts.amazonaws.com"]
    else:
        assert recorder.of("OpenIdConnectProvider") == []
    assert recorder.of("PodIdentityAssociation") == []
    accounts = {args.name: args.inputs for args in recorder.of("ServiceAccount")}
    assert accounts["dev-replica"]["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": known[2]}


def test_a_cluster_without_an_issuer_has_no_web_identity() -> None:
    answer = {"name": "theirs", "endpoint": "e", "certificateAuthorities": [], "identities": []}
    mocked(getCluster=answer)
    with pytest.raises(pulumi.RunError, match="cluster theirs has no OpenID Connect issuer; allowed: pod-identity"):
        cluster(ADOPTED | {"identity": "irsa"})


# Created.


def test_a_created_cluster_is_encrypted_logged_and_entered_by_entries_only() -> None:
    recorder, known = built(CREATED)
    inputs = recorder.one("Cluster")
    assert inputs["vpcConfig"] == {
        "subnetIds": ["subnet-1", "subnet-2"],
        "endpointPrivateAccess": True,
        "endpointPublicAccess": True,
        "publicAccessCidrs": ["203.0.113.0/24"],
    }
    assert inputs["accessConfig"] == {"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": False}
    assert inputs["enabledClusterLogTypes"] == ["api", "audit", "authenticator", "controllerManager", "scheduler"]
    key = "arn:aws:kms:us-west-2:123456789012:key/1234abcd"
    assert inputs["encryptionConfig"] == {"provider": {"keyArn": key}, "resources": ["secrets"]}
    assert recorder.one("Key")["enableKeyRotation"] is True
    assert inputs["deletionProtection"] is True
    assert inputs["bootstrapSelfManagedAddons"] is False
    entry, policy = recorder.one("AccessEntry"), recorder.one("AccessPolicyAssociation")
    assert (entry["principalArn"], entry["type"]) == (ADMIN, "STANDARD")
    assert policy["principalArn"] == ADMIN
    assert policy["policyArn"] == "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
    assert policy["accessScope"] == {"type": "cluster"}
    assert known[0] == entry["clusterName"] == "dev-1a2b3c4"
    assert json.loads(role(recorder, "dev-pods")["assumeRolePolicy"]) == pod_trust(
        PLACE, "dev-1a2b3c4", "diloco", "diloco-replica"
    )
    # No token is in the state: the kubeconfig says who makes one.
    kubeconfig = json.loads(recorder.one("kubernetes")["kubeconfig"])
    assert kubeconfig == kubeconfig_document(
        "dev-1a2b3c4", "us-west-2", "https://eks.test", "YXV0aG9yaXR5", python=sys.executable
    )


def test_a_private_cluster_has_no_public_endpoint() -> None:
    recorder, _ = built({"admins": [ADMIN], "private": True})
    network = recorder.one("Cluster")["vpcConfig"]
    assert (network["endpointPrivateAccess"], network["endpointPublicAccess"]) == (True, False)
    assert "publicAccessCidrs" not in network


def test_the_stacks_key_encrypts_secrets_and_nothing_protects_a_development_cluster() -> None:
    recorder, _ = built(CREATED, key_arn="arn:aws:kms:us-west-2:123456789012:key/shared", protect=False)
    inputs = recorder.one("Cluster")
    assert inputs["encryptionConfig"]["provider"] == {"keyArn": "arn:aws:kms:us-west-2:123456789012:key/shared"}
    assert inputs["deletionProtection"] is False
    assert recorder.of("Key") == []


@pytest.mark.parametrize("mode", ["auto", "nodes"])
def test_auto_mode_is_compute_storage_and_load_balancing_together_and_brings_its_own(mode: str) -> None:
    recorder, _ = built(CREATED | {"mode": mode})
    inputs, auto = recorder.one("Cluster"), mode == "auto"
    together = (
        inputs["computeConfig"]["enabled"],
        inputs["storageConfig"]["blockStorage"]["enabled"],
        inputs["kubernetesNetworkConfig"]["elasticLoadBalancing"]["enabled"],
    )
    assert together == (auto, auto, auto)
    assert inputs["bootstrapSelfManagedAddons"] is False
    addons = sorted(args.inputs["addonName"] for args in recorder.of("Addon"))
    assert addons == ([] if auto else ["coredns", "eks-pod-identity-agent", "kube-proxy", "vpc-cni"])
    assert len(recorder.of("NodeGroup")) == (not auto)
    control, nodes = role(recorder, "dev-cluster"), role(recorder, "dev-nodes")
    assert json.loads(control["assumeRolePolicy"]) == service_trust(
        "eks.amazonaws.com", account="123456789012", tag_session=auto
    )
    assert json.loads(nodes["assumeRolePolicy"]) == service_trust("ec2.amazonaws.com")
    if auto:
        assert inputs["computeConfig"]["nodePools"] == ["general-purpose", "system"]
        assert inputs["computeConfig"]["nodeRoleArn"] == "arn:aws:iam::123456789012:role/dev-nodes-1a2b3c4"
    attached = {args.name.removeprefix("dev-") for args in recorder.of("RolePolicyAttachment")}
    assert ("nodes-AmazonEKS_CNI_Policy" in attached) != auto
    assert ("cluster-AmazonEKSComputePolicy" in attached) == auto


@pytest.mark.parametrize(
    ("nodes", "ami", "plugin"),
    [
        ({}, "BOTTLEROCKET_x86_64", False),
        ({"amiType": "AL2023_x86_64_STANDARD"}, "AL2023_x86_64_STANDARD", False),
        (BOTTLEROCKET, "BOTTLEROCKET_x86_64_NVIDIA", False),
        (AL2023, "AL2023_x86_64_NVIDIA", True),
    ],
)
def test_each_kind_of_node_group_and_the_device_plugin_where_the_image_has_none(
    nodes: dict[str, Any], ami: str, plugin: bool
) -> None:
    recorder, _ = built(CREATED | {"mode": "nodes", "nodes": nodes})
    group = recorder.one("NodeGroup")
    assert group["amiType"] == ami
    assert group["subnetIds"] == ["subnet-1", "subnet-2"]
    if nodes.get("instanceTypes"):
        assert group["instanceTypes"] == ["g5.2xlarge"]
        assert group["scalingConfig"] == {"minSize": 1, "desiredSize": 2, "maxSize": 4}
    assert bool(recorder.of("DaemonSet")) == plugin


def test_the_device_plugin_is_pinned_has_few_rights_and_runs_on_its_group_only() -> None:
    recorder, _ = built(CREATED | {"mode": "nodes", "nodes": AL2023})
    inputs = recorder.one("DaemonSet")
    assert inputs["metadata"]["namespace"] == "kube-system"
    template = inputs["spec"]["template"]
    assert inputs["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    pod = template["spec"]
    assert pod["nodeSelector"] == {"eks.amazonaws.com/nodegroup": "dev-1a2b3c4"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["priorityClassName"] == "system-node-critical"
    [container] = pod["containers"]
    assert container["image"] == PLUGIN
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    folder = "/var/lib/kubelet/device-plugins"
    assert [volume["hostPath"]["path"] for volume in pod["volumes"]] == [folder]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [folder]


def test_nodes_come_after_their_network_and_pods_after_their_role(monkeypatch: pytest.MonkeyPatch) -> None:
    after: dict[str, set[str]] = {}
    register: Any = MockMonitor.RegisterResource

    def recording(self: Any, request: Any) -> Any:
        after[f"{request.type.rpartition(':')[2]} {request.name}"] = {
            " ".join((urn.split("::")[2].rpartition("$")[2].rpartition(":")[2], urn.split("::")[3]))
            for urn in request.dependencies
        }
        return register(self, request)

    monkeypatch.setattr(MockMonitor, "RegisterResource", recording)
    built(CREATED | {"mode": "nodes", "nodes": AL2023})
    # A node is ready only with a network, and EKS waits for ready nodes; CoreDNS waits for nodes.
    assert {"Addon dev-vpc-cni", "Addon dev-kube-proxy", "Addon dev-eks-pod-identity-agent"} <= after["NodeGroup dev"]
    assert "RolePolicyAttachment dev-nodes-AmazonEKS_CNI_Policy" in after["NodeGroup dev"]
    assert "NodeGroup dev" in after["Addon dev-coredns"]
    assert "NodeGroup dev" not in after["Addon dev-vpc-cni"]
    assert "RolePolicyAttachment dev-cluster-AmazonEKSClusterPolicy" in after["Cluster dev"]
    # Whoever runs `up` has no access before the entry.
    assert {"AccessPolicyAssociation dev-0", "PodIdentityAssociation dev", "RolePolicy dev-pods"} <= after[
        "Namespace dev"
    ]
    assert {"AccessPolicyAssociation dev-0", "NodeGroup dev"} <= after["DaemonSet dev-device-plugin"]


@pytest.mark.parametrize(
    "settings",
    [
        ADOPTED,
        ADOPTED | {"identity": "irsa"},
        CREATED,
        {"admins": [ADMIN], "private": True},
        CREATED | {"mode": "nodes", "nodes": AL2023},
    ],
    ids=["adopted", "irsa", "auto", "private", "nodes"],
)
def test_no_policy_objects_and_everything_has_the_stacks_tags(settings: dict[str, Any]) -> None:
    recorder, _ = built(settings)
    checked = 0
    for args in recorder.made:
        for rule in RULES:
            if args.typ in rule.types:
                checked += 1
                assert list(rule.check(args.inputs)) == [], (rule.name, args.name)
    assert checked > 3
    untagged = {"AccessPolicyAssociation", "Alias", "RolePolicy", "RolePolicyAttachment"}
    for args in recorder.made:
        if args.typ.startswith("aws:") and args.typ.rpartition(":")[2] not in untagged:
            assert args.inputs["tags"] == {"team": "a"}, args.name


def test_the_namespace_is_restricted_and_the_launcher_has_its_role_in_it() -> None:
    recorder, _ = built(ADOPTED | {"namespace": "runs"})
    space = recorder.one("Namespace")["metadata"]
    assert (space["name"], space["labels"]) == ("runs", {"pod-security.kubernetes.io/enforce": "restricted"})
    [rights] = [args.inputs for args in recorder.of("Role") if args.typ.startswith("kubernetes:")]
    assert rights["metadata"]["namespace"] == "runs"
    assert rights["rules"] == launcher_rules()
    binding = recorder.one("RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "diloco-launcher", "namespace": "runs"}]
    assert all(not args.typ.startswith("kubernetes:rbac") or "Cluster" not in args.typ for args in recorder.made)
