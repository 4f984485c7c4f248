"""A run as one Kubernetes Job in Indexed mode, built from values and nothing else; `infra/` and the executor use it.

Each index is a replica: its completion index is its rank, and the Job controller restarts it by itself, up to `retries`
times, without touching the others. https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from diloco.errors import ExitCode
from diloco.exchange.settings import ExchangeSettings
from diloco.executors.local import arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.executors.base import ReplicaSpec

CONTAINER = "replica"
RUN_LABEL = "diloco/run-id"
RANK_LABEL = "batch.kubernetes.io/job-completion-index"
"""The Job controller's own, on every pod."""
VOLCANO_RANK_LABEL = "volcano.sh/task-index"
"""Volcano's, on every pod of a task."""
RAY_RANK_LABEL = "diloco/rank"
"""Of a RayJob and its head pod: KubeRay has none."""
RANK_LABELS = (RANK_LABEL, VOLCANO_RANK_LABEL, RAY_RANK_LABEL)
RAY_VARIABLES = ("RAY_JOB_STOP_WAIT_TIME_S", "RAY_USAGE_STATS_ENABLED")
"""Of a RayJob's head: seconds between Ray's SIGTERM and SIGKILL, and whether Ray reports its use to its makers."""
RENDEZVOUS_ANNOTATION = "diloco/rendezvous-uri"
ENDPOINT_ANNOTATION = "diloco/endpoint-url"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

GPU = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
"""Node label of NVIDIA's GPU feature discovery, whoever runs the cluster."""
FOR_GPU = {
    "A10G": "NVIDIA-A10G",
    "A100": "NVIDIA-A100-SXM4-40GB",
    "H100": "NVIDIA-H100-80GB-HBM3",
    "L4": "NVIDIA-L4",
    "L40S": "NVIDIA-L40S",
    "T4": "Tesla-T4",
}
"""A GPU's common name → what the node label calls it (https://github.com/NVIDIA/k8s-device-plugin, GFD's labels)."""

CREDENTIALS = (("AWS_ACCESS_KEY_ID", False), ("AWS_SECRET_ACCESS_KEY", False), ("AWS_SESSION_TOKEN", True))
"""Keys that are read of a Secret with credentials, and whether they may be missing."""
TOKEN = "HF_TOKEN"  # noqa: S105 - a key's name
Kind = Literal["job", "volcano", "rayjob"]
HOPELESS = (ExitCode.USAGE, ExitCode.FENCED, ExitCode.BAD_CONFIGURATION)
"""Exit codes after which the same pod again would end the same way, or must not be there."""


@dataclass(frozen=True)
class PodSettings:
    """What all replicas of a run have in common on a cluster. Quantities are Kubernetes's ("4", "500m", "16Gi")."""

    run_id: str
    namespace: str
    image_uri: str
    service_account: str = "default"
    prefix: str = "diloco"
    """The Job is called `<prefix>-<run id>`."""
    cpu: str = "1"
    memory: str = "4Gi"
    gpus: int = 0
    """NVIDIA GPUs of each replica."""
    shared_memory: str = "1Gi"
    """Size of /dev/shm, which counts against `memory`."""
    retries: int = 3
    """How often the cluster restarts a rank that died; disruptions are not counted."""
    grace_seconds: int = 120
    """Between SIGTERM and SIGKILL: for leaving the round."""
    max_runtime: int | None = None
    """Seconds after which the cluster ends the run."""
    queue: str | None = None
    """A Kueue LocalQueue, which starts the Job (each RayJob) when its quota allows; for Volcano one of its Queues."""
    priority_class: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    spread_over: str | None = "kubernetes.io/hostname"
    """Node label over whose values replicas are spread if possible: what fails together should hold few of them."""
    user: int = 1000
    credentials_secret: str | None = None
    """Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; None: the ServiceAccount's own role."""
    token_secret: str | None = None
    """Secret whose key HF_TOKEN is a Hugging Face token."""
    endpoint_url: str | None = None
    """Of an S3 that is not Amazon's, as pods reach it."""
    region: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """More labels of the Job and its pods."""
    workload: Kind = "job"
    """What wraps the pods: an Indexed Job, a Volcano Job, or RayJobs."""

    @property
    def name(self) -> str:
        """The Job's."""
        return f"{self.prefix}-{self.run_id}"


