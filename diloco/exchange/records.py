"""The JSON objects of a run. All are frozen, reject unknown fields, and carry a format number so that a newer release
can refuse them by name.

Every create-once record has a nonce, drawn in the process that writes it: a client may repeat a PUT whose answer was
lost and be told that the object exists, and only the nonce tells its own object from another's.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.errors import CorruptObjectError
from diloco.exchange.layout import Member


def new_nonce() -> str:
    """128 random bits, hex."""
    return secrets.token_hex(16)


class Record(BaseModel):
    """Base of every JSON object of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1

    def to_json(self) -> bytes:
        """Canonical enough to read in a bucket's console: indented UTF-8."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, key: str) -> Self:
        """Parse, or raise :class:`CorruptObjectError` that names the key and the first problem."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise CorruptObjectError(f"{key} is not a valid {cls.__name__}: {where}: {first['msg']}") from None


class OnceRecord(Record):
    """A record that is created if absent and never changed."""

    nonce: str = Field(default_factory=new_nonce)


class RunRecord(OnceRecord):
    """`run.json`: what every replica of a run must agree on. Compared field by field by whoever loses the create."""

    run_id: str
    world_size: int
    rounds: int
    fragments: int
    sync_every: int
    codec: str
    reduce: Literal["gather", "shard"] = "gather"
    """gather: everyone averages all payloads. shard: everyone averages a shard of them, and reads the rest."""
    shards: int = Field(default=1, ge=1)
    """Into how many shards a payload is divided; 1 for gather."""
    mean_codec: str = "fp32"
    """Wire format of a shard's mean."""
    policy: Literal["strict", "skip"]
    min_replicas: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    chunk_bytes: int
    parameters: dict[str, str]
    """`<fragment>/<name>` → `float32[384, 128]` of every trained parameter."""
    constants: dict[str, str]
    """Name → digest of every frozen parameter and persistent buffer: not exchanged, so equal from the start."""


class LauncherRecord(OnceRecord):
    """`launcher/{n}.json`: who supervises. Its nonce reaches the replicas, which write it into their claims."""

    number: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"launcher {self.number} (process {self.pid} on {self.host})"


class LauncherBeat(Record):
    """`beats/launcher/{n}.json`, overwritten: the launcher still supervises, as long as `counter` changes."""

    number: int
    counter: int
    ended: bool = False
    """Whether it has ended and left nothing behind: the next one need not wait."""


class Claim(OnceRecord):
    """`members/{rank}/{attempt}.json`."""

    rank: int
    attempt: int
    host: str
    pid: int
    launcher: str | None = None


class Beat(Record):
    """`beats/{rank}/{attempt}.json`, overwritten: what a member is doing. Observers look for changes of `counter`,
    never at a clock.
    """

    rank: int
    attempt: int
    counter: int
    phase: Literal["starting", "training", "waiting", "finishing", "finished", "failed"]
    step: int = 0
    round: int = 0
    loss: float | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    waiting_for: list[str] = Field(default_factory=list)
    """Whom or what it waits for, in words: `rank 2`, `min_replicas: 1 of 2`."""
    seconds_waiting: float = 0.0
    digest: str | None = None
    """Digest of the fragment that was applied last."""
    digest_round: int | None = None


class Payload(Record):
    """What a header says of its payload object."""

    codec: str
    numel: int
    """Elements of the coalesced pseudo-gradient."""
    size: int
    """Bytes of the whole object, framing included."""
    data_offset: int
    """Where the tensor's bytes begin in the object."""
    chunk_bytes: int
    chunks: list[str]
    """BLAKE3 of each chunk of the tensor's bytes."""
    layout: str
    """Digest of the fragment's (name, shape, dtype): a payload of another layout is refused."""


class Header(OnceRecord):
    """`rounds/{r}/h/{rank}-{attempt}.json`, written after the payload."""

    kind: Literal["contribution", "abstention", "vote"]
    round: int
    fragment: int
    rank: int
    attempt: int
    weight: int
    """Tokens (else inner steps) since this fragment was last reset; 0 for an abstention or a vote."""
    base_digest: str
    """Digest of the fragment that this replica started from; of the whole state for a vote."""
    reason: str | None = None
    payload: Payload | None = None

    @property
    def member(self) -> Member:
        """Who wrote it."""
        return Member(self.rank, self.attempt)


class Participant(Record):
    """One contribution that a commit names."""

    rank: int
    attempt: int
    weight: int
    payload: Payload

    @property
    def member(self) -> Member:
        """Whose contribution it is."""
        return Member(self.rank, self.attempt)


class LeftOut(Record):
    """A rank that a commit does not average, and why."""

    rank: int
    attempt: int | None
    reason: str


class Commit(OnceRecord):
    """`commits/{r}.json`: exactly which contributions are averaged. Never deleted."""

    round: int
    fragment: int
    base_digest: str
    algorithm: Literal["gather", "shard"]
    participants: list[Participant]
    """By rank; empty when all abstained."""
    left_out: list[LeftOut]
    committed_by: int
    committed_by_attempt: int
    reason: str


class CheckpointPart(Record):
    """One fragment inside a manifest."""

    fragment: int
    key: str
    size: int
    digest: str
    """Digest of the fragment's state, as commits carry it."""
    last_round: int
    """The last round that was applied to it; -1 for none."""


class Manifest(OnceRecord):
    """`checkpoints/{c}/manifest.json`: the state before round c. A checkpoint is what its manifest names."""

    round: int
    rank: int
    attempt: int
    parts: list[CheckpointPart]


class Evaluation(OnceRecord):
    """`evaluations/{r}.json`: held-out loss (nats per token) of the global parameters before round r."""

    round: int
    loss: float | None
    """None if it was NaN or infinite."""
    rank: int
    attempt: int


class Vote(Record):
    """One vote that a result rests on."""

    rank: int
    attempt: int


class RunResult(OnceRecord):
    """`final/result.json`: the end of the run."""

    digest: str
    """Digest of the whole final state, that the votes agree on."""
    rounds: int
    votes: list[Vote]
    rank: int
    attempt: int
    model_uri: str | None


class ReplicaReport(Record):
    """`results/{rank}-{attempt}.json`: what a replica reports at its end."""

    rank: int
    attempt: int
    steps: int
    tokens: int
    tokens_per_second: float | None
    final_train_loss: float | None
    seconds_training: float
    seconds_waiting: float
    bytes_up: int
    bytes_down: int
    requests: int
    digest: str | None
    rounds_applied: int
    trainer: dict[str, Any] = Field(default_factory=dict)
    """What the trainer returned, as far as JSON can hold it."""


class ErrorReport(Record):
    """`errors/{rank}-{attempt}.json`: why a process gave up."""

    rank: int
    attempt: int
    exit_code: int
    error: str
    """One line."""
    step: int = 0
    round: int = 0
