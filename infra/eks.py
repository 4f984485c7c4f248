"""A cluster for runs as Indexed Jobs: one that exists, or one that is created, with what its replicas need.

A created cluster costs $0.10 an hour while idle (https://aws.amazon.com/eks/pricing/, 2026-11); Auto Mode starts nodes
for pods and ends them after, at a surcharge on each; a node group of `min 0` has none while nothing runs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as kubernetes

from diloco.access import Place, pod_trust, replica_policy, service_trust, web_identity_trust
from diloco.cluster_access import (
    launcher_account,
    launcher_binding,
    launcher_role,
    restricted_namespace,
)
from diloco.eks import kubeconfig_document
from infra.device_plugin import device_plugin
from infra.lookups import found
from infra.rendezvous import EncryptionKey, EncryptionKeyArgs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infra.cluster_settings import EksSettings
    from infra.identity import StorageInputs

EC2 = "ec2.amazonaws.com"
LOGS = ("api", "audit", "authenticator", "controllerManager", "scheduler")
ADMIN = "arn:{partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
AUTO_CLUSTER_POLICIES = (
    "AmazonEKSBlockStoragePolicy",
    "AmazonEKSClusterPolicy",
    "AmazonEKSComputePolicy",
    "AmazonEKSLoadBalancingPolicy",
    "AmazonEKSNetworkingPolicy",
)
AUTO_NODE_POLICIES = ("AmazonEC2ContainerRegistryPullOnly", "AmazonEKSWorkerNodeMinimalPolicy")
NODE_POLICIES = ("AmazonEC2ContainerRegistryPullOnly", "AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy")
ADDONS_BEFORE_NODES = ("eks-pod-identity-agent", "kube-proxy", "vpc-cni")
"""A node is ready once it has a network, and a node group is there once its nodes are ready."""
ADDONS_ON_NODES = ("coredns",)
"""A Deployment: it is active once its pods run. Auto Mode has all of these built in."""
ROLE_ANNOTATION = "eks.amazonaws.com/role-arn"
AUDIENCE = "sts.amazonaws.com"


@dataclass(frozen=True)
class EksClusterArgs:
    """Arguments of :class:`EksCluster`."""

    place: Place
    settings: EksSettings
    storage: StorageInputs
    subnet_ids: pulumi.Input[Sequence[str]] | None = None
    key_arn: pulumi.Input[str] | None = None
    """Encrypts the cluster's secrets; None: a key of its own."""
    data_uris: Sequence[str] = ()
    secret_arns: Sequence[str] = ()
    protect: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)


