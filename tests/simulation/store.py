"""The store as one process sees it: every operation is a step of the schedule, and may go wrong as planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.errors import OutcomeUnknownError, StoreUnreachableError
from tests.simulation.scenario import CREATES, kind_of
from tests.support.stores import WrappedStore

if TYPE_CHECKING:
    from diloco.exchange.store import Data, Entry
    from diloco.exchange.stores import MemoryStore
    from tests.simulation.process import Process


class FaultyStore(WrappedStore):
    """One process's way to the run's objects."""

    def __init__(self, inner: MemoryStore, process: Process) -> None:
        super().__init__(inner)
        self.memory = inner
        self._process = process
        self._unreachable = 0

    async def _step(self, operation: str, key: str, data: Data | None = None) -> str | None:
        """Let others go first; returns what befalls a create."""
        process, simulation = self._process, self._process.simulation
        kind = kind_of(key)
        fault = simulation.due(process, operation, kind)
        task = simulation.current
        if task is not None:
            task.next = (operation, key)
        if fault is not None and fault.kind == "kill-late" and operation == "create" and data is not None:
            self._arrive_later(key, data, fault.seconds)
        if fault is not None and fault.kind not in CREATES:
            await simulation.inject(process, fault)
            if fault.kind == "unreachable":
                self._unreachable = fault.times
        scenario = simulation.scenario
        if scenario.latency and process.random.random() < scenario.latency:
            await simulation.sleep(0.3 * process.random.random())
        else:
            await simulation.switch()
        simulation.note(process, operation, key)
        if self._unreachable:
            self._unreachable -= 1
            raise StoreUnreachableError(f"{self.uri}/{key}: 503 Slow Down")
        if fault is None or fault.kind not in CREATES or data is None:
            return None
        simulation.note(process, fault.kind, key)
        if fault.kind == "late":
            self._arrive_later(key, data, fault.seconds)
        if fault.kind in ("late", "unsent"):
            raise OutcomeUnknownError(f"{self.uri}/{key}: no answer to a create")
        return fault.kind

    def _arrive_later(self, key: str, data: Data, seconds: float) -> None:
        simulation, body, process = self._process.simulation, bytes(data), self._process

        async def arrive() -> None:
            await simulation.sleep(seconds)
            if key not in self.memory._objects:
                simulation.note(process, "arrives", key)
                self.memory._objects[key] = body
                simulation.oracle.created_once(process, key, body, late=True)

        simulation.start(arrive(), f"{process} late {key}")

    async def _read(self, key: str, start: int, end: int | None) -> bytes:
        await self._step("read", key)
        self._process.simulation.oracle.reads(self._process, key)
        return await self.inner._read(key, start, end)

    async def _create(self, key: str, data: Data) -> bool:
        lost = await self._step("create", key, data)
        created = await self.inner._create(key, data)
        if created:
            simulation = self._process.simulation
            simulation.oracle.created_once(self._process, key, bytes(data))
            await simulation.took_effect(self._process, key)
        if lost == "lost":
            raise OutcomeUnknownError(f"{self.uri}/{key}: no answer to a create")
        return created and lost != "duplicate"

    async def _write(self, key: str, data: Data) -> None:
        await self._step("write", key)
        before = self.memory._objects.get(key)
        await self.inner._write(key, data)
        self._process.simulation.oracle.written(self._process, key, before, bytes(data))
        await self._process.simulation.took_effect(self._process, key)

    async def _list(self, prefix: str) -> list[Entry]:
        await self._step("list", prefix)
        task = self._process.simulation.current
        if kind_of(prefix) == "checkpoints" and task is not None and task.listed_while_ending is None:
            # The manifests by which it prunes; what it lists later is what it deletes.
            task.listed_while_ending = self._process.simulation.oracle.ending
        return await self.inner._list(prefix)

    async def _delete(self, key: str) -> None:
        await self._step("delete", key)
        if key in self.memory._objects:
            self._process.simulation.oracle.deleted(self._process, key)
        await self.inner._delete(key)
        await self._process.simulation.took_effect(self._process, key)
