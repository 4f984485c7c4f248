"""What `plan` says of costs: by the price table and the protocol's own counts, or that it is unknown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from diloco.cost import TABLE, Prices, dollars, round_traffic
from diloco.errors import ConfigurationError
from diloco.estimate import PARAMETERS, estimate
from diloco.training.config import TrainConfig

if TYPE_CHECKING:
    from pathlib import Path

PRICES = Prices.load()


def test_the_table_has_a_source_and_a_date() -> None:
    assert PRICES.source.startswith("https://")
    assert PRICES.date >= "2026-01"
    assert PRICES.per_hour("ml.m5.xlarge") == 0.23
    assert PRICES.per_hour("ml.nothing") is None


def test_another_table_takes_its_place(tmp_path: Path) -> None:
    mine = json.loads(TABLE.read_text()) | {"region": "eu-west-1", "training_per_hour": {"ml.m5.xlarge": 0.3}}
    (tmp_path / "prices.json").write_text(json.dumps(mine))

    assert Prices.load(tmp_path / "prices.json").per_hour("ml.m5.xlarge") == 0.3


@pytest.mark.parametrize("text", [None, "{", '{"source": "x"}'])
def test_a_table_of_another_form_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "prices.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigurationError, match=r"--prices .*write it in the form of diloco/prices\.json"):
        Prices.load(path)


def test_dollars_by_type_and_what_is_not_known() -> None:
    used = [("ml.m5.xlarge", 3600.0), ("ml.m5.xlarge", 1800.0), ("ml.new.xlarge", 60.0)]

    total, unknown = dollars(PRICES, used)

    assert total == pytest.approx(1.5 * 0.23)
    assert unknown == {"ml.new.xlarge"}


def test_a_round_moves_one_fragment_of_every_replica_to_every_other() -> None:
    moved = round_traffic(PRICES, replicas=4, parameters=10**6, fragments=2, codec="bf16", reduce="gather", mbit=8.0)

    assert moved.bytes_up == 4 * 10**6
    assert moved.bytes_down == 4 * 3 * 10**6
    assert 4.0 < moved.seconds < 4.5  # 8 Mbit/s are 1 MB/s: one up, three down, and answers
    assert moved.dollars < 0.01


def test_a_round_is_estimated_by_the_algorithm_that_would_run() -> None:
    slow = round_traffic(PRICES, replicas=16, parameters=10**8, fragments=1, mbit=100.0)
    gathered = round_traffic(PRICES, replicas=16, parameters=10**8, fragments=1, mbit=100.0, reduce="gather")
    coarse = round_traffic(PRICES, replicas=8, parameters=10**8, fragments=1, mbit=100.0, codec="int4")
    small = round_traffic(PRICES, replicas=16, parameters=1000, fragments=1, mbit=100.0)

    assert (slow.algorithm, small.algorithm) == ("shard", "gather")
    assert slow.seconds < gathered.seconds / 4
    assert slow.bytes_down == pytest.approx(2 * 15 / 16 * 16 * 4e8)
    assert gathered.bytes_down == 15 * 16 * 4e8
    assert coarse.algorithm == "gather", "fp32 means would be more than all the payloads"


def test_an_estimate_says_what_it_does_not_know() -> None:
    made = estimate(
        PRICES,
        replicas=8,
        instance_types=["ml.g5.2xlarge", "ml.new.xlarge"],
        parameters=None,
        fragments=1,
        mbit=1000.0,
        warm=False,
    )

    assert made.dollars_per_hour == {"ml.g5.2xlarge": pytest.approx(8 * 1.515), "ml.new.xlarge": None}
    assert made.spot_dollars_per_hour_least["ml.g5.2xlarge"] == pytest.approx(8 * 0.1515)
    rows = dict(made.rows("eu-west-1"))
    assert rows["round"] == "the model's size is unknown: give --parameters"
    assert "eu-west-1 may differ" in rows["prices"]
    assert json.loads(json.dumps(made.document()))["dollarsPerHour"]["ml.new.xlarge"] is None


@pytest.mark.parametrize("model", PARAMETERS)
def test_the_sizes_of_the_built_in_models_are_theirs(model: str) -> None:
    from diloco.training.models import build_model

    built = build_model(TrainConfig(model=model), seed=0)

    assert sum(parameter.numel() for parameter in built.parameters()) == PARAMETERS[model]
