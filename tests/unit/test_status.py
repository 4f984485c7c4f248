"""What a run looks like while it runs."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Claim, LauncherBeat
from diloco.exchange.store import Store, open_store
from diloco.status import (
    LiveView,
    PlainView,
    ReplicaStatus,
    RunStatus,
    claimed_members,
    count,
    duration,
    make_view,
    newest_claim,
    read_beats,
    size,
    status_line,
    status_table,
)


def beat(rank: int, **changes: Any) -> Beat:
    values: dict[str, Any] = {
        "attempt": 1,
        "counter": 1,
        "phase": "training",
        "step": 50,
        "round": 2,
        "loss": 3.0 + rank,
        "tokens_per_second": 1500.0,
    }
    return Beat(rank=rank, **(values | changes))


def status(*replicas: ReplicaStatus) -> RunStatus:
    return RunStatus("20261130-1412-k3f9", steps=200, rounds=8, seconds=75.0, replicas=replicas)


def running(rank: int, **changes: Any) -> ReplicaStatus:
    return ReplicaStatus(rank, "running", beat=beat(rank, **changes))


def drawn(run: RunStatus, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(status_table(run))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width: int) -> None:
    text = drawn(
        status(
            running(0, step=12345, round=1234, tokens_per_second=123456.7),
            running(1, phase="waiting", waiting_for=["rank 2", "rank 3"]),
            ReplicaStatus(2, "failed", 78, beat(2, waiting_for=["rank 0"])),
            ReplicaStatus(3, "running"),
        ),
        width,
    )
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert lines[0] == "20261130-1412-k3f9  round 1234 of 8, step 12345 of 200, 1:15"
    assert lines[3].split() == ["0", "training", "12345", "1234", "3.000", "123.5k"]
    assert lines[4].split(maxsplit=6) == ["1", "waiting", "50", "2", "4.000", "1.5k", "rank 2, rank 3"]
    assert lines[5].split() == ["2", "failed", "50", "2", "5.000", "1.5k"]
    assert lines[6].split() == ["3", "starting", "-", "-", "-", "-"]


def test_a_line_says_the_same_in_plain_characters() -> None:
    assert status_line(status(ReplicaStatus(0, "running"), ReplicaStatus(1, "pending"))) == "2 replicas are starting"
    line = status_line(status(running(0, waiting_for=["rank 1"]), running(1)))
    assert line == "round 2/8, step 50/200, loss 3.500, 3.0k tokens/s, rank 0 waits for rank 1"
    assert line.isascii()
    assert status_line(status(running(0), running(1, waiting_for=["rank 0"]))).endswith(", rank 1 waits for rank 0")


def test_plain_lines_are_no_flood() -> None:
    now = 0.0
    out = io.StringIO()
    view = PlainView(Console(file=out, width=80), clock=lambda: now)

    def shown(run: RunStatus) -> list[str]:
        out.seek(0)
        out.truncate()
        with view:
            view.show(run)
        return out.getvalue().splitlines()

    assert shown(status(ReplicaStatus(0, "running"))) == ["1 replicas are starting"]
    assert shown(status(running(0, round=0, step=1))) == []
    assert shown(status(running(0, round=1, step=25))) == []
    now = 2.0
    assert len(shown(status(running(0, round=1, step=25)))) == 1
    now = 11.0
    assert shown(status(running(0, round=1, step=30))) == []
    now = 12.0
    assert len(shown(status(running(0, round=1, step=31)))) == 1
    now = 30.0
    assert shown(status(running(0, round=1, step=31))) == []
    dead = ReplicaStatus(0, "failed", 1, beat(0, round=1, step=31))
    assert shown(status(dead)) == ["rank 0 ended with exit code 1"]
    assert shown(status(dead)) == []


RESTART = "restart 1 of 3 in 2 s: exit code 137: killed by SIGKILL"


def test_what_restarts_is_shown() -> None:
    waiting = ReplicaStatus(1, "failed", 137, beat(1, waiting_for=["rank 0"]), supervision="restarting", note=RESTART)
    fenced = ReplicaStatus(2, "failed", 76, beat(2), supervision="fenced", note="fenced: replaced by attempt 2")
    lines = [line.rstrip() for line in drawn(status(running(0), waiting, fenced), 120).splitlines()]
    assert lines[4].split(maxsplit=6) == ["1", "restarting", "50", "2", "4.000", "1.5k", RESTART]
    assert lines[5].split(maxsplit=6) == ["2", "fenced", "50", "2", "5.000", "1.5k", "fenced: replaced by attempt 2"]
    assert max(map(len, drawn(status(running(0), waiting), 80).splitlines())) <= 80


def test_each_end_of_a_rank_is_one_plain_line() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=80), clock=lambda: 0.0)
    for restarts in (0, 1):
        note = RESTART.replace("1 of", f"{restarts + 1} of")
        died = ReplicaStatus(0, "failed", 137, beat(0), restarts=restarts, supervision="restarting", note=note)
        view.show(status(died))
        view.show(status(died))
        view.show(status(ReplicaStatus(0, "running", None, beat(0), restarts=restarts + 1)))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("rank 0")]
    assert lines == [f"rank 0: {RESTART}", f"rank 0: {RESTART.replace('1 of', '2 of')}"]


def test_a_live_table_only_where_there_is_a_terminal() -> None:
    assert isinstance(make_view(Console(file=io.StringIO())), PlainView)
    out = io.StringIO()
    view = make_view(Console(file=out, force_terminal=True, width=80, _environ={"TERM": "xterm"}))
    assert isinstance(view, LiveView)
    with view:
        view.show(status(running(0)))
    assert "20261130-1412-k3f9" in out.getvalue()


def test_the_newest_beat_of_each_rank_is_read_unless_it_is_to_be_ignored() -> None:
    async def scenario(store: Store) -> None:
        for rank, attempt in ((0, 1), (0, 2), (1, 1)):
            member = Member(rank, attempt)
            await store.write(layout.claim(member), Claim(rank=rank, attempt=attempt, host="h", pid=1).to_json())
            await store.write(layout.beat(member), beat(rank, attempt=attempt).to_json())
        await store.write(f"{layout.BEATS}readme.txt", b"alien")
        await store.write(layout.launcher_beat(1), LauncherBeat(number=1, counter=1).to_json())
        found = await read_beats(store, frozenset())
        assert {rank: it.attempt for rank, it in found.items()} == {0: 2, 1: 1}
        assert await read_beats(store, await claimed_members(store)) == {}
        newest = await newest_claim(store, 0)
        assert newest is not None
        assert newest.attempt == 2
        assert await newest_claim(store, 5) is None

    asyncio.run(scenario(open_store("memory://")))


@pytest.mark.parametrize(("value", "text"), [(0.4, "0"), (950, "950"), (12_345, "12.3k"), (4.5e6, "4.5M")])
def test_counts(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(("value", "text"), [(12.4, "12 s"), (59.7, "1:00"), (185, "3:05"), (3723, "1:02:03")])
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text