class EksCluster(pulumi.ComponentResource):
    """A cluster, a restricted namespace in it, and a ServiceAccount whose pods reach the runs' prefix of the bucket."""

    cluster_name: pulumi.Output[str]
    pod_role_arn: pulumi.Output[str]
    provider: kubernetes.Provider
    namespace: pulumi.Output[str]
    """Known once pods can be made in it as the ServiceAccount."""
    service_account: str

    def __init__(self, name: str, args: EksClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:EksCluster", name, None, opts)
        settings = args.settings
        self._node_group: aws.eks.NodeGroup | None = None
        kubeconfig = self._create(name, args) if settings.adopt is None else self._adopt(settings.adopt, args)
        role = self._pod_role(name, args)
        self.provider = kubernetes.Provider(
            name,
            kubeconfig=settings.kubeconfig or kubeconfig,
            # A cluster that is gone took along what was in it.
            delete_unreachable=settings.adopt is None,
            opts=pulumi.ResourceOptions(parent=self),
        )
        self._in_the_cluster(name, args, role)
        if self._node_group is not None and settings.nodes.device_plugin is not None:
            device_plugin(
                name,
                settings.nodes.device_plugin,
                self._node_group.node_group_name,
                parent=self,
                provider=self.provider,
                depends_on=self._ready,
            )
        self.register_outputs(
            {"clusterName": self.cluster_name, "namespace": self.namespace, "podRoleArn": self.pod_role_arn}
        )

    def _adopt(self, adopt: str, args: EksClusterArgs) -> pulumi.Input[str]:
        cluster = found(
            "eks.adopt",
            adopt,
            "name a cluster of this region that exists, or leave it out to create one",
            lambda: aws.eks.get_cluster(name=adopt),
        )
        self.cluster_name = pulumi.Output.from_input(cluster.name)
        issuers = [oidc.issuer for identity in cluster.identities for oidc in identity.oidcs or ()]
        self._issuer: pulumi.Output[str] | None = pulumi.Output.from_input(issuers[0]) if issuers else None
        self._ready: list[pulumi.Resource] = []
        authority = cluster.certificate_authorities[0].data if cluster.certificate_authorities else ""
        return _kubeconfig(cluster.name, args.place.region, cluster.endpoint, authority)

    def _create(self, name: str, args: EksClusterArgs) -> pulumi.Output[str]:
        settings, auto = args.settings, args.settings.mode == "auto"
        key_arn = args.key_arn
        if key_arn is None:
            key_arn = EncryptionKey(
                f"{name}-cluster",
                EncryptionKeyArgs(place=args.place, protect=args.protect, tags=args.tags),
                pulumi.ResourceOptions(parent=self),
            ).arn
        role, granted = self._service_role(
            f"{name}-cluster",
            args,
            "eks.amazonaws.com",
            AUTO_CLUSTER_POLICIES if auto else ("AmazonEKSClusterPolicy",),
            tag_session=auto,
        )
        nodes, node_grants = self._service_role(
            f"{name}-nodes", args, EC2, AUTO_NODE_POLICIES if auto else NODE_POLICIES
        )
        cluster = aws.eks.Cluster(
            name,
            role_arn=role.arn,
            version=settings.version,
            vpc_config=aws.eks.ClusterVpcConfigArgs(
                subnet_ids=args.subnet_ids or [],
                endpoint_private_access=True,
                endpoint_public_access=not settings.private,
                public_access_cidrs=None if settings.private else settings.public_access_cidrs,
            ),
            # Compute, storage and load balancing of Auto Mode are on or off together, or EKS refuses them.
            compute_config=aws.eks.ClusterComputeConfigArgs(
                enabled=auto,
                node_pools=["general-purpose", "system"] if auto else None,
                node_role_arn=nodes.arn if auto else None,
            ),
            kubernetes_network_config=aws.eks.ClusterKubernetesNetworkConfigArgs(
                elastic_load_balancing=aws.eks.ClusterKubernetesNetworkConfigElasticLoadBalancingArgs(enabled=auto)
            ),
            storage_config=aws.eks.ClusterStorageConfigArgs(
                block_storage=aws.eks.ClusterStorageConfigBlockStorageArgs(enabled=auto)
            ),
            access_config={
                "authentication_mode": "API",
                # Whoever runs `pulumi up` gets an entry below that can be seen and taken away.
                "bootstrap_cluster_creator_admin_permissions": False,
            },
            bootstrap_self_managed_addons=False,
            encryption_config=aws.eks.ClusterEncryptionConfigArgs(
                provider=aws.eks.ClusterEncryptionConfigProviderArgs(key_arn=key_arn), resources=["secrets"]
            ),
            enabled_cluster_log_types=list(LOGS),
            deletion_protection=args.protect,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=self, depends_on=granted, protect=args.protect),
        )
        inside = pulumi.ResourceOptions(parent=cluster)
        entries = [
            self._administrator(f"{name}-{number}", args, cluster, principal, inside)
            for number, principal in enumerate(settings.admins)
        ]
        self._ready = [*node_grants, *entries]
        if not auto:
            self._ready += self._nodes(name, args, cluster, nodes, node_grants)
        self.cluster_name = cluster.name
        self._issuer = cluster.identities.apply(lambda known: str(known[0]["oidcs"][0]["issuer"]))
        return pulumi.Output.all(cluster.name, cluster.endpoint, cluster.certificate_authority).apply(
            lambda known: _kubeconfig(known[0], args.place.region, known[1], known[2]["data"])
        )

    def _service_role(
        self, name: str, args: EksClusterArgs, service: str, policies: Sequence[str], *, tag_session: bool = False
    ) -> tuple[aws.iam.Role, list[pulumi.Resource]]:
        """A role that a service of AWS becomes, with policies of AWS's own."""
        # EC2 assumes roles without naming the account; only who may pass the role to it can give it to an instance.
        account = None if service == EC2 else args.place.account
        role = aws.iam.Role(
            name,
            description=f"{service} for DiLoCo runs",
            assume_role_policy=json.dumps(service_trust(service, account=account, tag_session=tag_session)),
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=self),
        )
        attached: list[pulumi.Resource] = [
            aws.iam.RolePolicyAttachment(
                f"{name}-{policy}",
                role=role.name,
                policy_arn=f"arn:{args.place.partition}:iam::aws:policy/{policy}",
                opts=pulumi.ResourceOptions(parent=role),
            )
            for policy in policies
        ]
        return role, attached

    @staticmethod
    def _administrator(
        name: str, args: EksClusterArgs, cluster: aws.eks.Cluster, principal: str, opts: pulumi.ResourceOptions
    ) -> pulumi.Resource:
        entry = aws.eks.AccessEntry(
            name, cluster_name=cluster.name, principal_arn=principal, type="STANDARD", tags=args.tags, opts=opts
        )
        return aws.eks.AccessPolicyAssociation(
            name,
            cluster_name=cluster.name,
            principal_arn=entry.principal_arn,
            policy_arn=ADMIN.format(partition=args.place.partition),
            access_scope={"type": "cluster"},
            opts=pulumi.ResourceOptions(parent=entry),
        )

    def _nodes(
        self,
        name: str,
        args: EksClusterArgs,
        cluster: aws.eks.Cluster,
        role: aws.iam.Role,
        granted: Sequence[pulumi.Resource],
    ) -> list[pulumi.Resource]:
        """A managed node group, and the add-ons that Auto Mode would have built in."""
        nodes = args.settings.nodes
        addons = [self._addon(name, addon, args, cluster, granted) for addon in ADDONS_BEFORE_NODES]
        group = aws.eks.NodeGroup(
            name,
            cluster_name=cluster.name,
            node_role_arn=role.arn,
            subnet_ids=args.subnet_ids or [],
            ami_type=nodes.ami_type,
            capacity_type="SPOT" if nodes.spot else "ON_DEMAND",
            instance_types=nodes.instance_types,
            disk_size=nodes.disk_gb,
            scaling_config={"min_size": nodes.min, "desired_size": nodes.desired, "max_size": nodes.max},
            update_config={"max_unavailable": 1},
            tags=args.tags,
            # An autoscaler changes the desired size.
            opts=pulumi.ResourceOptions(
                parent=cluster, depends_on=[*granted, *addons], ignore_changes=["scalingConfig.desiredSize"]
            ),
        )
        self._node_group = group
        return [group, *addons, *(self._addon(name, addon, args, cluster, [group]) for addon in ADDONS_ON_NODES)]

    @staticmethod
    def _addon(
        name: str, addon: str, args: EksClusterArgs, cluster: aws.eks.Cluster, after: Sequence[pulumi.Resource]
    ) -> pulumi.Resource:
        return aws.eks.Addon(
            f"{name}-{addon}",
            cluster_name=cluster.name,
            addon_name=addon,
            resolve_conflicts_on_create="OVERWRITE",
            resolve_conflicts_on_update="PRESERVE",
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=cluster, depends_on=list(after)),
        )

    def _pod_role(self, name: str, args: EksClusterArgs) -> aws.iam.Role:
        """The role of the replicas: what the SageMaker role may do in the bucket, and nothing else."""
        settings, place = args.settings, args.place
        trust: pulumi.Output[str]
        if settings.identity == "pod-identity":
            trust = self.cluster_name.apply(
                lambda cluster: json.dumps(pod_trust(place, cluster, settings.namespace, settings.service_account))
            )
        else:
            trust = self._web_identity(name, args)
        role = aws.iam.Role(
            f"{name}-pods",
            description="Replicas of DiLoCo runs on a cluster",
            assume_role_policy=trust,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=self),
        )
        policy = aws.iam.RolePolicy(
            f"{name}-pods",
            role=role.name,
            policy=args.storage.value.apply(
                lambda storage: json.dumps(
                    replica_policy(place, storage, data_uris=args.data_uris, secret_arns=args.secret_arns)
                )
            ),
            opts=pulumi.ResourceOptions(parent=role),
        )
        self._ready.append(policy)
        if settings.identity == "pod-identity":
            association = aws.eks.PodIdentityAssociation(
                name,
                cluster_name=self.cluster_name,
                namespace=settings.namespace,
                service_account=settings.service_account,
                role_arn=role.arn,
                tags=args.tags,
                opts=pulumi.ResourceOptions(parent=self),
            )
            self._ready.append(association)
        self.pod_role_arn = role.arn
        return role

    def _web_identity(self, name: str, args: EksClusterArgs) -> pulumi.Output[str]:
        """Trust in the cluster's own tokens, by an OpenID Connect provider in IAM."""
        settings = args.settings
        if self._issuer is None:
            raise pulumi.RunError(
                f"diloco:eks.identity 'irsa': cluster {settings.adopt} has no OpenID Connect issuer; allowed: "
                "pod-identity"
            )
        provider: pulumi.Input[str]
        if settings.oidc_provider_arn is not None:
            provider = settings.oidc_provider_arn
        else:
            provider = aws.iam.OpenIdConnectProvider(
                name,
                url=self._issuer,
                client_id_lists=[AUDIENCE],
                tags=args.tags,
                opts=pulumi.ResourceOptions(parent=self),
            ).arn
        subject = f"system:serviceaccount:{settings.namespace}:{settings.service_account}"
        return pulumi.Output.from_input(provider).apply(
            lambda arn: json.dumps(web_identity_trust(arn, {"aud": AUDIENCE, "sub": subject}))
        )

    def _in_the_cluster(self, name: str, args: EksClusterArgs, role: aws.iam.Role) -> None:
        """Namespace, the replicas' ServiceAccount, and the launcher's Role."""
        settings = args.settings
        opts = pulumi.ResourceOptions(parent=self, provider=self.provider, depends_on=self._ready)
        space = kubernetes.core.v1.Namespace(
            name, metadata=restricted_namespace(settings.namespace)["metadata"], opts=opts
        )
        inside = pulumi.ResourceOptions(parent=self, provider=self.provider, depends_on=[space])
        annotations = {ROLE_ANNOTATION: role.arn} if settings.identity == "irsa" else {}
        account = kubernetes.core.v1.ServiceAccount(
            f"{name}-replica",
            metadata={
                "name": settings.service_account,
                "namespace": settings.namespace,
                "annotations": annotations,
            },
            # Replicas need no API.
            automount_service_account_token=False,
            opts=inside,
        )
        rights = launcher_role(settings.namespace)
        launcher = kubernetes.rbac.v1.Role(
            f"{name}-launcher", metadata=rights["metadata"], rules=_snake(rights["rules"]), opts=inside
        )
        launching = kubernetes.core.v1.ServiceAccount(
            f"{name}-launcher", metadata=launcher_account(settings.namespace)["metadata"], opts=inside
        )
        binding = launcher_binding(settings.namespace)
        kubernetes.rbac.v1.RoleBinding(
            f"{name}-launcher",
            metadata=binding["metadata"],
            role_ref={"api_group": binding["roleRef"]["apiGroup"], "kind": "Role", "name": binding["roleRef"]["name"]},
            subjects=binding["subjects"],
            opts=pulumi.ResourceOptions(parent=self, provider=self.provider, depends_on=[launcher, launching]),
        )
        self.service_account = settings.service_account
        self.namespace = pulumi.Output.all(account.id).apply(lambda _: settings.namespace)


def _snake(rules: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Rules as the Python SDK spells them."""
    return [{"api_groups": rule["apiGroups"], "resources": rule["resources"], "verbs": rule["verbs"]} for rule in rules]


def _kubeconfig(cluster: str, region: str, server: str, authority: str) -> str:
    """A kubeconfig that asks for tokens when they are needed, so that none is in the state."""
    return json.dumps(kubeconfig_document(cluster, region, server, authority, python=sys.executable))
