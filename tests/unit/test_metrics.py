"""Metric lines, and that the expressions of the training jobs find exactly what was written."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from diloco.metrics import NAMES, MetricLog, definitions

if TYPE_CHECKING:
    import pytest


def found(line: str) -> dict[str, float]:
    matches = {each["Name"].removeprefix("diloco:"): re.search(each["Regex"], line) for each in definitions()}
    return {name: float(match[1]) for name, match in matches.items() if match is not None}


def test_what_is_written_is_what_is_found(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = MetricLog(every=10.0, clock=lambda: now)
    with caplog.at_level(logging.INFO):
        log.step(0, 5.5, 100)
        now = 9.0
        log.step(1, 4.5, 100)
        now = 10.0
        log.step(2, 3.25e-7, 300)
        now = 15.0
        log.step(3, 1.0, 100)
        log.evaluation(2.25)

    assert [found(record.getMessage()) for record in caplog.records] == [
        {"step": 2, "loss": 3.25e-7, "tokens_per_second": 50},
        {"eval_loss": 2.25},
    ]


def test_a_trainer_that_reports_no_loss_writes_none(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = MetricLog(every=1.0, clock=lambda: now)
    with caplog.at_level(logging.INFO):
        for step in range(3):
            now = float(step)
            log.step(step, None, 100)

    assert caplog.records == []


def test_each_name_is_defined_once_and_other_lines_have_none() -> None:
    assert [each["Name"] for each in definitions()] == [f"diloco:{name}" for name in NAMES]
    assert found("loss=3 step=4 of something else") == {}