def job_manifest(settings: PodSettings, spec: ReplicaSpec) -> dict[str, Any]:
    """The Job of a whole run: as many indexes as `spec.world_size`. `spec` is any rank's; its rank is not used."""
    labels = run_labels(settings)
    template = pod_template(settings, spec, [*arguments(spec)])
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": spec.world_size,
        "parallelism": spec.world_size,
        "backoffLimitPerIndex": settings.retries,
        "maxFailedIndexes": spec.world_size - least_replicas(spec),
        # A pod's successor starts when it is gone, not while it still ends: one of them would only be fenced.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # Evictions, drained nodes, reclaimed spot capacity: nobody's fault, and never counted.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailIndex",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": sorted(int(code) for code in HOPELESS),
                    },
                },
            ]
        },
        "template": template,
    }
    if settings.max_runtime is not None:
        job["activeDeadlineSeconds"] = settings.max_runtime
    if settings.queue is not None:
        # Kueue unsuspends it; a Job that started by itself would have to be stopped again.
        job["suspend"] = True
        labels = {**labels, QUEUE_LABEL: settings.queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": settings.name,
            "namespace": settings.namespace,
            "labels": labels,
            "annotations": run_annotations(settings, spec),
        },
        "spec": job,
    }


def pod_template(settings: PodSettings, spec: ReplicaSpec, args: Sequence[str]) -> dict[str, Any]:
    """A replica's pod: it passes the `restricted` Pod Security Standard
    (https://kubernetes.io/docs/concepts/security/pod-security-standards/).
    """
    gpus = settings.gpus or (1 if spec.gpu is not None else 0)
    requests = {"cpu": settings.cpu, "memory": settings.memory}
    # No limit on CPUs: it would only slow a replica down while others leave theirs idle.
    limits: dict[str, str] = {"memory": settings.memory}
    if gpus:
        requests[GPU] = limits[GPU] = str(gpus)
    container = {
        "name": CONTAINER,
        "image": settings.image_uri,
        "args": list(args),
        "env": environment(settings, spec),
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        # How a replica ended is its last error line, and the pod's status is where to look for it first.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the image's HOME; its root is read-only
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the runtime's own holds 64 MiB
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "serviceAccountName": settings.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user,
            "runAsGroup": settings.user,
            "fsGroup": settings.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
        ],
    }
    selector = dict(settings.node_selector)
    if spec.gpu is not None:
        selector.setdefault(GPU_PRODUCT, FOR_GPU[spec.gpu])
    tolerations = [dict(toleration) for toleration in settings.tolerations]
    if gpus and not any(toleration.get("key") == GPU for toleration in tolerations):
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    if selector:
        pod["nodeSelector"] = selector
    if tolerations:
        pod["tolerations"] = tolerations
    if settings.priority_class is not None:
        pod["priorityClassName"] = settings.priority_class
    if settings.spread_over is not None:
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": settings.spread_over,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {RUN_LABEL: settings.run_id}},
            }
        ]
    return {
        "metadata": {
            "labels": run_labels(settings),
            # Karpenter would move a pod to a cheaper node in mid-run.
            "annotations": {"karpenter.sh/do-not-disrupt": "true"},
        },
        "spec": pod,
    }


def environment(settings: PodSettings, spec: ReplicaSpec) -> list[dict[str, Any]]:
    """The container's variables; secrets by reference."""
    plain = {**settings.env, **spec.env}
    if settings.endpoint_url is not None:
        plain["AWS_ENDPOINT_URL_S3"] = settings.endpoint_url
    if settings.region is not None:
        plain["AWS_REGION"] = plain["AWS_DEFAULT_REGION"] = settings.region  # boto3 reads the second only
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in sorted(plain.items())]
    if settings.credentials_secret is not None:
        variables += [_from_secret(settings.credentials_secret, key, optional) for key, optional in CREDENTIALS]
    if settings.token_secret is not None:
        variables.append(_from_secret(settings.token_secret, TOKEN, optional=False))
    return variables


def run_labels(settings: PodSettings) -> dict[str, str]:
    """By which everything of a run is found."""
    return {
        **settings.labels,
        "app.kubernetes.io/name": "diloco",
        "app.kubernetes.io/component": CONTAINER,
        RUN_LABEL: settings.run_id,
    }


def run_annotations(settings: PodSettings, spec: ReplicaSpec) -> dict[str, str]:
    """What else a launcher on another machine must know."""
    found = {RENDEZVOUS_ANNOTATION: spec.rendezvous_uri}
    if settings.endpoint_url is not None:
        found[ENDPOINT_ANNOTATION] = settings.endpoint_url
    return found


def least_replicas(spec: ReplicaSpec) -> int:
    """How many ranks must not fail for good: all under `strict`, `min_replicas` under `skip`."""
    exchange = ExchangeSettings.model_validate(dict(spec.exchange))
    return spec.world_size if exchange.policy == "strict" else exchange.majority(spec.world_size)


def _from_secret(secret: str, key: str, optional: bool) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": key, "valueFrom": {"secretKeyRef": reference}}
