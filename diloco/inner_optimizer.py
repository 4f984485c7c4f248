"""The inner optimizer's state as plain named tensors, so that it can be saved without pickle."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)


def copy_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """A CPU copy of all state tensors, as `<parameter's index>/<name>` (AdamW: `0/exp_avg`, `0/step`, …)."""
    return {
        f"{index}/{name}": value.detach().to("cpu", copy=True)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def load_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Take over state from :func:`copy_state`. False, and nothing is changed, if it is not of these parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        index = int(number) if number.isdigit() else len(parameters)
        if index >= len(parameters) or (tensor.ndim and tensor.shape != parameters[index].shape):
            logger.warning("the saved state of the inner optimizer is of another model (%s): it begins anew", key)
            return False
        state.setdefault(index, {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return True
