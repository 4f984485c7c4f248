"""Copies beside the training's stream, with fakes that do a stream's work only when someone waits for it: whoever does
not wait reads what was there before.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.exchange import layout
from diloco.exchange.records import Commit
from diloco.exchange.stores import MemoryStore
from diloco.transfer import HostCopies
from tests.support.replicas import FAST, all_well, run_replicas
from tests.unit.test_manager import train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diloco.manager import ObjectStoreManager


@dataclass
class FakeStream:
    """Work that is done when an event behind it is waited for."""

    queue: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, len(self.queue))

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(event.synchronize)


@dataclass
class FakeEvent:
    stream: FakeStream
    at: int

    def synchronize(self) -> None:
        while self.stream.done < self.at:
            work = self.stream.queue[self.stream.done]
            self.stream.done += 1
            work()


class _Queueing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies that need not block go to the stream."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (len(args) > 2 and args[2]):
            self._stream.queue.append(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))


class FakeStreams:
    """An accelerator in whose memory all tensors are that are not pinned."""

    def __init__(self) -> None:
        self.main, self.beside = FakeStream(), FakeStream()
        self.pins: list[torch.Tensor] = []
        self.users: set[int] = set()

    def current(self) -> FakeStream:
        return self.main

    def side(self) -> FakeStream:
        return self.beside

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        self.users.add(threading.get_ident())
        with _Queueing(stream):
            yield

    def holds(self, tensor: torch.Tensor) -> bool:
        return not any(tensor is pinned for pinned in self.pins)

    def pinned(self, shape: torch.Size) -> torch.Tensor:
        self.pins.append(torch.full(shape, float("nan")))
        return self.pins[-1]


def test_the_training_thread_waits_for_nothing_and_the_background_for_all_of_it() -> None:
    streams = FakeStreams()
    gradients = [torch.zeros(3), torch.zeros(2, 2)]
    streams.main.queue += [lambda: gradients[0].fill_(1.0), lambda: gradients[1].fill_(2.0)]

    copy = HostCopies(streams).begin(0, gradients)

    assert streams.main.done == 0, "the training thread has not waited"
    copy.wait()
    assert [set(tensor.flatten().tolist()) for tensor in copy.tensors] == [{1.0}, {2.0}]
    for tensor in copy.tensors:
        tensor.fill_(7.0)
    copy.put_back()
    assert [set(tensor.flatten().tolist()) for tensor in gradients] == [{7.0}, {7.0}]


def test_work_that_is_queued_later_is_not_waited_for() -> None:
    streams = FakeStreams()
    gradient = torch.zeros(3)
    copy = HostCopies(streams).begin(0, [gradient])
    streams.main.queue.append(lambda: gradient.fill_(9.0))  # the next inner step
    copy.wait()
    assert copy.tensors[0].tolist() == [0.0, 0.0, 0.0]
    assert streams.main.done == 0


def test_pinned_memory_is_kept_for_a_fragments_next_round() -> None:
    streams = FakeStreams()
    copies = HostCopies(streams)
    first, other, second = (copies.begin(fragment, [torch.zeros(3)]) for fragment in (0, 1, 0))
    assert first.tensors[0] is second.tensors[0]
    assert other.tensors[0] is not first.tensors[0]
    assert len(streams.pins) == 2


def test_the_cpus_own_tensors_are_used_in_place_and_others_copied() -> None:
    whole, strided = torch.arange(4.0), torch.arange(8.0)[::2]
    copy = HostCopies().begin(0, [whole, strided])
    copy.wait()
    assert copy.tensors[0] is whole
    assert copy.tensors[1].is_contiguous()
    assert copy.tensors[1].tolist() == [0.0, 2.0, 4.0, 6.0]
    copy.tensors[1].fill_(5.0)
    copy.put_back()
    assert strided.tolist() == [5.0, 5.0, 5.0, 5.0]


def test_a_replica_with_streams_holds_the_same_bits_as_one_without() -> None:
    streams, uri = FakeStreams(), "memory://transfer"

    def trainer(manager: ObjectStoreManager, rank: int) -> str:
        if rank == 0:
            manager._copies = HostCopies(streams)
        return train(manager, rank)[0]

    try:
        digests = all_well(run_replicas(uri, 2, trainer, settings=FAST))
        commits = [
            Commit.from_json(body, key)
            for key, body in MemoryStore(uri)._objects.items()
            if key.startswith(layout.COMMITS)
        ]
    finally:
        MemoryStore.forget(uri)
    assert digests[0] == digests[1]
    assert streams.pins
    assert len(streams.users) > 1, "means come back in a thread of the background"
    # What is read too early is NaN, and would have been abstained from.
    assert commits
    assert all(len(commit.participants) == 2 for commit in commits)
