"""How long it takes to submit a run of many replicas to SageMaker, and whether a job is lost or doubled.

`--jobs` training jobs are submitted against the tests' SageMaker, whose CreateTrainingJob is throttled at `--rate`
calls a second; every `--lose`-th answer is lost after the job was created. The jobs' containers are not run. The claim:
under 60 s for 200 jobs at 5 a second, each rank has exactly one job, and all that exist are stopped at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import print_result, say
from diloco.embedded import environment
from diloco.executors.base import ReplicaSpec
from diloco.executors.sagemaker import SageMakerExecutor
from diloco.executors.sagemaker_request import JobSettings
from tests.support.sagemaker import SageMakerServer, Service

LIMIT_SECONDS = 60.0
RUN = "bench"


def main() -> int:
    """Submit, look, stop, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="ranks (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=5.0, help="calls a second (default: %(default)s)")
    parser.add_argument("--lose", type=int, default=50, help="lose every n-th answer (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-launch-") as folder:
        service = Service(Path(folder, "jobs"))
        service.faults.rates["CreateTrainingJob"] = options.rate
        with SageMakerServer(service) as server, environment(_environment(server.url)):
            figures = _measure(service, options.jobs, options.lose)
    seconds = figures["submit_seconds"]
    figures |= {"rate": options.rate, "limit_seconds": LIMIT_SECONDS}
    one_each = figures["jobs_a_rank"] == {"1": options.jobs}
    return print_result(figures, holds=seconds < LIMIT_SECONDS and one_each and figures["left_running"] == 0)


def _measure(service: Service, count: int, lose: int) -> dict[str, Any]:
    executor = SageMakerExecutor(_settings(), on_note=say)
    specs = [ReplicaSpec(rank, count, f"s3://bucket/runs/{RUN}", "trainer", "train", {}, {}) for rank in range(count)]
    service.faults.lose_every = lose
    started = time.perf_counter()
    handles = executor.launch_replicas(specs)
    seconds = time.perf_counter() - started
    say(f"{count} jobs in {seconds:.1f} s")
    jobs = Counter(job.tags["diloco:rank"] for job in service.jobs)
    executor.cancel(handles)
    return {
        "jobs": count,
        "submit_seconds": round(seconds, 2),
        "throttled_calls": service.faults.throttled,
        "lost_answers": service.faults.lost,
        "jobs_a_rank": {str(number): ranks for number, ranks in Counter(jobs.values()).items()},
        "left_running": sum(not job.terminal for job in service.jobs),
    }


def _settings() -> JobSettings:
    return JobSettings(
        run_id=RUN,
        region="us-east-1",
        account="123456789012",
        image_uri=f"123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer@sha256:{'0' * 64}",
        role_arn="arn:aws:iam::123456789012:role/jobs",
        output_uri="s3://bucket/output",
    )


def _environment(url: str) -> dict[str, str | None]:
    return {
        "AWS_ENDPOINT_URL_SAGEMAKER": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_SESSION_TOKEN": None,
        "AWS_PROFILE": None,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


if __name__ == "__main__":
    sys.exit(main())
