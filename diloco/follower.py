"""How a replica that is behind the others comes to be with them again.

One that joins in the midst of a round, or was left out of the last one, would make all its inner steps while the others
wait for it, or leave it out once more. So it looks where they are, in the background and no more often than it beats:
if they have contributed, it contributes the steps that it has made, weighted by their tokens; if they have committed,
it catches up and begins the next round with them. A replica that is with the others never looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from diloco.exchange.replica import Replica, RoundState, Turn
    from diloco.presence import Presence


NEARLY_ALL = 0.9
"""Who is hurried after so much of a round is as fast as the others."""


class Follower:
    """Of one replica; used by its training thread."""

    def __init__(self, presence: Presence, replica: Replica) -> None:
        self._presence = presence
        self._replica = replica
        # At a run's beginning all start together, and every run of the same settings is to be the same.
        self._behind = replica.round > 0 or presence.member.attempt > 1
        self._hurried = False
        self._looking: Future[RoundState] | None = None
        self._look_at = 0.0

    def look(self, made: float) -> RoundState:
        """Where the others are, if that was found out since the last call; else `open`. `made` is the share of the
        round's inner steps that this replica has made.
        """
        if not self._behind:
            return "open"
        now = self._presence.clock.monotonic()
        if self._looking is None:
            if now >= self._look_at:
                self._looking = self._presence.background.submit(self._replica.round_state())
            return "open"
        if not self._looking.done():
            return "open"
        looked, self._looking = self._looking, None
        self._look_at = now + self._presence.settings.beat_every
        found = self._presence.wait(looked)
        self._hurried |= found == "closing" and made < NEARLY_ALL
        return found

    def stop(self) -> None:
        """The pseudo-gradient of the round is being taken: what a look finds now is of no use."""
        self._looking = None

    def settled(self, turn: Turn) -> None:
        """A round is over. A replica is with the others if it took part with nearly all inner steps."""
        member, outcome = self._presence.member, turn.outcome
        took_part = outcome is not None and any(p.member == member for p in outcome.commit.participants)
        self._behind = not took_part or (self._behind and self._hurried)
        self._hurried = False
