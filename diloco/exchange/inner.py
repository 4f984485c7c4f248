"""A replica's own state across restarts: what its inner optimizer and its codec remember. Nobody else reads it, and
nothing depends on it being there.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.errors import ObjectMissingError
from diloco.exchange import layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from diloco.exchange.context import Context

logger = logging.getLogger(__name__)

_KEY = re.compile(r"replicas/\d{5}/(?P<attempt>\d{5})/(?P<round>\d{8})\.safetensors$")


@dataclass(frozen=True)
class Saved:
    """State as it was before a round."""

    round: int
    tensors: dict[str, torch.Tensor]


async def save(context: Context, round_: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the state as it was before `round_`, then delete older ones of this attempt and of earlier attempts.

    A crash between leaves both; what a newer attempt has written stays.
    """
    import safetensors.torch

    key = layout.inner_state(context.member, round_)
    await context.store.write(key, safetensors.torch.save(dict(tensors)))
    entries = await context.store.list(layout.inner_states(context.member.rank))
    mine = (context.member.attempt, round_)
    found = [(_KEY.search(entry.key), entry.key) for entry in entries]
    await context.store.delete(
        old for match, old in found if match is not None and (int(match["attempt"]), int(match["round"])) < mine
    )


async def load(context: Context, round_: int) -> Saved | None:
    """This rank's newest state of any attempt, not from beyond `round_`; None if there is none that can be read."""
    import safetensors
    import safetensors.torch

    found = []
    for entry in await context.store.list(layout.inner_states(context.member.rank)):
        match = _KEY.search(entry.key)
        if match is not None and int(match["round"]) <= round_:
            found.append((int(match["round"]), int(match["attempt"]), entry.key))
    for saved_round, _, key in sorted(found, reverse=True):
        try:
            return Saved(saved_round, safetensors.torch.load(await context.store.read(key)))
        except ObjectMissingError:
            continue  # the attempt before, still alive, has written a newer one since
        except safetensors.SafetensorError as problem:
            logger.warning("%s: %s is not used: %s", context.member, key, problem)
    return None
