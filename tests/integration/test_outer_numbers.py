"""The outer loop pinned by numbers: what replicas hold against plain tensor arithmetic written here, with no torchft
and no exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from diloco.exchange.settings import ExchangeSettings
from diloco.outer import make_diloco_outer_loop
from tests.support.replicas import FAST, all_well, run_replicas

if TYPE_CHECKING:
    from diloco.manager import ObjectStoreManager

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2, 2)}
INNER_LR = 0.1
OUTER_LR, MOMENTUM = 0.7, 0.9

Tensors = dict[str, torch.Tensor]


class Toy(nn.Module):
    """Three parameters, each of which can be a fragment."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            module = nn.Module()
            module.register_parameter("weight", nn.Parameter(torch.randn(shape, generator=generator)))
            self.add_module(name, module)

    def weights(self) -> Tensors:
        """A copy of all parameters by fragment name."""
        return {name: self.get_submodule(name).get_parameter("weight").detach().clone() for name in SHAPES}

    def loss(self, rank: int, step: int) -> torch.Tensor:
        """Half the squared distance to a point that depends on rank and step."""
        total = torch.zeros(())
        for name, goal in goals(rank, step).items():
            total = total + (self.get_submodule(name).get_parameter("weight") - goal).square().sum() / 2
        return total


def goals(rank: int, step: int) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def by_hand(
    world: int, groups: list[list[str]], interval: int, delay: int, alpha: float, rounds: int, weights: list[int]
) -> list[list[Tensors]]:
    """What each replica holds after each round, by the papers' formulas."""
    start = Toy(0).weights()
    local = [{name: value.clone() for name, value in start.items()} for _ in range(world)]
    globals_ = {name: value.clone() for name, value in start.items()}
    momentum = {name: torch.zeros_like(value) for name, value in start.items()}
    held: list[list[Tensors]] = [[] for _ in range(world)]
    step = 0
    for round_ in range(rounds):
        taken: list[Tensors] = [{} for _ in range(world)]
        for inner in range(1, interval + 1):
            for rank in range(world):
                for name, goal in goals(rank, step).items():
                    local[rank][name] = local[rank][name] - INNER_LR * (local[rank][name] - goal)
                if inner == interval - delay:
                    taken[rank] = {name: globals_[name] - local[rank][name] for name in groups[round_ % len(groups)]}
            step += 1
        for name in groups[round_ % len(groups)]:
            total = sum(weights)
            mean = torch.stack([taken[rank][name] * (weights[rank] / total) for rank in range(world)]).sum(0)
            momentum[name] = MOMENTUM * momentum[name] + mean
            globals_[name] = globals_[name] - OUTER_LR * (mean + MOMENTUM * momentum[name])
            for rank in range(world):
                local[rank][name] = alpha * local[rank][name] + (1 - alpha) * globals_[name]
        for rank in range(world):
            held[rank].append({name: value.clone() for name, value in local[rank].items()})
    return held


def fragments_of(model: Toy, groups: list[list[str]]) -> list[nn.Module]:
    return [nn.ModuleDict({name: model.get_submodule(name) for name in group}) for group in groups]


@pytest.mark.parametrize("groups", [[["a", "b", "c"]], [["a"], ["b"], ["c"]]], ids=["one fragment", "three fragments"])
@pytest.mark.parametrize(("delay", "alpha"), [(0, None), (2, None), (2, 0.0), (1, 0.25)])
def test_two_replicas_hold_what_the_formulas_say(
    groups: list[list[str]], delay: int, alpha: float | None, store_uri: str
) -> None:
    interval, rounds = 4, 3 * len(groups)
    tokens = [300, 100]

    def trainer(manager: ObjectStoreManager, rank: int) -> list[Tensors]:
        model = Toy(seed=rank)  # the replicas' own initial values differ: checkpoint 0 counts
        optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
        outer = make_diloco_outer_loop(
            manager,
            fragments_of(model, groups),
            optimizer,
            steps=interval * rounds,
            sync_every=interval * len(groups),
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
        )
        held = []
        with outer:
            for step in outer.steps():
                if step and step % interval == 0:
                    held.append(model.weights())
                optimizer.zero_grad()
                loss = model.loss(rank, step)
                loss.backward()  # type: ignore[no-untyped-call]
                outer.report(loss=loss.item(), tokens=tokens[rank])
                optimizer.step()
        held.append(model.weights())
        return held

    held = all_well(run_replicas(store_uri, 2, trainer))
    kept = alpha if alpha is not None else (0.5 if delay else 0.0)
    expected = by_hand(2, groups, interval, delay, kept, rounds, tokens)
    for rank in range(2):
        for round_ in range(rounds):
            for name in SHAPES:
                torch.testing.assert_close(held[rank][round_][name], expected[rank][round_][name], rtol=0, atol=1e-6)


def test_one_replica_with_a_neutral_outer_step_is_plain_training() -> None:
    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        return loss

    def trainer(manager: ObjectStoreManager, rank: int) -> nn.Module:
        model, optimizer = model_and_optimizer()
        outer = make_diloco_outer_loop(
            manager, [model], optimizer, steps=30, sync_every=5, outer_lr=1.0, outer_momentum=0.0, nesterov=False
        )
        with outer:
            for step in outer.steps():
                optimizer.zero_grad()
                loss_of(model, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        outer.finish()
        return model

    diloco = all_well(run_replicas("memory://plain-training", 1, trainer))[0]
    plain, optimizer = model_and_optimizer()
    for step in range(30):
        optimizer.zero_grad()
        loss_of(plain, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for ours, theirs in zip(diloco.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_replicas_end_with_the_same_bits_whatever_the_codec(store_uri: str, codec: str) -> None:
    def trainer(manager: ObjectStoreManager, rank: int) -> tuple[str, Tensors]:
        model = Toy(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
        outer = make_diloco_outer_loop(manager, [model], optimizer, steps=12, sync_every=4)
        with outer:
            for step in outer.steps():
                optimizer.zero_grad()
                model.loss(rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return outer.finish().digest, model.weights()

    settings = ExchangeSettings(**(FAST.model_dump() | {"codec": codec}))
    results = all_well(run_replicas(store_uri, 3, trainer, settings))
    assert len({digest for digest, _ in results}) == 1
    for name in SHAPES:
        assert all(torch.equal(results[0][1][name], weights[name]) for _, weights in results)
