"""Where a command finds its run: options that all such commands share, as one argument of theirs."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from diloco.cli.options import (
    Backend,
    BackendOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    OutputsOption,
    StackOption,
)
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from diloco.cli import kubernetes, sagemaker
    from diloco.stack import StackOutputs

R = TypeVar("R")


@dataclass(frozen=True)
class Place:
    """What the shared options say."""

    stack: StackOption = None
    outputs: OutputsOption = None
    backend: BackendOption = Backend.sagemaker
    namespace: NamespaceOption = None
    kubeconfig: KubeconfigOption = None
    context: ContextOption = None

    @property
    def on_cluster(self) -> bool:
        """Whether it is a cluster."""
        return self.backend is Backend.kubernetes

    def read_outputs(self) -> StackOutputs:
        """The stack's outputs. Raises ConfigurationError."""
        from diloco.stack import read_outputs

        return read_outputs(self.outputs, self.stack)

    def cluster(self) -> kubernetes.ClusterPlace:
        """The cluster, of the stack or of kubectl's configuration. Raises ConfigurationError."""
        from diloco.cli.kubernetes import ClusterPlace

        found = None if self.stack is None and self.outputs is None else self.read_outputs()
        return ClusterPlace.find(found, namespace=self.namespace, kubeconfig=self.kubeconfig, context=self.context)

    def find(
        self, run_id: str, *, prices: Path | None = None, max_cost: float | None = None
    ) -> sagemaker.FoundRun | kubernetes.FoundRun:
        """A run that some launcher started. Raises ConfigurationError if there is none of that name."""
        if self.on_cluster:
            if prices is not None or max_cost is not None:
                raise ConfigurationError("--prices and --max-cost are for SageMaker: leave them out")
            return self.on_this_cluster(run_id)
        from diloco.cli.sagemaker import FoundRun

        return FoundRun(run_id, self.read_outputs(), prices=prices, max_cost=max_cost)

    def on_this_cluster(self, run_id: str) -> kubernetes.FoundRun:
        """A run on the cluster. Raises ConfigurationError if it has no Job there."""
        from diloco.cli.kubernetes import FoundRun

        return FoundRun(run_id, self.cluster())


def located(backend: Backend | None = None) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command, which takes a :class:`Place` as `place`, the options that make one; with `backend`, all but
    `--backend`.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        shared = dict(inspect.signature(Place, eval_str=True).parameters)
        if backend is not None:
            del shared["backend"]

        @functools.wraps(command)
        def located_command(**values: object) -> R:
            chosen = {name: values.pop(name) for name in shared}
            place = Place(**chosen if backend is None else chosen | {"backend": backend})  # type: ignore[arg-type]
            return command(place=place, **values)

        own = inspect.signature(command, eval_str=True)
        parameters = [each for name, each in own.parameters.items() if name != "place"]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shared.values()]
        named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        located_command.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
        return located_command

    return decorate
