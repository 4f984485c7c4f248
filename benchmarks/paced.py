"""A trainer whose inner steps take a fixed time, so that a benchmark measures the exchange and not how fast a
processor multiplies.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.manager import ObjectStoreManager


def train(
    *,
    manager: ObjectStoreManager,
    rank: int,
    world_size: int,
    steps: int,
    sync_every: int,
    fragments: int = 1,
    sync_delay: int = 0,
    seed: int = 0,
    step_seconds: float = 0.05,
    parameters: int = 65536,
    **_: Any,
) -> dict[str, Any]:
    """Move `parameters` values in each fragment at random; every inner step ends `step_seconds` after it began."""
    import torch
    from torch import nn

    from diloco.outer import make_diloco_outer_loop

    del world_size
    generator = torch.Generator().manual_seed(seed + rank)
    model = [nn.Linear(parameters // 256, 256, bias=False) for _ in range(fragments)]
    optimizer = torch.optim.SGD([p for part in model for p in part.parameters()], lr=1e-2)
    outer = make_diloco_outer_loop(
        manager, model, optimizer, steps=steps, sync_every=sync_every, fragment_sync_delay=sync_delay
    )
    with outer:
        for _step in outer.steps():
            ends = time.monotonic() + step_seconds
            for part in model:
                part.weight.grad = torch.randn(part.weight.shape, generator=generator)
            outer.report(tokens=1)
            time.sleep(max(ends - time.monotonic(), 0.0))
            optimizer.step()
    outer.finish()
    return {}
