"""What a backend must do to host replicas. An executor starts, watches and stops processes; it knows nothing of
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Status = Literal["pending", "running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True)
class ReplicaSpec:
    """One replica to launch: the entrypoint's contract as data (see :mod:`diloco.replica_entrypoint`)."""

    rank: int
    world_size: int
    rendezvous_uri: str
    """The run's own prefix: the user's parent plus the run id."""
    trainer_module: str
    trainer_fn: str
    trainer_kwargs: Mapping[str, Any]
    exchange: Mapping[str, Any]
    """`ExchangeSettings` as JSON values."""
    gpu: str | None = None
    """An accelerator's common name ("A10G"), mapped by each backend to a type of its own; None: the cheapest CPU
    one.
    """
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplicaHandle:
    """A launched replica, as its backend knows it."""

    rank: int
    backend: str
    job_id: str
    status: Status = "pending"
    exit_code: int | None = None
    log_location: str | None = None
    adopted: bool = False
    """Whether it was found running, started by an earlier launch, instead of being started."""
    waits: str | None = None
    """Why it does not run yet, as far as the backend knows."""

    @property
    def has_ended(self) -> bool:
        """Whether it neither runs nor will."""
        return self.status not in ("pending", "running")


@dataclass(frozen=True)
class ReplicaResult:
    """How a replica ended. `metrics` holds at least `preemptions`; the launcher adds `restarts`, how often it
    relaunched the rank.
    """

    rank: int
    status: Status
    exit_code: int | None
    metrics: Mapping[str, Any]
    error: str | None = None


@runtime_checkable
class ServerlessExecutor(Protocol):
    """A backend. Handles are values: `poll` returns new ones with the present status, in the order given."""

    @property
    def backend_name(self) -> str:
        """Short name: `local`, `sagemaker`, …"""

    @property
    def supports_inter_replica_network(self) -> bool:
        """Whether replicas could reach each other; the exchange never uses it."""

    def check(self, specs: Sequence[ReplicaSpec]) -> None:
        """Raise one ConfigurationError that lists all that the backend would refuse; asks and writes nothing."""

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> list[ReplicaHandle]:
        """Start all, or none: if one can't be started, those already started are stopped before the error is raised.

        Also called for a single rank whose process has ended: each call is a new submission.
        """

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaHandle]:
        """The same handles with their present status; never blocks for long."""

    def stream_logs(self, handle: ReplicaHandle, *, follow: bool = False) -> Iterator[str]:
        """Lines of one replica's log so far; with `follow`, until it ends."""

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Stop them and return once nothing of them is left; ended ones are ignored."""

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        """Wait for all to end (TimeoutError after `timeout` seconds), in rank order."""
