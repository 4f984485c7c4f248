"""A run while it runs: what the beats in the bucket say, as a live table on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco.errors import CorruptObjectError
from diloco.exchange import layout
from diloco.exchange.records import Beat, Claim
from diloco.exchange.store import read_if_there

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from diloco.exchange.layout import Member
    from diloco.exchange.store import Store
    from diloco.executors.base import Status

PLAIN_EVERY = 10.0
"""Seconds after which a plain line is printed although no round ended."""
PLAIN_LEAST = 2.0
"""Seconds between two plain lines, however fast the rounds are."""


@dataclass(frozen=True)
class ReplicaStatus:
    """One rank: what its backend says of the process, and what it says of itself (None before its first beat)."""

    rank: int
    status: Status
    exit_code: int | None = None
    beat: Beat | None = None
    restarts: int = 0
    """How often it was relaunched."""
    supervision: Literal["restarting", "fenced"] | None = None
    """What its launcher makes of its end, where that is not final."""
    note: str | None = None
    """What its launcher says of its end (`restart 1 of 3 in 2 s: exit code 137: killed by SIGKILL`), or its backend of
    what it waits for.
    """

    @property
    def phase(self) -> str:
        """What it is doing, in one word."""
        if self.supervision is not None:
            return self.supervision
        if self.status in ("failed", "cancelled", "pending"):
            return self.status
        if self.status == "succeeded":
            return "finished"
        return self.beat.phase if self.beat else "starting"


@dataclass(frozen=True)
class RunStatus:
    """A whole run at one moment."""

    run_id: str
    steps: int
    rounds: int
    seconds: float
    replicas: tuple[ReplicaStatus, ...]

    @property
    def beats(self) -> list[Beat]:
        """The beats that are there, by rank."""
        return [replica.beat for replica in self.replicas if replica.beat]

    @property
    def round(self) -> int:
        """The round that the foremost replica is in."""
        return max((beat.round for beat in self.beats), default=0)

    @property
    def step(self) -> int:
        """The inner step of the foremost replica."""
        return max((beat.step for beat in self.beats), default=0)

    @property
    def loss(self) -> float | None:
        """Mean training loss of the replicas that report one."""
        losses = [beat.loss for beat in self.beats if beat.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of all replicas together."""
        rates = [beat.tokens_per_second for beat in self.beats if beat.tokens_per_second is not None]
        return sum(rates) if rates else None


async def claimed_members(store: Store) -> frozenset[Member]:
    """Return every process that ever took part in the run."""
    found = (layout.parse_member(entry.key) for entry in await store.list(layout.MEMBERS))
    return frozenset(member for member in found if member is not None)


async def newest_claim(store: Store, rank: int) -> Claim | None:
    """Return the claim of a rank's newest attempt, if there is any."""
    found = (layout.parse_member(entry.key) for entry in await store.list(layout.claims(rank)))
    newest = max((member for member in found if member is not None), default=None)
    data = None if newest is None else await read_if_there(store, layout.claim(newest))
    return None if newest is None or data is None else Claim.from_json(data, layout.claim(newest))


async def read_beats(store: Store, ignore: frozenset[Member]) -> dict[int, Beat]:
    """Return each rank's beat, of its highest attempt; those to `ignore` belong to earlier launches."""
    newest: dict[int, Member] = {}
    for entry in await store.list(layout.BEATS):  # sorted by rank and attempt
        member = layout.parse_member(entry.key)
        if member is not None and member not in ignore:
            newest[member.rank] = member
    keys = [layout.beat(member) for member in newest.values()]
    found = await asyncio.gather(*(read_if_there(store, key) for key in keys))
    beats: dict[int, Beat] = {}
    for key, data in zip(keys, found, strict=True):
        with suppress(CorruptObjectError):  # a file that is no beat says nothing of the other ranks
            if data is not None:
                beat = Beat.from_json(data, key)
                beats[beat.rank] = beat
    return beats


