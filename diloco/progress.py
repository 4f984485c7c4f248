"""What a replica tells of itself while it runs (beats) and at its end (the report)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from diloco.exchange.records import Beat, ReplicaReport

if TYPE_CHECKING:
    from diloco.exchange.layout import Member
    from diloco.exchange.store import Stats


def finite(value: float | None) -> float | None:
    """The number, or None where JSON could not hold it."""
    return value if value is not None and math.isfinite(value) else None


Phase = Literal["starting", "training", "waiting", "finishing", "finished", "failed"]


@dataclass
class Progress:
    """Counters of one replica. Written by the training thread, read by the thread that beats: each field is set
    whole.
    """

    phase: Phase = "starting"
    step: int = 0
    round: int = 0
    loss: float | None = None
    tokens: int = 0
    rounds_applied: int = 0
    applied: tuple[int, str] | None = None
    """The round that was applied last, and the digest of its fragment after it."""
    final_digest: str | None = None
    """One digest of all fragments, at the end."""
    seconds_waiting: float = 0.0
    _counter: int = 0
    _waiting_since: float | None = None
    _started: float | None = None
    _ended: float | None = None
    _clock: Any = field(default=time.monotonic)

    def start_training(self) -> None:
        """From now on seconds count as training."""
        self._started = self._clock()
        self.phase = "training"
        self.seconds_waiting = 0.0

    def end_training(self) -> None:
        """Seconds after this count neither as training nor as waiting."""
        self._ended = self._clock()
        self.phase = "finishing"

    def begin_wait(self) -> None:
        """The training thread blocks on the exchange."""
        self._waiting_since = self._clock()

    def end_wait(self) -> None:
        """The training thread goes on."""
        if self._waiting_since is not None and self._ended is None:
            self.seconds_waiting += self._clock() - self._waiting_since
        self._waiting_since = None

    @property
    def seconds_training(self) -> float:
        """Seconds between start and end of training that were not spent waiting."""
        if self._started is None:
            return 0.0
        end = self._clock() if self._ended is None else self._ended
        return float(max(end - self._started - self.seconds_waiting, 0.0))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second of wall time, waiting included; None before the first."""
        seconds = self.seconds_training + self.seconds_waiting
        return self.tokens / seconds if self.tokens and seconds > 0 else None

    def note_applied(self, round_: int, digest: str) -> None:
        """The digest of a fragment after a round; digests may come in another order than the rounds."""
        if self.applied is None or self.applied[0] <= round_:
            self.applied = (round_, digest)

    def beat(self, member: Member, waiting_for: list[str]) -> Beat:
        """The next beat."""
        self._counter += 1
        digest_round, digest = self.applied or (None, None)
        waiting = self._waiting_since is not None and self.phase in {"training", "finishing"}
        return Beat(
            rank=member.rank,
            attempt=member.attempt,
            counter=self._counter,
            phase="waiting" if waiting else self.phase,
            step=self.step,
            round=self.round,
            loss=self.loss,
            tokens=self.tokens,
            tokens_per_second=self.tokens_per_second,
            waiting_for=waiting_for if waiting else [],
            seconds_waiting=self.seconds_waiting,
            digest=digest,
            digest_round=digest_round,
        )

    def report(self, member: Member, stats: Stats, trainer: dict[str, Any]) -> ReplicaReport:
        """The report of a replica that has ended well."""
        return ReplicaReport(
            rank=member.rank,
            attempt=member.attempt,
            steps=self.step,
            tokens=self.tokens,
            tokens_per_second=self.tokens_per_second,
            final_train_loss=self.loss,
            seconds_training=self.seconds_training,
            seconds_waiting=self.seconds_waiting,
            bytes_up=stats.bytes_up,
            bytes_down=stats.bytes_down,
            requests=stats.requests,
            digest=self.final_digest,
            rounds_applied=self.rounds_applied,
            trainer=trainer,
        )
