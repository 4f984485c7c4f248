"""A queued run waits for its quota under the real Kueue controller, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ConfigurationError
from tests.infra.conftest import ACCOUNT, REGION, environment, full_config
from tests.support.cluster import Image
from tests.support.cluster.kuberay import KubeRay, ray_definitions, ray_image
from tests.support.cluster.kueue import kueue, queue
from tests.support.engine import ROOT, require
from tests.support.gate import Gate
from tests.support.pulumi_stack import PulumiStack
from tests.support.sagemaker.ministack import ministack, put_image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kubernetes.conftest import MakeRun
    from tests.support.cluster import Cluster

LONG: dict[str, Any] = {
    "queue": "training",
    "cpu": "500m",
    "steps": 40000,
    "trainer_module": "tests.kubernetes.trainer",
    "trainer_fn": "train",
    "sync_every": 4,
}


@pytest.fixture(scope="module")
def controller(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kueue."""
    with kueue(cluster, tmp_path_factory.mktemp("kueue")):
        yield


@pytest.mark.usefixtures("controller")
def test_a_second_run_is_held_until_the_quota_is_free(make_run: MakeRun, cluster: Cluster, namespace: str) -> None:
    queue(cluster, namespace, "training", cpu="1", memory="8Gi")
    first, second = make_run(**LONG), make_run(**LONG)
    first.executor.launch_replicas(first.settings.replica_specs())
    cluster.until(
        lambda: all(handle.status == "running" for handle in first.executor.existing()), "start of the first run"
    )
    first.reaches(0, 0, 1)
    second.executor.launch_replicas(second.settings.replica_specs())
    cluster.until(
        lambda: all("insufficient" in str(handle.waits) for handle in second.executor.existing()),
        "reason of the second run",
    )
    for handle in second.executor.existing():
        assert handle.status == "pending"
        assert str(handle.waits).startswith("queue training: ")
        assert "cpu" in str(handle.waits)
    with pytest.raises(ConfigurationError, match="queued run keeps its size"):
        first.executor.scale(1, policy="skip", min_replicas=1)
    first.executor.cancel(first.executor.existing())
    cluster.until(
        lambda: all(handle.status == "running" for handle in second.executor.existing()), "start of the second run"
    )
    second.reaches(0, 0, 1)
    second.executor.cancel(second.executor.existing())


@pytest.mark.usefixtures("controller")
def test_a_second_run_of_rayjobs_is_held_until_the_quota_is_free(
    make_run: MakeRun, cluster: Cluster, namespace: str
) -> None:
    image = "registry.test/diloco-ray:1"
    cluster.kubelet.images[image] = ray_image(PYTHONPATH=str(ROOT))
    ray = {"workload": "rayjob", "image_uri": image}
    with ray_definitions(cluster), KubeRay(cluster):
        queue(cluster, namespace, "training", cpu="1", memory="8Gi")
        first, second = make_run(**LONG, **ray), make_run(**LONG, **ray)
        first.executor.launch_replicas(first.settings.replica_specs())
        first.reaches(0, 0, 1)
        second.executor.launch_replicas(second.settings.replica_specs())
        cluster.until(
            lambda: all("insufficient" in str(handle.waits) for handle in second.executor.existing()),
            "reason of the second run",
        )
        assert all(str(handle.waits).startswith("queue training: ") for handle in second.executor.existing())
        assert cluster.pods(namespace, f"diloco/run-id={second.settings.run_id}") == []
        first.executor.cancel(first.executor.existing())
        second.reaches(0, 0, 1)
        second.executor.cancel(second.executor.existing())


@pytest.mark.usefixtures("controller")
def test_a_stacks_job_waits_for_its_queue_and_stays_as_kueue_changed_it(cluster: Cluster, tmp_path: Path) -> None:
    require("pulumi", "pulumi-language-python", "pulumi-resource-pulumi-python", "pulumi-resource-kubernetes")
    space = "stack-queue"
    config: dict[str, Any] = {
        "eks": {"adopt": "platform", "namespace": space, "kubeconfig": str(cluster.kubeconfig)},
        "job": {
            "runId": "queued",
            "replicas": 2,
            "steps": 8,
            "syncEvery": 4,
            "cpu": "100m",
            "memory": "256Mi",
            "queue": "training",
        },
    }
    with ministack(tmp_path, region=REGION) as aws, Gate(aws.endpoint_url) as gate:
        role = f"arn:aws:iam::{ACCOUNT}:role/any"
        aws.client("eks").create_cluster(name="platform", roleArn=role, resourcesVpcConfig={})
        image = put_image(aws)
        # How the run ends is not the matter here, and it shall not end before the test.
        stays = ("/bin/sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait")
        cluster.kubelet.images[image] = Image(entrypoint=stays, env={"PATH": "/usr/bin:/bin"}, folder="/")

        def configuration(*without: str) -> dict[str, Any]:
            return full_config(image, {name: value for name, value in config.items() if name not in without})

        with PulumiStack(tmp_path, name="dev", environment=environment(aws, gate), config=configuration()) as stack:
            stack.up().check()

            def job() -> Any:
                [found] = cluster.batch.list_namespaced_job(space).items
                return found

            assert job().spec.suspend is True
            assert cluster.pods(space) == []
            made = job().metadata.uid

            labels = {"kubernetes.io/hostname": cluster.kubelet.node}
            queue(cluster, space, "training", node_labels=labels, cpu="1", memory="8Gi")
            cluster.until(
                lambda: [pod.status.phase for pod in cluster.pods(space)] == ["Running"] * 2,
                "start of the admitted run",
            )
            assert job().spec.suspend is False
            assert job().spec.template.spec.node_selector == labels

            stack.preview("--expect-no-changes").check()
            assert stack.up().check().changes == {}
            assert stack.up("--refresh").check().changes == {}
            assert job().metadata.uid == made
            assert job().spec.suspend is False
            assert [pod.status.phase for pod in cluster.pods(space)] == ["Running"] * 2

            stack.configure(configuration("job"))
            assert stack.up().check().changes == {"delete": 2}
            stack.destroy().check()
