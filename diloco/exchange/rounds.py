"""Who is in a round: the headers that are there, and what may be committed on them. No I/O, no clock: :func:`decide`
is a function.

A commit needs at least `min_replicas` headers that started from the same bits (one base digest), strictly more than
share any other digest. That holds for the first check too, or one fast starter would run alone. Headers with another
digest are left out and named; a tie waits, since another replica may break it. An abstention counts as seen and
towards `min_replicas`, or everybody could wait for ever.

`strict` needs every rank and one digest. `skip` waits for the ranks that are waited for, or until the grace period is
over.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from diloco.errors import CorruptObjectError
from diloco.exchange import layout
from diloco.exchange.records import Header, LeftOut, Participant
from diloco.exchange.store import read_if_there

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from diloco.exchange.store import Store


@dataclass(frozen=True)
class Rules:
    """What a commit needs."""

    policy: Literal["strict", "skip"]
    world_size: int
    min_replicas: int


@dataclass(frozen=True)
class Proposal:
    """A commit that may be made now."""

    base_digest: str
    participants: list[Participant]
    left_out: list[LeftOut]
    reason: str


@dataclass(frozen=True)
class Waiting:
    """Not yet; for whom or what, in words."""

    waiting_for: list[str]
    enough: bool
    """Whether `min_replicas` equal headers are there, so that the grace period runs."""


@dataclass(frozen=True)
class Ended:
    """This round can't be completed under these rules."""

    reason: str


def decide(
    rules: Rules,
    headers: Mapping[int, Header],
    *,
    rejected: Mapping[layout.Member, str],
    waited_for: AbstractSet[int],
    grace_over: bool,
    refused: Mapping[int, str] | None = None,
) -> Proposal | Waiting | Ended:
    """What the headers of a round (the highest attempt of each rank) allow.

    `rejected` are contributions whose payload was examined and refused: they are left out and named, and do not count
    towards `min_replicas`, or one replica with another model could outvote all others by rejecting them. `refused` are
    ranks whose header itself can't be used, and why; nothing else can come from that attempt in this round.
    """
    unusable = dict(refused or {})
    if rules.policy == "strict":
        guests = [rank for rank in headers if rank >= rules.world_size]
        headers = {rank: header for rank, header in headers.items() if rank < rules.world_size}
        if (reason := _strict_objection(rules.world_size, headers, rejected, unusable)) is not None:
            return Ended(reason)
        missing = [rank for rank in range(rules.world_size) if rank not in headers]
        if missing:
            return Waiting([f"rank {rank}" for rank in missing], enough=False)
        unusable |= dict.fromkeys(sorted(guests), f"a strict run has only {rules.world_size} ranks")
    groups: defaultdict[str, int] = defaultdict(int)
    for header in headers.values():
        groups[header.base_digest] += header.member not in rejected
    ranked = sorted(groups.items(), key=lambda item: -item[1])
    late = sorted(waited_for - headers.keys() - unusable.keys())
    absent = sorted(set(range(rules.world_size)) - headers.keys() - unusable.keys() - set(late))
    if not ranked or ranked[0][1] < rules.min_replicas:
        have = ranked[0][1] if ranked else 0
        return Waiting([f"min_replicas ({have} of {rules.min_replicas})", *_named(late)], enough=False)
    if len(ranked) > 1 and ranked[1][1] == ranked[0][1]:
        return Waiting(["a replica to break the tie between two states"], enough=False)
    if rules.policy == "skip" and late and not grace_over:
        return Waiting(_named(late), enough=True)
    return _propose(ranked[0][0], headers, rejected, unusable, late, absent)


def _named(ranks: list[int]) -> list[str]:
    return [f"rank {rank}" for rank in ranks]


def _strict_objection(
    world_size: int, headers: Mapping[int, Header], rejected: Mapping[layout.Member, str], unusable: Mapping[int, str]
) -> str | None:
    for rank, reason in unusable.items():
        if rank not in headers and rank < world_size:
            return f"rank {rank}: {reason}"
    sides: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(headers):
        header = headers[rank]
        if header.member in rejected:
            return f"{header.member}: {rejected[header.member]}"
        if header.kind == "abstention" and header.reason != CAUGHT_UP:
            return f"{header.member} abstains: {header.reason}"
        sides[header.base_digest].append(rank)
    if len(sides) > 1:
        named = "; ".join(f"ranks {', '.join(map(str, ranks))} hold {digest[:12]}" for digest, ranks in sides.items())
        return f"replicas hold different parameters: {named}"
    return None


