"""How much less a replica waits when the exchange overlaps with training.

Two replicas, real processes, the embedded S3 behind a proxy that is `--latency-ms` late each way. A first short run
measures how long a round takes; then inner steps are paced so that a round takes half a sync interval, and the same
run is made with a sync delay of 0 and of three quarters of the interval. Claim: the time that a replica waits falls
by at least 80 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import print_result, say
from benchmarks.link import Lane, Link
from diloco.embedded import EmbeddedS3
from diloco.executors.local import LocalProcessExecutor
from diloco.run import make_diloco_run
from diloco.spec import RunSettings

if TYPE_CHECKING:
    from diloco.report import RunReport

MUST_FALL_BY = 0.80


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=20.0, help="one way (default: %(default)s)")
    parser.add_argument("--sync-every", type=int, default=40, help="inner steps of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of each measured run (default: %(default)s)")
    options = parser.parse_args()
    every, rounds = options.sync_every, options.rounds
    with (
        tempfile.TemporaryDirectory(prefix="diloco-overlap-") as folder,
        EmbeddedS3(Path(folder, "s3")) as s3,
        Link(s3.endpoint_url, Lane(latency_ms=options.latency_ms), Lane(latency_ms=options.latency_ms)) as proxy,
    ):
        bench = _Bench(s3, proxy, Path(folder, "logs"), every)
        round_seconds = _waiting(bench.run("calibrate", rounds=5, delay=0, step_seconds=0.03)) / 5
        step_seconds = 2 * round_seconds / every
        say(f"a round takes {round_seconds:.2f} s: inner steps of {step_seconds * 1000:.0f} ms")
        without = _waiting(bench.run("delay-0", rounds=rounds, delay=0, step_seconds=step_seconds))
        overlapped = _waiting(bench.run("delay", rounds=rounds, delay=3 * every // 4, step_seconds=step_seconds))
    fell = 1 - overlapped / without
    figures = {
        "replicas": 2,
        "latency_ms_each_way": options.latency_ms,
        "rounds": rounds,
        "sync_interval_seconds": round(every * step_seconds, 3),
        "round_seconds": round(without / rounds, 3),
        "round_share_of_interval": round(without / rounds / (every * step_seconds), 3),
        "sync_delay_steps": 3 * every // 4,
        "seconds_waiting_delay_0": round(without, 3),
        "seconds_waiting_with_delay": round(overlapped, 3),
        "waiting_fell_by": round(fell, 4),
        "must_fall_by": MUST_FALL_BY,
    }
    return print_result(figures, holds=fell >= MUST_FALL_BY)


class _Bench:
    def __init__(self, s3: EmbeddedS3, proxy: Link, logs: Path, sync_every: int) -> None:
        self._parent = f"{s3.uri}/overlap"
        self._options: dict[str, Any] = {**s3.storage_options, "endpoint_url": proxy.endpoint_url}
        self._env = s3.env | {"AWS_ENDPOINT_URL": proxy.endpoint_url, "AWS_ENDPOINT_URL_S3": proxy.endpoint_url}
        self._logs = logs
        self._sync_every = sync_every

    def run(self, name: str, *, rounds: int, delay: int, step_seconds: float) -> RunReport:
        settings = RunSettings.checked(
            replicas=2,
            steps=rounds * self._sync_every,
            sync_every=self._sync_every,
            sync_delay=delay,
            run_id=name,
            rendezvous=self._parent,
            trainer_module="benchmarks.paced",
            trainer_fn="train",
            trainer_kwargs={"step_seconds": step_seconds},
        )
        executor = LocalProcessExecutor(log_dir=self._logs / name, env=self._env)
        report = make_diloco_run(executor, settings, storage_options=self._options)
        if report.error is not None:
            sys.exit(f"the run {name} failed: {report.error}")
        say(f"{name}: {rounds} rounds in {report.wall_seconds:.1f} s")
        return report


def _waiting(report: RunReport) -> float:
    """Seconds that a replica waited, the mean over the replicas."""
    seconds = [replica.seconds_waiting or 0.0 for replica in report.replicas]
    return sum(seconds) / len(seconds)


if __name__ == "__main__":
    sys.exit(main())
