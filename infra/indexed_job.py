"""A run as an Indexed Job that the stack itself owns: `pulumi up` starts it, another image or run id replaces it.

The bucket holds the run's state. So a Job that is replaced under the same run id goes on with the same run, as the next
attempts of its ranks; another run id starts another run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_kubernetes as kubernetes

from diloco.errors import ConfigurationError
from diloco.executors.kubernetes_limits import check
from diloco.executors.kubernetes_manifest import PodSettings, job_manifest
from diloco.spec import DEFAULT_TRAINER, RunSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infra.cluster_settings import EksSettings, JobSettings

FIXED = (
    "spec.completions",
    "spec.completionMode",
    "spec.podFailurePolicy",
    "spec.backoffLimitPerIndex",
    "spec.template",
)
"""What the API does not let change on a Job that exists."""
BY_QUEUE = ("spec.suspend", "spec.template.spec.nodeSelector", "spec.template.spec.tolerations")
"""What Kueue changes on a Job when it admits it."""


@dataclass(frozen=True)
class IndexedJobArgs:
    """Arguments of :class:`IndexedJob`."""

    pods: PodSettings
    """Its `image_uri` and `namespace` are replaced by those here."""
    run: RunSettings
    """Its `rendezvous` is replaced by the one here."""
    image_uri: pulumi.Input[str]
    rendezvous_uri: pulumi.Input[str]
    namespace: pulumi.Input[str]
    """Known once pods can be made in it."""
    provider: kubernetes.Provider


def run_of(eks: EksSettings, job: JobSettings, region: str) -> tuple[PodSettings, RunSettings]:
    """What the configuration says of pods and run. RunError for a run that can't work."""
    kwargs = dict(job.trainer_kwargs)
    if (job.trainer_module, job.trainer_fn) == DEFAULT_TRAINER:
        kwargs = {"model": "tiny", "data": "stdlib"} | kwargs
    pods = PodSettings(
        run_id=job.run_id,
        namespace=eks.namespace,
        image_uri="",
        service_account=eks.service_account,
        cpu=job.cpu,
        memory=job.memory,
        shared_memory=job.shared_memory,
        gpus=job.gpus,
        retries=job.retries,
        queue=job.queue,
        priority_class=job.priority_class,
        node_selector=job.node_selector,
        credentials_secret=job.credentials_secret,
        token_secret=job.token_secret,
        endpoint_url=eks.endpoint_url,
        region=region,
    )
    try:
        run = RunSettings.checked(
            replicas=job.replicas,
            steps=job.steps,
            sync_every=job.sync_every,
            fragments=job.fragments,
            sync_delay=job.sync_delay,
            seed=job.seed,
            run_id=job.run_id,
            rendezvous="s3://known-later",
            trainer_module=job.trainer_module,
            trainer_fn=job.trainer_fn,
            trainer_kwargs=kwargs,
            exchange={"policy": job.policy, "min_replicas": job.min_replicas},
        )
        check(replace(pods, image_uri="known-later"), run.replica_specs())
    except ConfigurationError as problem:
        raise pulumi.RunError(f"diloco:job: {problem} (--sync-every is job.syncEvery here, and so on)") from None
    return pods, run


class IndexedJob(pulumi.ComponentResource):
    """The Job of one run."""

    name: pulumi.Output[str]

    def __init__(self, name: str, args: IndexedJobArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:IndexedJob", name, None, opts)
        pods, run = args.pods, args.run
        made = pulumi.Output.all(args.image_uri, args.rendezvous_uri, args.namespace).apply(
            lambda known: _manifest(pods, run, *known)
        )
        ignored: Sequence[str] = () if pods.queue is None else BY_QUEUE
        job = kubernetes.batch.v1.Job(
            name,
            metadata=made.apply(_metadata),
            spec=made.apply(_spec),
            opts=pulumi.ResourceOptions(
                parent=self,
                provider=args.provider,
                # The ranks' next attempts would fence those that still run.
                delete_before_replace=True,
                replace_on_changes=list(FIXED),
                ignore_changes=list(ignored),
            ),
        )
        self.name = job.metadata.apply(lambda metadata: str(metadata["name"]))
        self.register_outputs({"name": self.name})


def _metadata(manifest: dict[str, Any]) -> Any:
    # A run takes hours, and `up` is over once its Job is there.
    annotations = {**manifest["metadata"]["annotations"], "pulumi.com/skipAwait": "true"}
    return {**manifest["metadata"], "annotations": annotations}


def _spec(manifest: dict[str, Any]) -> Any:
    return manifest["spec"]


def _manifest(pods: PodSettings, run: RunSettings, image: str, rendezvous: str, namespace: str) -> dict[str, Any]:
    run = run.model_copy(update={"rendezvous": rendezvous})
    manifest = job_manifest(replace(pods, image_uri=image, namespace=namespace), run.replica_specs()[0])
    # `skipAwait` holds for deletions too: a replaced Job ends while its successor begins, so it needs another name.
    digest = hashlib.sha256(json.dumps(manifest["spec"], sort_keys=True).encode()).hexdigest()
    manifest["metadata"]["name"] += f"-{digest[:7]}"
    return manifest
