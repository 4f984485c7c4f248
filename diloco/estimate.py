"""What a run will cost and how long a round takes, before there is one: arithmetic on the plan and the price table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from diloco.cost import round_traffic
from diloco.status import count, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.cost import Prices
    from diloco.exchange.settings import ReduceName

PARAMETERS = {"tiny": 394_080, "small": 25_829_888}
"""Trained parameters of the built-in models."""
COLD_START_SECONDS = (180, 300)
"""Until a container runs on a fresh instance, as seen with SageMaker's CPU and GPU types."""
WARM_START_SECONDS = (20, 60)
"""On an instance that was kept warm."""


class Estimate(BaseModel):
    """Dollars are on-demand prices of `prices_region` at `prices_date`; None: not known."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)

    dollars_per_hour: dict[str, float | None]
    """Of all replicas, by instance type."""
    spot_dollars_per_hour_least: dict[str, float | None]
    """With the most that managed spot may take off."""
    prices_date: str
    prices_region: str
    prices_source: str
    parameters: int | None
    codec: str
    mean_codec: str
    reduce: str
    """`auto`: the run measures its link; the round below is by what is faster at the assumed bandwidth."""
    fragments: int
    mbit_assumed: float
    round_bytes_up: float | None = None
    """Of all replicas together."""
    round_bytes_down: float | None = None
    round_requests: float | None = None
    round_s3_dollars: float | None = None
    round_algorithm: str | None = None
    round_seconds: float | None = None
    """One replica's exchange at the assumed bandwidth; a delay of the sync hides it behind inner steps."""
    start_seconds: tuple[int, int]

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return self.model_dump(by_alias=True, mode="json")

    def rows(self, region: str) -> list[tuple[str, str]]:
        """For people."""
        rows = []
        for name, price in self.dollars_per_hour.items():
            if price is None:
                rows.append(("cost", f"{name}: price unknown (--prices FILE)"))
                continue
            least = self.spot_dollars_per_hour_least[name]
            rows.append(("cost", f"{name}: ${price:.2f} an hour on demand, spot from ${least:.2f}"))
        where = "" if region == self.prices_region else f"; {region} may differ"
        rows.append(("prices", f"{self.prices_region}, {self.prices_date}{where}"))
        if self.round_bytes_up is None or self.round_bytes_down is None:
            rows.append(("round", "the model's size is unknown: give --parameters"))
        else:
            moved = f"{size(self.round_bytes_up)} up, {size(self.round_bytes_down)} down"
            asked = f"about {count(self.round_requests or 0)} requests (${self.round_s3_dollars:.4f})"
            time = f"{self.round_seconds:.1f} s a replica at {self.mbit_assumed:g} Mbit/s"
            rows.append(("round", f"{moved}, {asked}, {time}, by {self.round_algorithm}"))
        low, high = self.start_seconds
        rows.append(("start", f"{low} to {high} s until the containers run"))
        return rows


def estimate(
    prices: Prices,
    *,
    replicas: int,
    instance_types: Sequence[str],
    parameters: int | None,
    fragments: int,
    mbit: float,
    warm: bool,
    codec: str = "fp32",
    mean_codec: str = "fp32",
    reduce: ReduceName = "auto",
) -> Estimate:
    """Estimate a run of N replicas; `parameters` are of the whole model."""
    hourly = {name: prices.per_hour(name) for name in instance_types}
    hour = {name: None if price is None else replicas * price for name, price in hourly.items()}
    least = {name: None if price is None else price * (1 - prices.spot_most_off) for name, price in hour.items()}
    found: dict[str, Any] = {}
    if parameters is not None:
        moved = round_traffic(
            prices,
            replicas=replicas,
            parameters=parameters,
            fragments=fragments,
            mbit=mbit,
            codec=codec,
            mean_codec=mean_codec,
            reduce=reduce,
        )
        found = {
            "round_bytes_up": moved.bytes_up,
            "round_bytes_down": moved.bytes_down,
            "round_requests": moved.puts + moved.gets,
            "round_s3_dollars": moved.dollars,
            "round_seconds": moved.seconds,
            "round_algorithm": moved.algorithm,
        }
    return Estimate(
        dollars_per_hour=hour,
        spot_dollars_per_hour_least=least,
        prices_date=prices.date,
        prices_region=prices.region,
        prices_source=prices.source,
        parameters=parameters,
        codec=codec,
        mean_codec=mean_codec,
        reduce=reduce,
        fragments=fragments,
        mbit_assumed=mbit,
        start_seconds=WARM_START_SECONDS if warm else COLD_START_SECONDS,
        **found,
    )
