"""The default trainer: a Hugging Face causal language model under DiLoCo.

Importing this package, or `diloco.training.config`, does not load torch or transformers: the launcher checks settings
with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.training.loop import diloco_train

__all__ = ["diloco_train"]


def __getattr__(name: str) -> Any:
    if name == "diloco_train":
        from diloco.training.loop import diloco_train

        return diloco_train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
