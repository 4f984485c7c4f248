"""What a test can make the service do: throttle, refuse, lose an answer, lack capacity, enforce quotas."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from tests.support.sagemaker.errors import ApiError


@dataclass
class Faults:
    """Set the fields at any time; the service looks at them at each call."""

    rates: dict[str, float] = field(default_factory=dict)
    """Calls a second of an operation; those above it are throttled."""
    burst: int = 5
    """Calls above the rate that are let through at once."""
    refusals: list[tuple[str, str]] = field(default_factory=list)
    """Code and message of the next refused CreateTrainingJob calls, one each."""
    refused_names: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Part of a job's name → code and message with which it is always refused."""
    lost_answers: int = 0
    """How many of the next CreateTrainingJob calls are carried out, and their connection closed."""
    lose_every: int = 0
    """Every n-th CreateTrainingJob, too; 0: none."""
    no_capacity: dict[str, int] = field(default_factory=dict)
    """Instance type → how many of the next starts on it fail for lack of capacity."""
    quotas: dict[str, int] = field(default_factory=dict)
    """By the quota's name; what is not here is not limited, but warm pools, whose default is 0."""
    throttled: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    _created: int = field(default=0, init=False)
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def throttle(self, operation: str) -> None:
        """Raise ThrottlingException above the rate: a token bucket, as AWS describes its API throttling."""
        rate = self.rates.get(operation)
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            tokens, at = self._buckets.get(operation, (float(self.burst), now))
            tokens = min(float(self.burst), tokens + (now - at) * rate)
            if tokens < 1:
                self._buckets[operation] = tokens, now
                self.throttled += 1
                raise ApiError("ThrottlingException", "Rate exceeded")
            self._buckets[operation] = tokens - 1, now

    def do_not_throttle(self) -> None:
        """Forget all rates, and what was let through under them."""
        with self._lock:
            self.rates.clear()
            self._buckets.clear()

    def refuse(self, name: str) -> None:
        """Raise what the next creation, or one of that name, is to be refused with."""
        with self._lock:
            found = next((answer for part, answer in self.refused_names.items() if part in name), None)
            if found is None and self.refusals:
                found = self.refusals.pop(0)
        if found is not None:
            raise ApiError(*found)

    def take_capacity(self, instance_type: str) -> bool:
        """Whether an instance can be had now."""
        with self._lock:
            lacking = self.no_capacity.get(instance_type, 0)
            if lacking:
                self.no_capacity[instance_type] = lacking - 1
            return not lacking

    def lose_answer(self) -> bool:
        """Whether the answer to this creation is lost."""
        with self._lock:
            self._created += 1
            lost = self.lost_answers > 0
            self.lost_answers -= lost
            lost = lost or (self.lose_every > 0 and self._created % self.lose_every == 0)
            self.lost += lost
            return lost
