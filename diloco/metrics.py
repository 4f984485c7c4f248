"""Metrics as lines of a replica's log, and the expressions by which SageMaker finds them there.

diloco metric: step=120 loss=2.3125 tokens_per_second=5120
diloco metric: eval_loss=2.2817
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two lines of training metrics: CloudWatch keeps training-job metrics no finer."""

PREFIX = "diloco metric:"
NUMBER = r"([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)"
NAMES = ("step", "loss", "tokens_per_second", "eval_loss")


def definitions() -> list[dict[str, str]]:
    """`MetricDefinitions` of a CreateTrainingJob: one for each of :data:`NAMES`.

    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_MetricDefinition.html
    """
    return [{"Name": f"diloco:{name}", "Regex": rf"{PREFIX}.* {name}={NUMBER}"} for name in NAMES]


class MetricLog:
    """Writes a line now and then. Losses are nats a token."""

    def __init__(self, *, every: float = EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._at: float | None = None
        self._tokens = 0

    def step(self, step: int, loss: float | None, tokens: int) -> None:
        """Note a step that is about to be made; writes a line if one is due."""
        now = self._clock()
        if self._at is None:
            self._at = now
        self._tokens += tokens
        seconds = now - self._at
        if loss is None or seconds < self._every:
            return
        logger.info("%s step=%d loss=%.6g tokens_per_second=%.6g", PREFIX, step, loss, self._tokens / seconds)
        self._at, self._tokens = now, 0

    def evaluation(self, loss: float) -> None:
        """Write a held-out loss."""
        logger.info("%s eval_loss=%.6g", PREFIX, loss)
