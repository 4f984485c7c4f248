"""A run after it: the JSON document of `--json`, read from the bucket, and the summary for people."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from diloco.exchange import layout
from diloco.exchange.records import Beat, ErrorReport, Evaluation, ReplicaReport, RunRecord, RunResult
from diloco.exchange.store import read_if_there
from diloco.status import claimed_members, count, duration, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType

    from diloco.exchange.layout import Member
    from diloco.exchange.records import Record
    from diloco.exchange.store import Store
    from diloco.executors.base import ReplicaResult, Status
    from diloco.spec import RunSettings

R = TypeVar("R", bound="Record")

NO_RESULT = "the replicas ended without a result"


class ReplicaLine(BaseModel):
    """One replica in the document. Bytes and requests are those of its last process."""

    model_config = ConfigDict(frozen=True)

    rank: int
    status: str
    steps: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    final_train_loss: float | None = None
    seconds_training: float | None = None
    seconds_waiting: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    requests: int | None = None
    digest: str | None = None
    restarts: int = 0
    """How often this launch relaunched it."""
    error: str | None = None
    """Why its last process failed."""


class RunReport(BaseModel):
    """How a run ended. Losses are nats per token on held-out text; null where the trainer reports none."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    status: Literal["succeeded", "failed"]
    rendezvous_uri: str
    model_uri: str | None = None
    replicas: list[ReplicaLine] = Field(default_factory=list)
    rounds_committed: int = 0
    rounds_expected: int
    initial_eval_loss: float | None = None
    final_eval_loss: float | None = None
    wall_seconds: float = 0.0
    error: str | None = None
    baseline_eval_loss: float | None = None
    """In the document only if a baseline was asked for."""
    parameters: int | None = Field(default=None, exclude=True)
    """Trained parameters of the model: for the summary, not in the document."""
    steps: int = Field(default=0, exclude=True)
    resumed: bool = Field(default=False, exclude=True)
    """Whether bytes and seconds are only those since the last start."""

    @property
    def succeeded(self) -> bool:
        """Whether the run reached its result."""
        return self.status == "succeeded"

    @property
    def digests_equal(self) -> bool | None:
        """Whether all replicas that finished hold the same bits; None if none says."""
        digests = {line.digest for line in self.replicas if line.digest}
        return len(digests) == 1 if digests else None

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        unset = set() if "baseline_eval_loss" in self.model_fields_set else {"baseline_eval_loss"}
        return self.model_dump(mode="json", exclude=unset)


def failed_report(settings: RunSettings, error: str, *, wall_seconds: float) -> RunReport:
    """The report of a run of which nothing more is known than why it failed."""
    return RunReport(
        run_id=settings.run_id,
        status="failed",
        rendezvous_uri=settings.uri,
        rounds_expected=settings.rounds,
        wall_seconds=round(wall_seconds, 3),
        error=error,
    )


async def read_report(
    store: Store,
    settings: RunSettings,
    *,
    outcome: Mapping[int, ReplicaResult] | None = None,
    ignore: frozenset[Member] = frozenset(),
    wall_seconds: float,
    error: str | None = None,
) -> RunReport:
    """Read a run's end from its bucket; what counts is `final/result.json`.

    `outcome` is how this launch's processes ended (none: the run was finished before), `ignore` are the members of
    earlier launches, `error` is why the launcher gave up.
    """
    result = await _read(store, layout.RESULT, RunResult)
    run = await _read(store, layout.RUN, RunRecord)
    rounds = run.rounds if run else settings.rounds
    first = await _read(store, layout.evaluation(0), Evaluation)
    last = await _read(store, layout.evaluation(rounds), Evaluation) if result else None
    numbers = [layout.parse_number(entry.key) for entry in await store.list(layout.COMMITS)]
    members = await _newest_members(store, ignore)
    lines = []
    for rank in sorted({*range(settings.replicas), *members}):
        ended = outcome.get(rank) if outcome else None
        line = await _read_line(store, rank, members.get(rank), ended.status if ended else None)
        restarts = ended.metrics.get("restarts", 0) if ended else 0
        error_of = ended.error if ended and ended.status == "failed" else None
        lines.append(line.model_copy(update={"restarts": restarts, "error": error_of}))
    return RunReport(
        run_id=settings.run_id,
        status="succeeded" if result else "failed",
        rendezvous_uri=store.uri,
        model_uri=result.model_uri if result else None,
        replicas=lines,
        rounds_committed=sum(number is not None and number < rounds for number in numbers),
        rounds_expected=rounds,
        initial_eval_loss=first.loss if first else None,
        final_eval_loss=last.loss if last else None,
        wall_seconds=round(wall_seconds, 3),
        error=None if result else (error or await _first_error(store, members) or NO_RESULT),
        parameters=parameter_count(run) if run else None,
        steps=settings.steps,
        resumed=any(member.attempt > 1 for member in members.values()),
    )


async def _newest_members(store: Store, ignore: frozenset[Member]) -> dict[int, Member]:
    return {member.rank: member for member in sorted(await claimed_members(store) - ignore)}


