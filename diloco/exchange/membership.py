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


async def agree_on_run(store: Store, mine: RunRecord) -> RunRecord:
    """Create run.json, or compare with what is there. Raises RunMismatchError that names the first difference."""
    created, stored = await create_once(store, layout.RUN, mine)
    if created:
        return mine
    theirs = RunRecord.from_json(stored, f"{store.uri}/{layout.RUN}")
    difference = first_difference(theirs, mine)
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


@dataclass
class Attendance:
    """Which ranks a replica still waits for under `skip`. One object a replica; :meth:`begin` at every round."""

    context: Context
    joining: float = 0.0
    """Seconds, over all waits so far, that count against `join_timeout`."""
    _beats: dict[int, tuple[int, int]] = field(default_factory=dict)
    _timers: dict[int, Timer] = field(default_factory=dict)
    _looked: Timer | None = None
    _counted: float = 0.0

    def begin(self) -> None:
        """A new round: everyone's silence is counted anew."""
        self._beats.clear()
        self._timers.clear()
        self._looked = None
        self._counted = 0.0

    async def waited_for(self, ranks: Iterable[int], present: Iterable[int], poll: Poll) -> set[int]:
        """Those of `ranks` (that took part lately) and of the world that are still waited for, the `present` ones
        included.

        A rank whose beat changes is alive; one that has never beaten is waited for inside `join_timeout`.
        """
        here = set(present)
        world = set(range(self.context.run.world_size))
        absent = (set(ranks) | world) - here
        if absent and (self._looked is None or self._looked.seconds >= self.context.settings.beat_every):
            await self._look(absent, poll)
            self._looked = Timer(poll)
        if poll.elapsed > self._counted:
            self.joining += poll.elapsed - self._counted
        self._counted = poll.elapsed
        return here | {rank for rank in absent if self._is_waited_for(rank, rank in set(ranks))}

    def _is_waited_for(self, rank: int, lately: bool) -> bool:
        if rank not in self._beats:
            return self.joining < self.context.settings.join_timeout
        return lately and self._timers[rank].seconds < self.context.settings.dead_after

    async def _look(self, ranks: set[int], poll: Poll) -> None:
        newest: dict[int, Member] = {}
        for entry in await self.context.store.list(layout.MEMBERS):
            member = layout.parse_member(entry.key)
            if member is not None and member.rank in ranks and member > newest.get(member.rank, Member(-1, 0)):
                newest[member.rank] = member
        for rank, member in newest.items():
            key = layout.beat(member)
            data = await read_if_there(self.context.store, key)
            try:
                beat = Beat.from_json(data, key) if data is not None else None
            except CorruptObjectError:
                continue
            if beat is not None and self._beats.get(rank) != (member.attempt, beat.counter):
                self._beats[rank] = (member.attempt, beat.counter)
                self._timers[rank] = Timer(poll)
