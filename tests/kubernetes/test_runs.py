"""Runs to the end on real controllers: training processes in pods, an S3 between them, and what befalls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.verify import verify_run

if TYPE_CHECKING:
    from tests.kubernetes.conftest import MakeRun
    from tests.kubernetes.runs import Run


async def _verdict(run: Run) -> object:
    verdict, _ = await verify_run(run.settings.uri)
    return verdict["same"]


def test_four_replicas_train_to_the_end_with_equal_digests(make_run: MakeRun) -> None:
    run = make_run(replicas=4).start()
    report = run.end()
    assert report.succeeded, f"{report}\n{run.state()}"
    assert len({line.digest for line in report.replicas}) == 1
