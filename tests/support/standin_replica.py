"""Stands in for `diloco.replica_entrypoint` in tests of the launcher: no torch, a `file://` run, a behaviour a rank.

`behave` in the trainer's arguments lists the ranks' behaviours: `ok` writes all that a replica leaves (rank 0 the
result as well), `patient` does so once another rank is at its second attempt, `late` once the result is there, `hang`
sleeps after its first beat, `mute` without any, `stubborn` sleeps and ignores SIGTERM, `refuse` ends at once with an
error line, `crash` ends by SIGKILL after its first beat, `exit 69` with that code and an error line, `fenced` with code
76 after it has claimed its rank's next attempt for somebody else, `no-result` leaves all but the result. `crash,ok`
crashes in the first attempt of its rank and is ok from the second on.

As a module it launches such runs, at a quick pace; what that needs is imported there, so that the processes start fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Claim, Commit, Evaluation, ReplicaReport, RunRecord, RunResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.exchange.records import Record
    from diloco.executors.local import LocalProcessExecutor
    from diloco.report import RunReport
    from diloco.run import Pace
    from diloco.spec import RunSettings
    from diloco.status import RunStatus


def settings(folder: Path, *behave: str, **changes: Any) -> RunSettings:
    from diloco.spec import RunSettings

    values: dict[str, Any] = {
        "replicas": len(behave) or 2,
        "steps": 20,
        "sync_every": 5,
        "run_id": "run",
        "rendezvous": folder.as_uri(),
        "trainer_module": "json",
        "trainer_fn": "loads",
        "trainer_kwargs": {"behave": list(behave)},
        "max_restarts": 0,
    }
    return RunSettings.checked(**(values | changes))


def executor(folder: Path) -> LocalProcessExecutor:
    from diloco.executors.local import LocalProcessExecutor

    return LocalProcessExecutor(log_dir=folder / "logs", command=[sys.executable, __file__], grace=0.5)


def quick(**changes: Any) -> Pace:
    from diloco.run import Pace
    from diloco.supervisor import Backoff

    values: dict[str, Any] = {"processes": 0.02, "status": 0.1, "beats": 0.05, "restarts": Backoff(0.01, 0.01)}
    return Pace(**(values | changes))


def run(
    folder: Path,
    *behave: str,
    on_status: Callable[[RunStatus], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    it: LocalProcessExecutor | None = None,
    pace: Pace | None = None,
    **changes: Any,
) -> RunReport:
    from diloco.run import make_diloco_run

    return make_diloco_run(
        it or executor(folder),
        settings(folder, *behave, **changes),
        on_status=on_status,
        on_note=on_note,
        pace=pace or quick(),
    )


def write(root: Path, key: str, record: Record) -> None:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".writing-{path.name}-{os.getpid()}")
    aside.write_bytes(record.to_json())
    aside.rename(path)


def next_attempt(root: Path, rank: int) -> Member:
    attempt = 1
    while (root / layout.claim(Member(rank, attempt))).exists():
        attempt += 1
    return Member(rank, attempt)


def claim(root: Path, member: Member, *, pid: int, launcher: str | None) -> None:
    record = Claim(rank=member.rank, attempt=member.attempt, host="here", pid=pid, launcher=launcher)
    write(root, layout.claim(member), record)


def wait_for(pattern: str, root: Path) -> None:
    while not any(root.glob(pattern)):
        time.sleep(0.02)


def finish(root: Path, member: Member, kwargs: dict[str, int], world_size: int, *, result: bool) -> None:
    steps = kwargs["steps"]
    rounds = steps // kwargs["sync_every"]
    by = {"rank": member.rank, "attempt": member.attempt}
    if result:
        write(
            root,
            layout.RUN,
            RunRecord(
                run_id=root.name,
                world_size=world_size,
                rounds=rounds,
                fragments=1,
                sync_every=kwargs["sync_every"],
                codec="fp32",
                policy="strict",
                min_replicas=1,
                outer_lr=0.7,
                outer_momentum=0.9,
                nesterov=True,
                chunk_bytes=65536,
                parameters={"0/weight": "float32[10, 100]", "0/scale": "float32[]"},
                constants={},
            ),
        )
        write(root, layout.evaluation(0), Evaluation(round=0, loss=5.0, **by))
        write(root, layout.evaluation(rounds), Evaluation(round=rounds, loss=3.0, **by))
        for number in range(rounds):
            record = Commit(
                round=number,
                fragment=0,
                base_digest="b",
                algorithm="gather",
                participants=[],
                left_out=[],
                committed_by=member.rank,
                committed_by_attempt=member.attempt,
                reason="all are there",
            )
            write(root, layout.commit(number), record)
        write(root, layout.RESULT, RunResult(digest="d", rounds=rounds, votes=[], model_uri=None, **by))
    report = ReplicaReport(
        steps=steps,
        tokens=steps * 100,
        tokens_per_second=1000.0,
        final_train_loss=3.1,
        seconds_training=2.0,
        seconds_waiting=0.5,
        bytes_up=1000,
        bytes_down=3000,
        requests=40,
        digest="d",
        rounds_applied=rounds,
        **by,
    )
    write(root, layout.result(member), report)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("rendezvous", "trainer-module", "trainer-fn", "trainer-kwargs-json", "exchange-json"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    options = parser.parse_args()
    kwargs = json.loads(options.trainer_kwargs_json)
    rank = int(os.environ["REPLICA_RANK"])
    root = Path(options.rendezvous.removeprefix("file://"))
    member = next_attempt(root, rank)
    behaviours = kwargs["behave"][rank].split(",")
    behaviour = behaviours[min(member.attempt, len(behaviours)) - 1]
    if behaviour == "refuse":
        sys.stderr.write("diloco: error: it does not want to\n")
        return 78
    if behaviour == "mute":
        wait_for("never", root)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (root / "told.json").write_text(options.exchange_json)
    claim(root, member, pid=os.getpid(), launcher=os.environ.get("DILOCO_LAUNCHER"))
    beat = Beat(rank=rank, attempt=member.attempt, counter=1, phase="training", step=5, round=1, loss=4.0, tokens=500)
    write(root, layout.beat(member), beat)
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "fenced":
        claim(root, next_attempt(root, rank), pid=1, launcher="another")
        behaviour = "exit 76"
    if behaviour.startswith("exit "):
        sys.stderr.write(f"diloco: error: it ends in attempt {member.attempt}\n")
        return int(behaviour.removeprefix("exit "))
    if behaviour in ("hang", "stubborn"):
        wait_for("never", root)
    if behaviour == "patient":
        wait_for("members/*/00002.json", root)
    if behaviour == "late":
        wait_for(layout.RESULT, root)
    finish(root, member, kwargs, options.world_size, result=rank == 0 and behaviour in ("ok", "patient"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
