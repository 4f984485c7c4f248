"""A small deterministic trainer whose process dies or stops at a named point, or does something wrong in a round.

Nothing of the product knows of it: :func:`train` is a trainer like any other (`--trainer-module
tests.support.chaos_replica`), and a point wraps the operations of the process's own store.

A point is `{"rank": 2, "when": "before", "operation": "create", "key": "rounds/00000002/p/*"}`: the process kills
itself with SIGKILL right before, or right `after`, the first of those operations. `nth` takes a later one, `signal`
another signal ("STOP"). Keys are relative to the run and name rank and attempt, so a relaunched process passes by the
point where its predecessor died. Operations are read, create, write, write_file, list, delete; a read counts `after`
only if the object is there, a create only if it was this one that created.

An act is `{"rank": 2, "round": 3, "do": "nan"}`, of a rank's first attempt only: `nan` makes the pseudo-gradient NaN,
`flip` flips a bit of a global parameters after their digest was taken, `hold` waits in the round's first step until
the object `until` is there, `fail` raises.
"""

from __future__ import annotations

import os
import signal
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_model
from torch import nn

from diloco import ObjectStoreManager, make_diloco_outer_loop
from diloco.exchange import remote
from diloco.exchange.store import read_if_there

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOLD_SECONDS = 200.0
"""Only against hangs."""


def train(
    *, manager: ObjectStoreManager, rank: int, world_size: int, steps: int, sync_every: int, fragments: int = 1,
    sync_delay: int = 0, seed: int = 0, width: int = 16, points: Sequence[dict[str, Any]] = (),
    acts: Sequence[dict[str, Any]] = (), operation_timeout: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train `fragments` linear layers, float32 `[width, width]`, to reproduce their input.

    `operation_timeout` replaces the seconds after which one operation on the store counts as hung.
    """
    for point in points:
        if point["rank"] == rank:
            arm(**{name: value for name, value in point.items() if name != "rank"})
    if operation_timeout is not None:
        remote.OPERATION_TIMEOUT = operation_timeout
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(fragments)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = make_diloco_outer_loop(
        manager, [model] if fragments == 1 else list(model), optimizer, steps=steps, sync_every=sync_every,
        fragment_sync_delay=sync_delay, save=lambda folder: save_model(model, str(folder / "model.safetensors")),
    )  # fmt: skip
    first_attempt = manager.presence.member.attempt == 1
    interval = sync_every // fragments
    with outer:
        for step in outer.steps():
            if step == 0:
                outer.report_evaluation(_loss(model, step, 0, width).item())
            doing = [act for act in acts if first_attempt and act["rank"] == rank and act["round"] * interval == step]
            for act in doing:
                _act(manager, act)
            loss = _loss(model, step, rank, width)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            outer.report(loss=loss.item(), tokens=width)
            if any(act["do"] == "nan" for act in doing):
                for parameter in model.parameters():
                    parameter.data.fill_(float("nan"))
            optimizer.step()
    outer.finish()
    outer.report_evaluation(_loss(model, steps, 0, width).item())
    return {}


def _loss(model: nn.Module, step: int, rank: int, width: int) -> torch.Tensor:
    data = torch.randn(8, width, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return nn.functional.mse_loss(model(data), data)


def _act(manager: ObjectStoreManager, act: dict[str, Any]) -> None:
    if act["do"] == "hold":
        ends = time.monotonic() + HOLD_SECONDS
        while manager.presence.call(read_if_there(manager.presence.store, act["until"])) is None:
            if time.monotonic() > ends:
                raise TimeoutError(f"held in round {act['round']}: {act['until']} did not come")
            time.sleep(0.02)
    elif act["do"] == "flip":
        replica, states = manager._replica, manager._attached().states
        if replica is None:
            raise RuntimeError("no replica")
        for state in states:
            manager.presence.call(replica.digest(state.index))
        parameter = next(iter(states[0].parameters.values()))
        parameter.view(-1).view(torch.int32)[0] ^= 1 << 16
    elif act["do"] == "fail":
        raise ValueError(f"told to fail in round {act['round']}")


def arm(*, when: str, operation: str, key: str, nth: int = 1, signal: str = "KILL") -> None:
    """Make this process signal itself at a point. Threads other than the one that does the operation are hit too."""
    method = f"_{operation}"
    original: Callable[..., Any] = getattr(remote.RemoteStore, method)
    left = [nth]

    def strike(done: object) -> None:
        if done is not False:
            left[0] -= 1
            if left[0] == 0:
                _signal_myself(signal)

    async def wrapped(self: remote.RemoteStore, at: str, *arguments: Any) -> Any:
        matches = fnmatchcase(at, key)
        if matches and when == "before":
            strike(None)
        done = await original(self, at, *arguments)
        if matches and when == "after":
            strike(done)
        return done

    setattr(remote.RemoteStore, method, wrapped)


def _signal_myself(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