class View(Protocol):
    """Shows a run to whoever started it; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, status: RunStatus) -> None:
        """Show the present status."""


def make_view(console: Console, draw: Callable[[RunStatus], RenderableType] | None = None) -> View:
    """Return a live table on a terminal, plain lines elsewhere. `draw` makes the table, instead of
    :func:`status_table`.
    """
    terminal = console.is_terminal and not console.is_dumb_terminal
    return LiveView(console, draw or status_table) if terminal else PlainView(console)


class LiveView:
    """A table that is drawn anew in place."""

    def __init__(self, console: Console, draw: Callable[[RunStatus], RenderableType]) -> None:
        self._draw = draw
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, status: RunStatus) -> None:
        """Redraw."""
        self._live.update(self._draw(status), refresh=True)


class PlainView:
    """A line for each round, and one now and then while a round lasts."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown_at: float | None = None
        self._round = 0
        self._last = ""
        self._ended: set[tuple[int, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, status: RunStatus) -> None:
        """Print a line if there is news."""
        for replica in status.replicas:
            ended = (replica.rank, replica.restarts)
            if replica.status == "failed" and ended not in self._ended:
                self._ended.add(ended)
                said = f": {replica.note}" if replica.note else f" ended with exit code {replica.exit_code}"
                self._print(f"rank {replica.rank}{said}")
        now = self._clock()
        line = status_line(status)
        since = PLAIN_EVERY if self._shown_at is None else now - self._shown_at
        due = since >= PLAIN_EVERY or (status.round > self._round and since >= PLAIN_LEAST)
        if line != self._last and due:
            self._print(line)
            self._shown_at, self._round, self._last = now, status.round, line

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def status_line(status: RunStatus) -> str:
    """Return the whole run in one line of plain characters."""
    if not status.beats:
        return f"{len(status.replicas)} replicas are starting{_waiting(status)}"
    parts = [f"round {status.round}/{status.rounds}", f"step {status.step}/{status.steps}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.tokens_per_second is not None:
        parts.append(f"{count(status.tokens_per_second)} tokens/s")
    waiting = [beat for beat in status.beats if _waits(status, beat)]
    parts.extend(f"rank {beat.rank} waits for {', '.join(beat.waiting_for)}" for beat in waiting[:1])
    return ", ".join(parts)


def _waiting(status: RunStatus) -> str:
    """Which ranks their backend keeps waiting, and why."""
    reasons: dict[str, list[int]] = {}
    for replica in status.replicas:
        if replica.status == "pending" and replica.note:
            reasons.setdefault(replica.note, []).append(replica.rank)
    return "".join(f"; rank {', '.join(map(str, ranks))}: {note}" for note, ranks in reasons.items())


def status_table(status: RunStatus) -> RenderableType:
    """Return the table of ranks under a line about the run."""
    head = Text.assemble(
        (status.run_id, "bold"),
        f"  round {status.round} of {status.rounds}, step {status.step} of {status.steps}, {duration(status.seconds)}",
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("rank", "phase", "step", "round", "loss", "tokens/s"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    table.add_column("waiting for", overflow="ellipsis", no_wrap=True, ratio=1)
    for replica in status.replicas:
        beat = replica.beat
        table.add_row(
            str(replica.rank),
            Text(replica.phase, _STYLES.get(replica.phase, "")),
            str(beat.step) if beat else "-",
            str(beat.round) if beat else "-",
            f"{beat.loss:.3f}" if beat and beat.loss is not None else "-",
            count(beat.tokens_per_second) if beat and beat.tokens_per_second is not None else "-",
            Text(replica.note or (", ".join(beat.waiting_for) if beat and _waits(status, beat) else "")),
        )
    return Group(head, table)


_STYLES = {
    "training": "green",
    "waiting": "yellow",
    "restarting": "yellow",
    "fenced": "yellow",
    "finishing": "cyan",
    "finished": "cyan",
    "failed": "bold red",
    "cancelled": "dim",
    "starting": "dim",
    "pending": "dim",
}


def _waits(status: RunStatus, beat: Beat) -> bool:
    """Whether it says whom it waits for and still runs: an ended replica's last beat may say so too."""
    running = any(replica.rank == beat.rank and replica.status == "running" for replica in status.replicas)
    return running and bool(beat.waiting_for)


def count(value: float) -> str:
    """Write a number for people: 950, 12.3k, 4.5M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f}{unit}"
    return f"{value:.0f}"


def size(value: float) -> str:
    """Write bytes for people: 512 B, 1.6 MiB."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Write seconds for people: 12 s, 3:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
