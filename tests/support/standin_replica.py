"""Stands in for `diloco.replica_entrypoint` in tests of the launcher: no torch, a `file://` run, a behaviour a rank.

`behave` in the trainer's arguments lists the ranks' behaviours: `ok` writes all that a replica leaves (rank 0 the
result as well), `late` does so once the result is there, `hang` sleeps after its first beat, `stubborn` also ignores
SIGTERM, `refuse` ends at once with an error line, `crash` ends by SIGKILL after its first beat, `no-result` leaves all
but the result.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Claim, Commit, Evaluation, ReplicaReport, RunRecord, RunResult

if TYPE_CHECKING:
    from diloco.exchange.records import Record


def write(root: Path, key: str, record: Record) -> None:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".writing-{path.name}-{os.getpid()}")
    aside.write_bytes(record.to_json())
    aside.rename(path)


def claim(root: Path, rank: int) -> Member:
    attempt = 1
    while (root / layout.claim(Member(rank, attempt))).exists():
        attempt += 1
    member = Member(rank, attempt)
    write(root, layout.claim(member), Claim(rank=rank, attempt=attempt, host="here", pid=os.getpid()))
    return member


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
    behaviour = kwargs["behave"][rank]
    if behaviour == "refuse":
        sys.stderr.write("diloco: error: it does not want to\n")
        return 78
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    member = claim(root, rank)
    beat = Beat(rank=rank, attempt=member.attempt, counter=1, phase="training", step=5, round=1, loss=4.0, tokens=500)
    write(root, layout.beat(member), beat)
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    while behaviour in ("hang", "stubborn") or (behaviour == "late" and not (root / layout.RESULT).exists()):
        time.sleep(0.02)
    finish(root, member, kwargs, options.world_size, result=rank == 0 and behaviour == "ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
