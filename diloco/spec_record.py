"""`spec.json`: what the launcher decides once about a run, for launchers that resume it and replicas that follow it."""

from __future__ import annotations

from typing import Any, Literal

from diloco.exchange.records import OnceRecord
from diloco.exchange.settings import CodecName, ReduceName  # noqa: TC001 - pydantic looks at them

SCHEDULE = ("steps", "sync_every", "fragments", "sync_delay", "seed")
"""Settings that every trainer gets as keyword arguments."""


class SpecRecord(OnceRecord):
    """`spec.json`, created once by the launcher: what must be the same whenever the run is resumed."""

    run_id: str
    replicas: int
    steps: int
    sync_every: int
    fragments: int
    sync_delay: int
    seed: int
    policy: Literal["strict", "skip"]
    min_replicas: int
    codec: CodecName
    reduce: ReduceName
    mean_codec: CodecName
    trainer_module: str
    trainer_fn: str
    trainer_kwargs: dict[str, Any]

    @property
    def wire(self) -> dict[str, str]:
        """How the exchange sends, as its settings."""
        return {"codec": self.codec, "reduce": self.reduce, "mean_codec": self.mean_codec}

    def first_difference(self, other: SpecRecord) -> tuple[str, Any, Any] | None:
        """Return the first setting that differs, by its option's name, with the other's value and mine."""
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name in ("nonce", "format") or mine == theirs:
                continue
            if name != "trainer_kwargs":
                return f"--{name.replace('_', '-')}", theirs, mine
            for key in sorted({*mine, *theirs}):
                if mine.get(key) != theirs.get(key):
                    return (
                        f"--{key}" if key in ("model", "data") else f"trainer argument {key}",
                        theirs.get(key),
                        mine.get(key),
                    )
        return None
