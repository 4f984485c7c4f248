"""Between an accelerator and the exchange: pseudo-gradients go to pinned memory, and means come back, on a stream
beside the training's.

The training thread waits for nothing: it notes how far its stream has come, and queues copies behind that. The
background thread waits until they are done. It has run on no GPU yet; the tests' streams are fakes that keep the order.
Semantics of streams and events: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class Event(Protocol):
    """A point of a stream's work."""

    def synchronize(self) -> None:
        """Block until the stream has come so far."""


class Stream(Protocol):
    """Work of an accelerator in order."""

    def record_event(self) -> Any:
        """Mark what is queued so far: an :class:`Event`."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on begin only after the event."""


class Streams(Protocol):
    """What is needed of an accelerator."""

    def current(self) -> Stream:
        """The stream that this thread's work is queued to."""

    def side(self) -> Stream:
        """Another one, always the same."""

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Queue this thread's work to that stream."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the accelerator's memory."""

    def pinned(self, shape: torch.Size) -> torch.Tensor:
        """New fp32 memory of the host that copies can go to by themselves."""


class AcceleratorStreams:
    """Those of this process's accelerator, by :mod:`torch.accelerator`."""

    def __init__(self) -> None:
        self._side = torch.Stream(torch.accelerator.current_accelerator())

    def current(self) -> Stream:
        """As the protocol says."""
        return torch.accelerator.current_stream()

    def side(self) -> Stream:
        """As the protocol says."""
        return self._side

    def using(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """As the protocol says."""
        return stream

    def holds(self, tensor: torch.Tensor) -> bool:
        """As the protocol says."""
        return tensor.device.type != "cpu"

    def pinned(self, shape: torch.Size) -> torch.Tensor:
        """As the protocol says."""
        return torch.empty(shape, dtype=torch.float32, pin_memory=True)


class HostCopy:
    """One round's tensors on the host, for the background thread."""

    def __init__(self, streams: Streams | None, tensors: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
        self._streams = streams
        self._copied = [(there, here) for there, here in zip(tensors, host, strict=True) if there is not here]
        self.tensors = list(host)
        """fp32, contiguous, on the CPU: the pseudo-gradients once :meth:`wait` has returned."""
        self._done: Event | None = None
        if streams is None:
            return
        # CPU tensors count too: torchft copies parameters to pinned memory without waiting for it.
        streams.side().wait_event(streams.current().record_event())
        self._copy(back=False)

    def wait(self) -> None:
        """Block until the pseudo-gradients are in :attr:`tensors`."""
        if self._done is not None:
            self._done.synchronize()
        else:
            self._copy(back=False)

    def put_back(self) -> None:
        """Copy :attr:`tensors`, now the mean, to where the pseudo-gradients came from, and block until it is there."""
        self._copy(back=True)
        if self._done is not None:
            self._done.synchronize()

    def _copy(self, *, back: bool) -> None:
        streams = self._streams
        with nullcontext() if streams is None else streams.using(streams.side()):
            for there, here in self._copied:
                (there if back else here).copy_(here if back else there, non_blocking=streams is not None)
        if streams is not None:
            self._done = streams.side().record_event()


class HostCopies:
    """Makes them, with each fragment's pinned memory kept for its next round: that of one round of it at a time."""

    def __init__(self, streams: Streams | None = None) -> None:
        if streams is None and torch.accelerator.is_available():
            streams = AcceleratorStreams()
        self._streams = streams
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, fragment: int, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Begin to copy a fragment's tensors (fp32, any device, behind what this thread has queued); returns at once.

        What the CPU holds in one piece is its own copy: the mean will be written straight into it.
        """
        host = [self._host(fragment, place, tensor) for place, tensor in enumerate(tensors)]
        return HostCopy(self._streams, tensors, host)

    def _host(self, fragment: int, place: int, tensor: torch.Tensor) -> torch.Tensor:
        foreign = self._streams is not None and self._streams.holds(tensor)
        if not foreign and tensor.is_contiguous():
            return tensor
        kept = self._kept.get((fragment, place))
        if kept is None:
            pin = self._streams.pinned if self._streams is not None else torch.empty
            kept = self._kept[fragment, place] = pin(tensor.shape)
        return kept
