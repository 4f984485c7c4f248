"""Joining a run: claiming an attempt of a rank, agreeing on run.json, and telling the living from the dead.

A claim is created once and never deleted; whoever sees a higher attempt of its own rank is fenced and must end.
Liveness is judged by changes of a beat on the observer's own clock: two clocks are never compared.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.errors import CorruptObjectError, FencedError, RunMismatchError
from diloco.exchange import layout
from diloco.exchange.clock import Timer
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, Claim, RunRecord
from diloco.exchange.store import create_once, read_if_there

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from diloco.exchange.clock import Poll
    from diloco.exchange.context import Context
    from diloco.exchange.store import Store


async def highest_attempt(store: Store, rank: int) -> int:
    """The newest claimed attempt of a rank, 0 for none."""
    members = [layout.parse_member(entry.key) for entry in await store.list(layout.claims(rank))]
    return max((member.attempt for member in members if member is not None), default=0)


async def claim(store: Store, rank: int, *, launcher: str | None = None) -> Member:
    """Claim the next free attempt of a rank. An older attempt that still runs is fenced by this."""
    while True:
        member = Member(rank, await highest_attempt(store, rank) + 1)
        record = Claim(rank=rank, attempt=member.attempt, host=socket.gethostname(), pid=os.getpid(), launcher=launcher)
        mine, _ = await create_once(store, layout.claim(member), record)
        if mine:
            return member


async def check_fence(store: Store, member: Member) -> None:
    """Raise FencedError if a newer attempt of this rank is there."""
    highest = await highest_attempt(store, member.rank)
    if highest > member.attempt:
        raise FencedError(
            f"{member} was replaced by attempt {highest}: this process ends and must not be started again"
        )


async def agree_on_run(store: Store, mine: RunRecord, *, open_to: AbstractSet[str] = frozenset()) -> RunRecord:
    """Create run.json, or compare with what is there, but for the fields that `open_to` names. Raises RunMismatchError
    that names the first difference.
    """
    created, stored = await create_once(store, layout.RUN, mine)
    if created:
        return mine
    theirs = RunRecord.from_json(stored, f"{store.uri}/{layout.RUN}")
    difference = first_difference(theirs, mine.model_copy(update={name: getattr(theirs, name) for name in open_to}))
    if difference is not None:
        raise RunMismatchError(
            f"run {theirs.run_id!r} at {store.uri} was made with other settings: {difference}; "
            "use the same settings, or another --run-id"
        )
    return theirs


def first_difference(theirs: RunRecord, mine: RunRecord) -> str | None:
    """The first field in which two run records differ, with both values, or None. The nonce does not count."""
    for name in RunRecord.model_fields:
        if name == "nonce":
            continue
        there, here = getattr(theirs, name), getattr(mine, name)
        if isinstance(there, dict):
            for key in sorted(there.keys() | here.keys()):
                if there.get(key) != here.get(key):
                    return f"{name} {key} is {there.get(key, 'absent')} there and {here.get(key, 'absent')} here"
        elif there != here:
            return f"{name} is {there!r} there and {here!r} here"
    return None


async def newest_attempts(store: Store) -> dict[int, int]:
    """The newest claimed attempt of every rank that was ever claimed."""
    newest: dict[int, int] = {}
    for entry in await store.list(layout.MEMBERS):
        member = layout.parse_member(entry.key)
        if member is not None:
            newest[member.rank] = max(member.attempt, newest.get(member.rank, 0))
    return newest


class Pulse:
    """Whether one member's beat still changes, judged on the observer's clock."""

    def __init__(self, store: Store, member: Member, poll: Poll) -> None:
        self.member = member
        self.has_beaten = False
        self._store = store
        self._counter: int | None = None
        self._timer = Timer(poll)

    async def look(self) -> None:
        """Read the beat. One that is not there, or no beat at all, changes nothing."""
        key = layout.beat(self.member)
        data = await read_if_there(self._store, key)
        try:
            beat = Beat.from_json(data, key) if data is not None else None
        except CorruptObjectError:
            return
        if beat is not None and beat.counter != self._counter:
            self.has_beaten = True
            self._counter = beat.counter
            self._timer.restart()

    @property
    def seconds(self) -> float:
        """Counted seconds since it was seen to change, or since it is watched."""
        return self._timer.seconds


@dataclass
class Attendance:
    """Which ranks a replica still waits for under `skip`. One object a replica; :meth:`begin` at every round."""

    context: Context
    joining: float = 0.0
    """Seconds, over all waits so far, that count against `join_timeout`."""
    _pulses: dict[int, Pulse] = field(default_factory=dict)
    _looked: Timer | None = None
    _counted: float = 0.0

    def begin(self) -> None:
        """A new round: everyone's silence is counted anew."""
        self._pulses.clear()
        self._looked = None
        self._counted = 0.0

    async def waited_for(self, ranks: Iterable[int], present: Iterable[int], poll: Poll) -> set[int]:
        """Those of `ranks` (that took part lately) and of the world that are still waited for, the `present` ones
        included.

        A rank is judged by the beat of its newest claimed attempt: one that changes is alive; one that has never beaten
        is waited for inside `join_timeout`.
        """
        here, lately = set(present), set(ranks)
        absent = (lately | set(range(self.context.run.world_size))) - here
        if absent and (self._looked is None or self._looked.seconds >= self.context.settings.beat_every):
            await self._look(absent, poll)
            self._looked = Timer(poll)
        self.joining += max(poll.total - self._counted, 0.0)
        self._counted = poll.total
        return here | {rank for rank in absent if self._is_waited_for(rank, rank in lately)}

    def _is_waited_for(self, rank: int, lately: bool) -> bool:
        pulse = self._pulses.get(rank)
        if pulse is None or not pulse.has_beaten:
            return self.joining < self.context.settings.join_timeout
        return lately and pulse.seconds < self.context.settings.dead_after

    async def _look(self, ranks: set[int], poll: Poll) -> None:
        newest = await newest_attempts(self.context.store)
        for rank in sorted(ranks & newest.keys()):
            member = Member(rank, newest[rank])
            pulse = self._pulses.get(rank)
            if pulse is None or pulse.member != member:
                pulse = self._pulses[rank] = Pulse(self.context.store, member, poll)
            await pulse.look()
