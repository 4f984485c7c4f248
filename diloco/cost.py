"""What a run costs: instance hours from a dated price table, requests and bytes of S3 by the protocol's own counts.

The table is `diloco/prices.json`, for one region, with its source and date; another file of the same form replaces it.
What it does not hold is unknown, and said to be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.errors import ConfigurationError
from diloco.exchange.round_cost import Link, choose, round_cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from diloco.exchange.round_cost import Algorithm
    from diloco.exchange.settings import ReduceName

TABLE = Path(__file__).with_name("prices.json")
ANSWER_SECONDS = 0.03
"""Assumed of a small request to S3 in the same region."""

BYTES_A_VALUE = {"fp32": 4.0, "bf16": 2.0, "int8": 512 / 508, "int4": 512 / 1016}
"""Of a payload, by codec; the integers' blocks hold a scale each."""


class Prices(BaseModel):
    """Dollars. Every price is of `region`; others differ by some tens of percent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    date: str
    region: str
    currency: str
    training_per_hour: dict[str, float]
    """On demand, by instance type."""
    spot_most_off: float = Field(ge=0, lt=1)
    """The most that managed spot may take off (0.9: up to 90 %); its price changes and is in no list."""
    s3_per_1000_puts: float
    """PUT, POST and LIST."""
    s3_per_1000_gets: float
    s3_per_gib_month: float

    @classmethod
    def load(cls, path: Path | None = None) -> Self:
        """Read a table. Raises ConfigurationError."""
        try:
            return cls.model_validate(json.loads((path or TABLE).read_text()))
        except (OSError, ValueError, ValidationError) as problem:
            first = str(problem).splitlines()[0]
            raise ConfigurationError(f"--prices {path}: {first}: write it in the form of diloco/prices.json") from None

    def per_hour(self, instance_type: str) -> float | None:
        """On-demand price of an hour of training, None if the table does not hold it."""
        return self.training_per_hour.get(instance_type)


@dataclass(frozen=True)
class Traffic:
    """What all replicas together move and ask in one round, through one bucket."""

    bytes_up: float
    bytes_down: float
    puts: float
    """PUTs and LISTs, which cost the same."""
    gets: float
    dollars: float
    seconds: float
    """Of one replica at the assumed bandwidth."""
    algorithm: Algorithm


def round_traffic(
    prices: Prices,
    *,
    replicas: int,
    parameters: int,
    fragments: int,
    mbit: float,
    codec: str = "fp32",
    mean_codec: str = "fp32",
    reduce: ReduceName = "auto",
) -> Traffic:
    """Estimate a round of all replicas by the exchange's own model (:mod:`diloco.exchange.round_cost`).

    `parameters` are of the whole model (a round carries one fragment), `mbit` is one replica's bandwidth to S3 in
    megabits a second. With `auto`, what a link of that bandwidth makes faster; a run measures its own.
    """
    values = parameters / fragments
    payload, mean = values * BYTES_A_VALUE[codec], values * BYTES_A_VALUE[mean_codec]
    link = Link(ANSWER_SECONDS, mbit * 1e6 / 8, mbit * 1e6 / 8)
    algorithm = choose(link, replicas=replicas, payload=payload, mean=mean) if reduce == "auto" else reduce
    one = round_cost(algorithm, replicas=replicas, payload=payload, mean=mean, link=link)
    puts, gets = replicas * one.puts + 1, replicas * one.gets  # the record is created once
    dollars = puts / 1000 * prices.s3_per_1000_puts + gets / 1000 * prices.s3_per_1000_gets
    return Traffic(replicas * one.bytes_up, replicas * one.bytes_down, puts, gets, dollars, one.seconds, algorithm)


def dollars(prices: Prices, used: Iterable[tuple[str, float]]) -> tuple[float, frozenset[str]]:
    """Add up instance types with their billable seconds; returns the sum and the types whose price is not known."""
    total, unknown = 0.0, set()
    for instance_type, seconds in used:
        price = prices.per_hour(instance_type)
        if price is None:
            unknown.add(instance_type)
        else:
            total += price * seconds / 3600
    return total, frozenset(unknown)
