"""Bring your own trainer: a classifier of two interleaved spirals in plain PyTorch, no language model.

    python scripts/launch.py run --local --replicas 2 --steps 40 --sync-every 10 \
        --trainer-module examples.plain_pytorch --trainer-fn train

`--trainer-kwargs-json '{"width": 64}'` sets the function's own arguments.
"""

from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from diloco import ObjectStoreManager, make_diloco_outer_loop


def spirals(points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw float32 places `[points, 2]` and their int64 classes `[points]`."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (points,), generator=draw)
    radius = torch.rand(points, generator=draw)
    angle = 4 * radius + torch.pi * labels + 0.1 * torch.randn(points, generator=draw)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels


def train(
    *, manager: ObjectStoreManager, rank: int, world_size: int, steps: int, sync_every: int, fragments: int = 1,
    sync_delay: int = 0, seed: int = 0, width: int = 32, learning_rate: float = 1e-2,
) -> dict[str, Any]:  # fmt: skip
    """Train one replica and return metrics as JSON values."""
    if fragments not in (1, 2):
        raise ValueError("this model has 2 layers, so at most 2 fragments")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, width), nn.GELU()), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    held_out = spirals(1000, seed=-1 % 2**32)
    outer = make_diloco_outer_loop(
        manager, [model] if fragments == 1 else list(model), optimizer, steps=steps, sync_every=sync_every,
        fragment_sync_delay=sync_delay, save=lambda folder: save_model(model, str(folder / "model.safetensors")),
    )  # fmt: skip
    with outer:
        for step in outer.steps():
            if step == 0:
                outer.report_evaluation(nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item())
            places, labels = spirals(64, seed=(seed * steps + step) * world_size + rank)
            loss = nn.functional.cross_entropy(model(places), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            outer.report(loss=loss.item(), tokens=len(labels))
            optimizer.step()
    outer.finish()
    final = nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item()
    outer.report_evaluation(final)
    return {"final_eval_loss": final}