async def _read_line(store: Store, rank: int, member: Member | None, status: Status | None) -> ReplicaLine:
    if member is None:
        return ReplicaLine(rank=rank, status=status or "failed")
    report = await _read(store, layout.result(member), ReplicaReport)
    if report is not None:
        shown = set(ReplicaLine.model_fields) & set(ReplicaReport.model_fields)
        return ReplicaLine(status=status or "succeeded", **report.model_dump(include=shown))
    beat = await _read(store, layout.beat(member), Beat)  # it died: its last beat is all that it left
    if beat is None:
        return ReplicaLine(rank=rank, status=status or "failed")
    return ReplicaLine(
        rank=rank,
        status=status or "failed",
        steps=beat.step,
        tokens=beat.tokens,
        tokens_per_second=beat.tokens_per_second,
        final_train_loss=beat.loss,
        seconds_waiting=beat.seconds_waiting,
        digest=None,
    )


async def _first_error(store: Store, members: Mapping[int, Member]) -> str | None:
    for member in members.values():
        problem = await _read(store, layout.error(member), ErrorReport)
        if problem is not None:
            return f"rank {member.rank}: {problem.error}"
    return None


async def _read(store: Store, key: str, kind: type[R]) -> R | None:
    data = await read_if_there(store, key)
    return None if data is None else kind.from_json(data, key)


def parameter_count(run: RunRecord) -> int:
    """Return how many trained parameters a run has, from the shapes in run.json (`float32[384, 128]`)."""
    return sum(prod(map(int, re.findall(r"\d+", shape.partition("[")[2]))) for shape in run.parameters.values())


def data_parallel_bytes(report: RunReport) -> float | None:
    """Return what each replica would send, and receive as much, if gradients were averaged at every step.

    A ring all-reduce of fp32 gradients: 2 (N - 1) / N x 4 bytes x parameters, for each step
    (https://arxiv.org/abs/1802.05799). None for one replica, or where the model's size is not known.
    """
    replicas = len(report.replicas)
    if replicas < 2 or not report.parameters:
        return None
    return 2 * (replicas - 1) / replicas * 4 * report.parameters * report.steps


def summary(report: RunReport) -> RenderableType:
    """Return the end of a run for people: facts, then a table of replicas."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(report):
        facts.add_row(name, value)
    return Group(facts, "", _replica_table(report), "") if report.replicas else Group(facts)


def _facts(report: RunReport) -> list[tuple[str, Text]]:
    ok = report.succeeded
    facts = [
        ("run", Text.assemble((report.run_id, "bold"), "  ", (report.status, "bold green" if ok else "bold red"))),
        ("time", Text(duration(report.wall_seconds))),
        ("rounds", Text(f"{report.rounds_committed} of {report.rounds_expected} committed")),
    ]
    if report.initial_eval_loss is not None:
        facts.append(("held-out loss", Text(_losses(report))))
    equal = report.digests_equal
    if equal is not None:
        said = sum(line.digest is not None for line in report.replicas)
        text = f"equal on all {said} that finished" if equal else "DIFFERENT: the replicas do not hold the same bits"
        facts.append(("digests", Text(text, "" if equal else "bold red")))
    restarts = [f"rank {line.rank}: {line.restarts}" for line in report.replicas if line.restarts]
    if restarts:
        facts.append(("restarts", Text(", ".join(restarts))))
    traffic = _traffic(report)
    if traffic:
        facts.append(("traffic", Text(traffic)))
    if report.model_uri:
        facts.append(("model", Text(report.model_uri)))
    if report.succeeded:
        failed = [line for line in report.replicas if line.error]
        facts += [(f"rank {line.rank}", Text(str(line.error), "yellow")) for line in failed]
    if report.error:
        facts.append(("error", Text(report.error, "red")))
    return facts


def _losses(report: RunReport) -> str:
    first, last, plain = report.initial_eval_loss, report.final_eval_loss, report.baseline_eval_loss
    text = f"{first:.3f}"
    if first is not None and last is not None:
        text += f" -> {last:.3f} ({last - first:+.3f})"
        if plain is not None:
            text += f"; plain data parallelism {plain:.3f} ({(last - plain) / plain:+.1%})"
    return text


def _traffic(report: RunReport) -> str | None:
    """Compare what a replica moved, in both directions, with per-step data parallelism; not for a resumed run."""
    plain = data_parallel_bytes(report)
    moved = [line.bytes_up + line.bytes_down for line in report.replicas if line.bytes_up and line.bytes_down]
    if plain is None or not moved or report.resumed or not report.succeeded:
        return None
    mean = sum(moved) / len(moved)
    ratio = 2 * plain / mean
    return (
        f"{size(mean)} a replica, up and down; averaging gradients at every step would move {size(2 * plain)}"
        f" ({ratio:.1f} times as much)"
    )


def _replica_table(report: RunReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, header_style="dim")  # fits into 80 columns
    names = ("rank", "status", "steps", "tok/s", "loss", "train s", "wait s", "up", "down", "requests")
    for name in names:
        table.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    for line in report.replicas:
        table.add_row(
            str(line.rank),
            Text(line.status, "" if line.status == "succeeded" else "red"),
            str(line.steps),
            _or_dash(line.tokens_per_second, count),
            _or_dash(line.final_train_loss, "{:.3f}".format),
            _or_dash(line.seconds_training, "{:.1f}".format),
            _or_dash(line.seconds_waiting, "{:.1f}".format),
            _or_dash(line.bytes_up, size),
            _or_dash(line.bytes_down, size),
            _or_dash(line.requests, str),
        )
    return table


def _or_dash(value: float | None, write: Callable[[Any], str]) -> str:
    return "-" if value is None else write(value)
