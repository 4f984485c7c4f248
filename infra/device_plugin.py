"""NVIDIA's device plugin on nodes whose image does not bring it: without it no node has `nvidia.com/gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pulumi
import pulumi_kubernetes as kubernetes

from diloco.executors.kubernetes_manifest import GPU

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "kube-system"
"""It needs a folder of the node, which the runs' namespace rightly refuses."""
SOCKETS = "/var/lib/kubelet/device-plugins"
NODE_GROUP_LABEL = "eks.amazonaws.com/nodegroup"


def device_plugin(
    name: str,
    image: str,
    node_group: pulumi.Input[str],
    *,
    parent: pulumi.Resource,
    provider: kubernetes.Provider,
    depends_on: Sequence[pulumi.Resource],
) -> kubernetes.apps.v1.DaemonSet:
    """One pod on each node of the group, as NVIDIA's own manifest has it and with less rights
    (https://github.com/NVIDIA/k8s-device-plugin): root, since the kubelet's folder is root's, and nothing else.
    """
    labels = {"app.kubernetes.io/name": "nvidia-device-plugin", "app.kubernetes.io/instance": name}
    return kubernetes.apps.v1.DaemonSet(
        f"{name}-device-plugin",
        metadata={"name": f"{name}-device-plugin", "namespace": NAMESPACE, "labels": labels},
        spec={
            "selector": {"match_labels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automount_service_account_token": False,
                    "enable_service_links": False,
                    "node_selector": {NODE_GROUP_LABEL: node_group},
                    "priority_class_name": "system-node-critical",
                    "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
                    "security_context": {"seccomp_profile": {"type": "RuntimeDefault"}},
                    "containers": [
                        {
                            "name": "device-plugin",
                            "image": image,
                            "resources": {
                                "requests": {"cpu": "10m", "memory": "64Mi"},
                                "limits": {"memory": "256Mi"},
                            },
                            "security_context": {
                                "allow_privilege_escalation": False,
                                "capabilities": {"drop": ["ALL"]},
                                "read_only_root_filesystem": True,
                            },
                            "volume_mounts": [{"name": "sockets", "mount_path": SOCKETS}],
                        }
                    ],
                    "volumes": [{"name": "sockets", "host_path": {"path": SOCKETS, "type": "Directory"}}],
                },
            },
        },
        opts=pulumi.ResourceOptions(parent=parent, provider=provider, depends_on=list(depends_on)),
    )