LATE = "late"
ABSENT = "absent, and not waited for any more"
CAUGHT_UP = "caught up inside this round"
NOT_FINITE = "its pseudo-gradient holds NaN or Inf: lower the learning rate, or clip gradients"


def _propose(
    base: str,
    headers: Mapping[int, Header],
    rejected: Mapping[layout.Member, str],
    unusable: Mapping[int, str],
    late: list[int],
    absent: list[int],
) -> Proposal:
    participants: list[Participant] = []
    left_out = [LeftOut(rank=rank, attempt=None, reason=LATE) for rank in late]
    left_out += [LeftOut(rank=rank, attempt=None, reason=ABSENT) for rank in absent]
    left_out += [LeftOut(rank=rank, attempt=None, reason=why) for rank, why in unusable.items() if rank not in headers]
    for rank in sorted(headers):
        header = headers[rank]
        reason = rejected.get(header.member)
        if header.base_digest != base:
            reason = f"diverged: started from {header.base_digest[:12]}, not {base[:12]}"
        elif header.kind == "abstention":
            reason = f"abstained: {header.reason}"
        if reason is None and header.payload is not None:
            participants.append(
                Participant(rank=rank, attempt=header.attempt, weight=header.weight, payload=header.payload)
            )
        else:
            left_out.append(LeftOut(rank=rank, attempt=header.attempt, reason=reason or "no payload"))
    missing = ", ".join(str(rank) for rank in sorted([*late, *absent]))
    reason = "all are there"
    if missing:
        reason = f"{'the grace period is over' if late else 'nobody else is waited for'}, without rank {missing}"
    return Proposal(base, participants, left_out, reason)


@dataclass
class HeaderReader:
    """Reads a round's headers once each, and remembers those of them that can't be used."""

    store: Store
    round: int
    fragment: int
    kinds: frozenset[str] = frozenset({"contribution", "abstention"})
    _seen: dict[str, Header | None] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Key → why an object under the headers' prefix is not used."""

    @property
    def refused_members(self) -> dict[layout.Member, str]:
        """The same by member, of those keys that are a member's header."""
        members = {key: layout.parse_member(key) for key in self.refused}
        return {
            member: self.refused[key]
            for key, member in members.items()
            if member is not None and key == layout.header(self.round, member)
        }

    async def read(self) -> dict[int, Header]:
        """The highest attempt's header of each rank that has one."""
        for entry in await self.store.list(layout.headers(self.round)):
            if entry.key not in self._seen:
                self._seen[entry.key] = await self._load(entry.key)
        best: dict[int, Header] = {}
        for header in self._seen.values():
            if header is not None and (header.rank not in best or best[header.rank].attempt < header.attempt):
                best[header.rank] = header
        return best

    async def _load(self, key: str) -> Header | None:
        try:
            data = await read_if_there(self.store, key)
            if data is None:
                return None
            header = Header.from_json(data, key)
        except CorruptObjectError as problem:
            self._refuse(key, str(problem))
            return None
        problem_text = self._objection(header, key)
        if problem_text is not None:
            self._refuse(key, problem_text)
            return None
        return header

    def _refuse(self, key: str, reason: str) -> None:
        self.refused[key] = reason
        logger.warning("round %d: %s is not used: %s", self.round, key, reason)

    def _objection(self, header: Header, key: str) -> str | None:
        if key != layout.header(header.round, header.member) or header.round != self.round:
            return f"{key}: says that it is of round {header.round}, {header.member}"
        if header.fragment != self.fragment:
            return f"{key}: is of fragment {header.fragment}, not {self.fragment}"
        if header.kind not in self.kinds:
            return f"{key}: a {header.kind} has no place in this round"
        if header.kind == "contribution" and (header.payload is None or header.weight <= 0):
            return f"{key}: a contribution without payload or weight"
        return None
