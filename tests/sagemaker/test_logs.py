"""Logs of many jobs as one, from an emulator's CloudWatch Logs: merged by time, none missed, none repeated."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from diloco.executors.sagemaker_logs import GROUP, LogReader

if TYPE_CHECKING:
    from tests.support.sagemaker import Emulator

START = 1_790_000_000_000


@pytest.fixture
def logs(emulator: Emulator) -> Any:
    client = emulator.client("logs")
    client.create_log_group(logGroupName=GROUP)
    return client


def write(logs: Any, stream: str, events: list[tuple[int, str]]) -> None:
    logs.put_log_events(
        logGroupName=GROUP,
        logStreamName=stream,
        logEvents=[{"timestamp": at, "message": text} for at, text in events],
    )


def make_stream(logs: Any, job: str, epoch: int) -> str:
    name = f"{job}/algo-1-{epoch}"
    logs.create_log_stream(logGroupName=GROUP, logStreamName=name)
    return name


def reader(logs: Any, prefix: str = "diloco-run-r", **timing: float) -> LogReader:
    return LogReader(logs, prefix, **{"every": 0.02, "late": 0.3} | timing)


def test_lines_of_all_ranks_are_merged_by_time(logs: Any) -> None:
    chance = random.Random(7)
    expected = []
    for rank in range(3):
        stream = make_stream(logs, f"diloco-run-r{rank}-s1", rank)
        ats = sorted(START + chance.randrange(10_000) for _ in range(50))
        events = [(at, f"{rank}:{number}") for number, at in enumerate(ats)]
        write(logs, stream, events)
        expected += [(at, rank, text) for at, text in events]
    make_stream(logs, "diloco-run2-r0-s1", 1)
    write(logs, make_stream(logs, "another-r0-s1", 1), [(START, "not ours")])

    lines = list(reader(logs).lines())

    assert [(line.at, line.rank, line.text) for line in lines] == sorted(expected)
    assert [line.rank for line in reader(logs, "diloco-run-r1-s").lines()] == [1] * 50


def test_long_streams_are_read_over_all_their_pages(logs: Any) -> None:
    stream = make_stream(logs, "diloco-run-r0-s1", 1)
    for part in range(6):
        write(logs, stream, [(START + part * 4000 + number, f"{part}:{number}") for number in range(4000)])

    lines = [line.text for line in reader(logs).lines()]

    assert len(lines) == len(set(lines)) == 24_000


def test_following_finds_restarts_and_misses_and_repeats_nothing(logs: Any) -> None:
    over = threading.Event()
    wanted: list[str] = []

    def produce() -> None:
        at = START
        for start in range(3):  # a spot job's starts are streams of their own
            stream = make_stream(logs, "diloco-run-r0-s1", start)
            for part in range(10):
                at += 10
                events = [(at + number, f"{start}:{part}:{number}") for number in range(5)]
                write(logs, stream, events)
                wanted.extend(text for _, text in events)
        over.set()

    producer = threading.Thread(target=produce)
    producer.start()
    lines = [line.text for line in reader(logs).lines(follow=True, ended=over.is_set)]
    producer.join()

    assert lines == wanted


def test_before_anything_is_logged_there_is_nothing(emulator: Emulator) -> None:
    assert list(reader(emulator.client("logs")).lines()) == []
