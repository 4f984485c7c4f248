"""How a run exchanges: one frozen object that travels from the launcher to every replica as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

CodecName = Literal["fp32", "bf16", "int8", "int4"]
ReduceName = Literal["auto", "gather", "shard"]


class ExchangeSettings(BaseModel):
    """Settings of the exchange. Seconds are floats; `policy`, `min_replicas`, the codecs and a `reduce` other than auto
    must be the same on every replica (run.json holds them).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["strict", "skip"] = "strict"
    """strict: every round needs all ranks. skip: a straggler is left out after the grace period."""
    min_replicas: int | None = Field(default=None, ge=1)
    """Contributions with one base digest that a commit needs; None: a majority of the world size."""
    codec: CodecName = "fp32"
    """Wire format of the pseudo-gradients; int8 and int4 carry their rounding error over to the next round."""
    reduce: ReduceName = "auto"
    """gather: every replica averages all payloads. shard: each averages a part of them, and reads the others' parts:
    fewer bytes, more requests. auto: what the first replica's link to the store makes faster.
    """
    mean_codec: CodecName = "fp32"
    """Wire format of the means of a sharded reduction."""
    timeout: float = Field(default=1800.0, gt=0)
    """A round that is not committed by then ends this process with an error naming whom it waited for."""
    grace: float | None = Field(default=None, ge=0)
    """Under skip: how long to wait for the others once `min_replicas` contributions are there; None: adaptive."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Rounds between two checkpoints (K)."""
    retry_for: float = Field(default=60.0, ge=0)
    """How long one operation is tried again while the store is overloaded or does not answer."""
    join_timeout: float = Field(default=600.0, ge=0)
    """Under skip: how long a rank that has never been seen is waited for."""
    dead_after: float = Field(default=30.0, gt=0)
    """A beat that has not changed for so long, on the observer's own clock, belongs to a dead member."""
    beat_every: float = Field(default=1.0, gt=0)
    poll_first: float = Field(default=0.02, gt=0)
    poll_most: float = Field(default=1.0, gt=0)
    """Polls back off from `poll_first` to `poll_most`, with jitter."""
    output_uri: str | None = None
    """Where the trained model goes; None: `final/model` under the run's prefix."""

    def majority(self, world_size: int) -> int:
        """`min_replicas`, or its default for that world size."""
        return self.min_replicas if self.min_replicas is not None else world_size // 2 + 1
