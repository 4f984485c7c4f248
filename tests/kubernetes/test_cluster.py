"""The tests' own cluster: its node does to pods what a kubelet does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.kubernetes.conftest import SHELL

if TYPE_CHECKING:
    from tests.support.cluster import Cluster


def shell(name: str, script: str, **container: Any) -> dict[str, Any]:
    """A pod that the restricted standard admits."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    return {
        "metadata": {"name": name, "labels": {"app": "it"}, "annotations": {"note": "hello"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 2000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {"name": "main", "image": SHELL, "args": ["-c", script], "securityContext": restricted, **container}
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        },
    }


def ended(cluster: Cluster, namespace: str, name: str) -> Any:
    def look() -> Any:
        pod = cluster.core.read_namespaced_pod(name, namespace)
        return pod if pod.status.phase in ("Succeeded", "Failed") else None

    return cluster.until(look, f"end of pod {name}")


def has_logged(cluster: Cluster, namespace: str, name: str, line: str) -> None:
    cluster.until(lambda: line in cluster.kubectl("logs", "-n", namespace, name).stdout.splitlines(), f"{line!r}")


def run(cluster: Cluster, namespace: str, script: str, **container: Any) -> tuple[int, str]:
    """Exit code and log of a script in a pod."""
    cluster.core.create_namespaced_pod(namespace, shell("it", script, **container))
    pod = ended(cluster, namespace, "it")
    log = cluster.kubectl("logs", "--namespace", namespace, "it")
    assert log.returncode == 0, log.stderr
    return pod.status.container_statuses[0].state.terminated.exit_code, log.stdout


def test_environment_user_and_exit_code_are_the_pods(cluster: Cluster, namespace: str) -> None:
    cluster.core.create_namespaced_secret(namespace, {"metadata": {"name": "s"}, "stringData": {"KEY": "hidden"}})
    code, log = run(
        cluster,
        namespace,
        'echo "$NOTE $NAME $KEY $HOSTNAME $1"; id -u; id -G; echo $$$$; exit 7',
        env=[
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "NOTE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['note']"}}},
        ],
        envFrom=[{"secretRef": {"name": "s"}}],
    )
    assert code == 7
    assert log.splitlines() == ["hello it hidden it ", "1000", "1000 2000", "1"]


def test_the_root_is_read_only_and_volumes_are_not(cluster: Cluster, namespace: str) -> None:
    script = """
        for path in /here /usr/here /opt/ml/code/here /root/here; do touch $path 2>/dev/null && echo "wrote $path"; done
        touch /tmp/here /dev/shm/here && ls -d /tmp/here && grep -E '^(CapBnd|NoNewPrivs)' /proc/self/status
        df --output=fstype /dev/shm | tail -1
    """
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    code, log = run(cluster, namespace, script, volumeMounts=mounts)
    assert code == 0
    assert log.split() == ["/tmp/here", "CapBnd:", "0" * 16, "NoNewPrivs:", "1", "tmpfs"]  # noqa: S108


def test_deletion_is_sigterm_and_after_the_grace_period_sigkill(cluster: Cluster, namespace: str) -> None:
    scripts = {
        "polite": "trap 'exit 3' TERM; echo up; while :; do sleep 0.1; done",
        "deaf": "trap '' TERM; echo up; while :; do sleep 0.1; done",
    }
    for name, script in scripts.items():
        pod = shell(name, script)
        pod["metadata"]["finalizers"] = ["test/look"]  # or it would be gone before it can be looked at
        cluster.core.create_namespaced_pod(namespace, pod)
    for name in scripts:
        has_logged(cluster, namespace, name, "up")
        cluster.core.delete_namespaced_pod(name, namespace, grace_period_seconds=1)
    codes = {
        name: ended(cluster, namespace, name).status.container_statuses[0].state.terminated.exit_code
        for name in scripts
    }
    assert codes == {"polite": 3, "deaf": 137}
    for name in scripts:
        cluster.core.patch_namespaced_pod(name, namespace, {"metadata": {"finalizers": None}})
    cluster.until(lambda: not cluster.pods(namespace), "end of both pods")


def test_logs_are_followed_through_the_api(cluster: Cluster, namespace: str) -> None:
    cluster.core.create_namespaced_pod(namespace, shell("it", "for i in 1 2 3; do echo line $i; sleep 0.2; done"))
    cluster.until(lambda: cluster.core.read_namespaced_pod("it", namespace).status.phase != "Pending", "start")
    followed = cluster.kubectl("logs", "--namespace", namespace, "it", "--follow")
    assert followed.stdout == "line 1\nline 2\nline 3\n"
    assert cluster.kubectl("logs", "--namespace", namespace, "it", "--tail", "1").stdout == "line 3\n"


def test_what_keeps_a_container_from_starting_is_told(cluster: Cluster, namespace: str) -> None:
    missing = shell("missing", "true", envFrom=[{"secretRef": {"name": "later"}}])
    cluster.core.create_namespaced_pod(namespace, shell("unknown", "true", image="registry.test/no:1"))
    cluster.core.create_namespaced_pod(namespace, missing)

    def waiting(name: str) -> str | None:
        statuses = cluster.core.read_namespaced_pod(name, namespace).status.container_statuses
        return statuses[0].state.waiting.reason if statuses else None

    cluster.until(lambda: waiting("unknown") == "ErrImagePull", "ErrImagePull")
    cluster.until(lambda: waiting("missing") == "CreateContainerConfigError", "CreateContainerConfigError")
    cluster.core.create_namespaced_secret(namespace, {"metadata": {"name": "later"}, "stringData": {"A": "b"}})
    assert ended(cluster, namespace, "missing").status.phase == "Succeeded"
