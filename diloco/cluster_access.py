"""Who may do what in a cluster's namespace: the launcher's Role, and nothing for the replicas, who need no API.

Pure functions of names; `infra/` makes what they return, `launch.py access --cloud kubernetes` prints it.
"""

from __future__ import annotations

from typing import Any, Literal

LAUNCHER = "diloco-launcher"

Manifest = dict[str, Any]
Kind = Literal["job", "volcano", "rayjob"]
"""What wraps the pods of the launcher's runs."""


def launcher_rules(workload: Kind = "job") -> list[dict[str, list[str]]]:
    """What `scripts/launch.py --backend kubernetes` does, and nothing else
    (https://kubernetes.io/docs/reference/access-authn-authz/rbac/).
    """
    rules = [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "delete", "get", "list", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        # Why a pod was refused, and why a queue holds a run.
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
        {"apiGroups": ["kueue.x-k8s.io"], "resources": ["workloads"], "verbs": ["list"]},
    ]
    others = {"volcano": ("batch.volcano.sh", "jobs"), "rayjob": ("ray.io", "rayjobs")}
    if workload in others:
        group, resource = others[workload]
        rules.append({"apiGroups": [group], "resources": [resource], "verbs": ["create", "delete", "list"]})
    return rules


def launcher_role(namespace: str, workload: Kind = "job") -> Manifest:
    """A Role with the launcher's rules."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": LAUNCHER, "namespace": namespace},
        "rules": launcher_rules(workload),
    }


def launcher_account(namespace: str) -> Manifest:
    """A ServiceAccount for a launcher that runs in the cluster."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": LAUNCHER, "namespace": namespace},
    }


def launcher_binding(namespace: str) -> Manifest:
    """Gives the Role to the ServiceAccount; people and groups are added as `subjects`."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": LAUNCHER, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": LAUNCHER},
        "subjects": [{"kind": "ServiceAccount", "name": LAUNCHER, "namespace": namespace}],
    }


def restricted_namespace(namespace: str) -> Manifest:
    """A namespace that admits only pods of the `restricted` Pod Security Standard."""
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }


def cluster_documents(namespace: str, workload: Kind = "job") -> Manifest:
    """All of it as one List, for `kubectl apply -f -`."""
    items = [
        restricted_namespace(namespace),
        launcher_account(namespace),
        launcher_role(namespace, workload),
        launcher_binding(namespace),
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}
