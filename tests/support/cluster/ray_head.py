#!/usr/bin/env python3
"""Stands in for `ray`, of which nothing is here: `ray start --head --block` as far as KubeRay and one job meet it.

It serves Ray's API for jobs on a free port, which it prints, and runs an entrypoint as Ray's supervisor of jobs does:
by a shell, in a session of its own, with the number of threads that Ray sets, its output in a file and nowhere else; a
job that is stopped gets SIGTERM, and SIGKILL after `RAY_JOB_STOP_WAIT_TIME_S`; one that failed tells its exit code and
its last lines. When it gets SIGTERM itself, its jobs are killed. There is no cluster, no object store and no
dashboard. After https://github.com/ray-project/ray, python/ray/dashboard/modules/job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LOGS = Path("/tmp/ray/session_latest/logs")  # noqa: S108 - Ray's own place, in the pod's volume
POLL = 0.1
LAST = 20_000


class Job:
    """One entrypoint, from its submission on."""

    def __init__(self, job_id: str, entrypoint: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.status, self.message = "RUNNING", "Job is currently running."
        self._log = LOGS / f"job-driver-{job_id}.log"
        self._stopped = False
        env = {"OMP_NUM_THREADS": "1", **os.environ, "RAY_ADDRESS": "127.0.0.1:6379", "PYTHONUNBUFFERED": "1"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", entrypoint],
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
            )
        threading.Thread(target=self._wait, daemon=True).start()

    def stop(self) -> None:
        """Begin to stop it."""
        if not self._stopped:
            self._stopped = True
            threading.Thread(target=self._stop, daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal to each of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _stop(self) -> None:
        self.signal(signal.SIGTERM)
        time.sleep(POLL)
        deadline = time.monotonic() + int(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3"))
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL)
        self.signal(signal.SIGKILL)

    def _wait(self) -> None:
        while (code := self.process.poll()) is None:
            time.sleep(POLL)
        if self._stopped:
            self.status, self.message = "STOPPED", "Job was intentionally stopped."
        elif code == 0:
            self.status, self.message = "SUCCEEDED", "Job finished successfully."
        else:
            last = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-10:])[-LAST:]
            self.message = (
                f"Job entrypoint command failed with exit code {code}, last available logs (truncated to 20,000"
                f" chars):\n{last}"
            )
            self.status = "FAILED"


JOBS: dict[str, Job] = {}


class Api(BaseHTTPRequestHandler):
    """https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html"""

    def do_GET(self) -> None:
        """`/api/jobs/ID`: how it is."""
        job = JOBS.get(self.path.removeprefix("/api/jobs/"))
        if job is None:
            self._answer(404, {"error": f"Job {self.path} does not exist"})
        else:
            self._answer(200, {"status": job.status, "message": job.message})

    def do_POST(self) -> None:
        """`/api/jobs/`: submit; `/api/jobs/ID/stop`: stop."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/jobs/":
            asked = json.loads(body)
            if asked["submission_id"] in JOBS:
                self._answer(500, {"error": f"Job with submission_id {asked['submission_id']} already exists."})
                return
            JOBS[asked["submission_id"]] = Job(asked["submission_id"], asked["entrypoint"])
            self._answer(200, {"submission_id": asked["submission_id"]})
        else:
            job = JOBS.get(self.path.removeprefix("/api/jobs/").removesuffix("/stop"))
            if job is not None:
                job.stop()
            self._answer(200, {"stopped": job is not None})

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve until SIGTERM."""
    assert sys.argv[1:3] == ["start", "--head"], sys.argv
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)

    def end(_number: int, _frame: object) -> None:
        for job in JOBS.values():
            job.signal(signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    sys.stdout.write(f"dashboard: http://127.0.0.1:{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
