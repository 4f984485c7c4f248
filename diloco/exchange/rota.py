"""Whose turn it is to write a checkpoint, computed from the commit records alone: all replicas come to the same answer
without asking anybody, and one that knows fewer records only leaves a turn out.

Every K rounds it is a participant of the last round with participants, in turn. If that one is missing from the next
commit (it died, or was replaced, before it was done), a participant of that commit writes a later checkpoint in its
place. So a replica needs to copy its state only when it is its turn, and nobody waits for a writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.exchange.layout import Member
    from diloco.exchange.records import Commit


class Rota:
    """Of one run: a checkpoint every `every` rounds, none from `rounds` on."""

    def __init__(self, every: int, rounds: int) -> None:
        self._every = every
        self._rounds = rounds
        self._participants: list[Member] = []
        self._writer: Member | None = None

    def writer(self, commit: Commit) -> Member | None:
        """Who writes the checkpoint after this commit, before the round that follows; None for nobody. Call it for
        every commit, in order.
        """
        round_ = commit.round + 1
        if commit.participants:
            self._participants = [participant.member for participant in commit.participants]
        if not self._participants or round_ >= self._rounds:
            return None
        if round_ % self._every == 0:
            turn = round_ // self._every
        elif self._writer is not None and self._writer not in self._participants:
            turn = round_
        else:
            return None
        self._writer = self._participants[turn % len(self._participants)]
        return self._writer
