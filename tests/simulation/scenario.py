"""What a simulated run looks like and what goes wrong in it: a function of the seed.

A :class:`Fault` strikes once. Those of :data:`AT_OPERATION` strike at a store operation of a rank's process (the
`nth` of that kind, counted over all attempts of the rank), the others in a round of a rank.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from diloco.exchange import layout

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {"a": (3,), "b": (2, 2)}
"""A fragment's parameters."""
VALUES = 7
CHUNK_BYTES = 8
"""Two values: four chunks."""

AT_OPERATION = (
    "kill",  # the process dies before the operation
    "kill-late",  # it dies, and what it had sent arrives seconds later
    "kill-all",  # all processes die
    "zombie",  # the next attempt of its rank is started while it lives
    "twin",  # the same, and the next operation of both is their first claim
    "pause",  # SIGSTOP for some seconds: its clock goes on, it does not
    "lost",  # a create is applied, its answer is lost
    "unsent",  # a create gets lost, and no answer comes
    "late",  # a create gets no answer, and is applied seconds later
    "duplicate",  # a create is applied, and the client's own retry is told that the object exists
    "unreachable",  # the store answers 503, several times in a row
    "delay",  # the operation takes some seconds
)
IN_ROUND = (
    "diverge",  # a bit flips while a mean is applied
    "flip",  # a bit flips just after the digest was taken
    "nan",  # the pseudo-gradient holds NaN
    "corrupt",  # a bit of the stored payload flips as it is written
    "rot",  # a bit of the stored payload flips once the round is committed
    "rot-mean",  # a bit of a stored mean flips as it is published
    "wrong-mean",  # a bit of a shard's mean flips as it is averaged
    "slow",  # the inner steps take some seconds longer
    "again",  # the caller exchanges the same round twice
)
CREATES = ("lost", "unsent", "late", "duplicate")

POINTS = (
    *(("create", kind) for kind in ("claim", "run", "manifest", "payload", "header", "commit", "mean", "result")),
    ("write", "part"),
    ("read", "payload"),
    ("read", "part"),
    ("read", "commit"),
    ("read", "mean"),
    ("list", "means"),
    ("list", "headers"),
    ("list", "claims"),
    ("delete", "payload"),
)
"""Named points of a replica's life, beside `any` operation."""


@lru_cache(maxsize=4096)
def kind_of(key: str) -> str:
    """What an object is, from its key."""
    head, _, rest = key.partition("/")
    if head == "rounds":
        part, listed = rest[9:10], rest.endswith("/")
        return {
            "p": "payloads" if listed else "payload",
            "h": "headers" if listed else "header",
            "m": "means" if listed else "mean",
            "": "rounds",
        }[part]
    if head == "checkpoints":
        return "manifest" if rest.endswith("manifest.json") else "part" if rest else "checkpoints"
    if head == "members":
        return "claim" if rest.endswith(".json") else "claims"
    return {
        "commits": "commit",
        "beats": "beat",
        "final": "result",
        layout.RUN: "run",
        "replicas": "inner",
        "results": "report",
        "errors": "error",
    }.get(head, head)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    rank: int
    operation: str = "any"
    object: str = "any"
    nth: int = 0
    round: int = -1
    seconds: float = 0.0
    times: int = 1

    def __str__(self) -> str:
        where = f"round {self.round}" if self.kind in IN_ROUND else f"{self.operation} {self.object} {self.nth}"
        length = (f", {self.seconds:.1f} s" if self.seconds else "") + (f", {self.times}×" if self.times > 1 else "")
        return f"{self.kind} of rank {self.rank} at {where}{length}"


@dataclass(frozen=True)
class Scenario:
    """One run. `seed` decides what its fields leave open: who goes on, how long training takes, who is how late."""

    seed: int
    policy: Literal["strict", "skip"] = "skip"
    reduce: Literal["gather", "shard"] = "gather"
    world_size: int = 3
    rounds: int = 3
    fragments: int = 1
    min_replicas: int = 2
    checkpoint_every: int = 1
    grace: float | None = 2.0
    timeout: float = 120.0
    training: float = 1.0
    """Most seconds of inner steps in a round."""
    latency: float = 0.0
    """Chance that an operation takes up to 0.3 s instead of no time."""
    sticky: float = 0.0
    """Chance that a task which can go on does so without a look at the others."""
    late_digests: bool = True
    beats: bool = True
    inner: bool = False
    """Whether replicas save their inner state."""
    joins: float | None = None
    """When a replica beyond the world size joins."""
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        joiner = " and a joiner" if self.joins is not None else ""
        shape = (
            f"{self.policy}, {self.reduce}, {self.world_size} replicas{joiner}, "
            f"min_replicas {self.min_replicas}, {self.rounds} rounds, {self.fragments} fragment(s), "
            f"a checkpoint every {self.checkpoint_every}"
        )
        return f"seed {self.seed}: {shape}; {'; '.join(map(str, self.faults)) or 'no fault'}"

    def has(self, *kinds: str) -> bool:
        """Whether one of these faults is planned."""
        return any(fault.kind in kinds for fault in self.faults)

    @property
    def ranks(self) -> list[int]:
        """All ranks that take part."""
        return list(range(self.world_size + (self.joins is not None)))

    @property
    def may_end(self) -> bool:
        """Whether a fault may end a `strict` run for good."""
        return self.policy == "strict" and self.has("nan", "diverge", "flip", "corrupt")

    @property
    def may_time_out(self) -> bool:
        """Whether a wait may reach its time-out; the relaunched go on."""
        alone = self.has("diverge", "flip", "corrupt") and self.min_replicas == self.world_size
        return self.timeout < 60 or alone or self.may_end


@dataclass
class Dice:
    """Draws faults for a shape of run."""

    chance: random.Random
    ranks: int
    rounds: int
    kinds: tuple[str, ...] = field(default=AT_OPERATION + IN_ROUND)

    def fault(self, kind: str) -> Fault:
        """A fault of that kind, anywhere."""
        draw, rank = self.chance, self.chance.randrange(self.ranks)
        seconds = draw.choice((0.3, 3.0, 8.0, 20.0)) * (0.5 + draw.random())
        if kind in IN_ROUND:
            return Fault(kind, rank, round=draw.randrange(self.rounds), seconds=seconds if kind == "slow" else 0.0)
        times = draw.choice((1, 3, 12, 40)) if kind == "unreachable" else 1
        if kind == "twin":
            return Fault(kind, rank, "create", "claim", 0)
        if kind in CREATES:
            points = [point for point in POINTS if point[0] == "create"]
            operation, object_ = draw.choice(points)
            return Fault(kind, rank, operation, object_, draw.randrange(3), seconds=seconds)
        operation, object_, nth = "any", "any", draw.randrange(30 + 25 * self.rounds)
        if draw.random() < 0.5:
            (operation, object_), nth = draw.choice(POINTS), draw.randrange(self.rounds + 1)
        return Fault(kind, rank, operation, object_, nth, seconds=seconds, times=times)


def scenario(seed: int) -> Scenario:
    """The mix that CI searches: shapes and faults by chance, none that the protocol does not promise to survive."""
    draw = random.Random(seed)
    policy: Literal["strict", "skip"] = draw.choice(("strict", "skip", "skip"))
    world_size = draw.choice((2, 2, 3))
    fragments = draw.choice((1, 1, 2))
    rounds = draw.choice((2, 2, 3, 4)) if draw.random() < 0.9 else 6
    min_replicas = world_size // 2 + 1
    alone = policy == "skip" and world_size == 2 and draw.random() < 0.4
    kinds: tuple[str, ...] = AT_OPERATION + IN_ROUND
    if alone:
        # One replica may commit by itself: nothing protects it from a wrong one.
        min_replicas, kinds = 1, tuple(kind for kind in kinds if kind not in ("diverge", "flip"))
    dice = Dice(draw, world_size, rounds, kinds)
    faults = [dice.fault(draw.choice(kinds)) for _ in range(draw.choice((0, 1, 1, 2, 2, 3)))]
    wrong = [fault for fault in faults if fault.kind in ("diverge", "flip")]
    faults = [fault for fault in faults if fault not in wrong[1:]]
    return Scenario(
        seed,
        policy=policy,
        world_size=world_size,
        rounds=rounds,
        fragments=fragments,
        min_replicas=min_replicas,
        checkpoint_every=draw.choice((1, 1, 2, 3)),
        grace=draw.choice((0.5, 2.0, None)),
        timeout=15.0 if draw.random() < 0.1 else 120.0,
        training=draw.choice((0.0, 0.2, 2.0)),
        latency=draw.choice((0.0, 0.1, 0.5)),
        sticky=draw.choice((0.0, 0.5, 0.9)),
        late_digests=draw.random() < 0.5,
        inner=draw.random() < 0.2,
        joins=draw.uniform(0, 4) if policy == "skip" and draw.random() < 0.15 else None,
        faults=tuple(faults),
        reduce=draw.choice(("gather", "gather", "shard")),
    )


SPECIAL: dict[str, Callable[[int], Scenario]] = {"mix": scenario}
"""Scenarios by name; mutants need some that are rare in the mix."""


def special(make: Callable[[int], Scenario]) -> Callable[[int], Scenario]:
    """Register a scenario under its function's name."""
    SPECIAL[make.__name__] = make
    return make


@special
def storm(seed: int) -> Scenario:
    """Longer runs of more replicas with many faults."""
    draw = random.Random(seed)
    world_size, rounds = draw.choice((3, 4, 5)), draw.choice((5, 6, 8))
    policy: Literal["strict", "skip"] = draw.choice(("strict", "skip", "skip", "skip"))
    kinds = tuple(kind for kind in AT_OPERATION + IN_ROUND if kind not in ("rot", "corrupt", "flip", "diverge", "nan"))
    dice = Dice(draw, world_size, rounds, kinds)
    faults = [dice.fault(draw.choice(kinds)) for _ in range(draw.randrange(3, 9))]
    if policy == "skip" and draw.random() < 0.7:
        kind = draw.choice(("diverge", "diverge", "flip"))
        faults.append(Fault(kind, draw.randrange(world_size), round=draw.randrange(rounds)))
    return Scenario(
        seed,
        policy=policy,
        world_size=world_size,
        rounds=rounds,
        fragments=draw.choice((1, 2, 3)),
        min_replicas=world_size // 2 + 1,
        checkpoint_every=draw.choice((1, 1, 2, 3)),
        grace=draw.choice((0.5, 2.0, None)),
        training=draw.choice((0.2, 2.0)),
        latency=draw.choice((0.0, 0.3)),
        sticky=draw.choice((0.0, 0.7)),
        inner=draw.random() < 0.5,
        joins=draw.uniform(0, 9) if policy == "skip" and draw.random() < 0.3 else None,
        faults=tuple(faults),
        reduce=draw.choice(("gather", "gather", "shard")),
    )


@special
def tie(seed: int) -> Scenario:
    """One of three replicas diverges while the third is late beyond the grace period: nothing may be decided 1:1."""
    faults = (Fault("diverge", seed % 2, round=0), Fault("slow", 2, round=1, seconds=8.0))
    return Scenario(seed, min_replicas=1, grace=2.0, rounds=3, training=0.2, checkpoint_every=2, faults=faults)


@special
def not_a_number(seed: int) -> Scenario:
    """All pseudo-gradients of a round hold NaN."""
    size = 2 + seed % 2
    faults = tuple(Fault("nan", rank, round=seed % 3) for rank in range(size))
    return Scenario(seed, world_size=size, min_replicas=2, faults=faults, training=0.2)


@special
def overtaken(seed: int) -> Scenario:
    """A replica stops just before it reads what is committed, while the others go on and prune."""
    draw = random.Random(seed)
    point = draw.choice((("read", "payload"), ("read", "part"), ("read", "commit")))
    faults = [Fault("pause", draw.randrange(3), *point, nth=draw.randrange(4), seconds=60.0)]
    if draw.random() < 0.5:
        faults.append(Fault("kill", faults[0].rank, nth=draw.randrange(60)))
    return Scenario(seed, rounds=7, grace=1.0, training=0.3, faults=tuple(faults))


@special
def impatient(seed: int) -> Scenario:
    """A replica is away for longer than the others' time-out."""
    draw = random.Random(seed)
    policy: Literal["strict", "skip"] = draw.choice(("strict", "skip"))
    faults = (Fault("pause", draw.randrange(2), nth=draw.randrange(60), seconds=25.0),)
    return Scenario(seed, policy=policy, world_size=2, timeout=12.0, training=0.5, faults=faults)


@special
def wrong_writer(seed: int) -> Scenario:
    """A replica diverges in a round after which a checkpoint is due, and another one dies and has to load one."""
    draw = random.Random(seed)
    wrong = draw.randrange(3)
    other = (wrong + draw.choice((1, 2))) % 3
    faults = (
        Fault("diverge", wrong, round=draw.randrange(4)),
        Fault("kill", other, nth=40 + draw.randrange(80)),
    )
    return Scenario(seed, rounds=5, training=0.3, fragments=draw.choice((1, 2)), faults=faults)


@special
def wrong_end(seed: int) -> Scenario:
    """A replica diverges in the last round, and the one that is to write the result stops just before."""
    wrong = seed % 3
    faults = (
        Fault("diverge", wrong, round=2),
        Fault("pause", int(wrong == 0), "create", "result", seconds=20.0),
    )
    return Scenario(seed, rounds=3, training=0.2, faults=faults)


@special
def lone_starter(seed: int) -> Scenario:
    """One replica starts long before the others, which are then no longer waited for."""
    faults = tuple(Fault("pause", rank, seconds=30.0) for rank in range(3) if rank != seed % 3)
    return Scenario(seed, rounds=2, faults=faults)


@special
def sharded(seed: int) -> Scenario:
    """The mix, all by sharded reduction, with something wrong about a payload or a mean."""
    draw = random.Random(seed)
    kind = draw.choice(("corrupt", "rot", "rot-mean", "rot-mean"))
    faults = (Fault(kind, draw.randrange(3), round=draw.randrange(2)), *scenario(seed).faults[:1])
    return replace(scenario(seed), reduce="shard", world_size=3, min_replicas=2, policy="skip", faults=faults)


@special
def two_owners(seed: int) -> Scenario:
    """An owner stops just before it publishes; whoever averages its shard meanwhile has a bit wrong, and had one in
    its own.
    """
    wrong = tuple(Fault("wrong-mean", rank, round=0) for rank in (0, 0, 1, 1))
    stops = Fault("pause", 2, "create", "mean", seconds=40.0)
    return Scenario(seed, reduce="shard", policy="strict", training=0.2, faults=(stops, *wrong))


@special
def slow_writer(seed: int) -> Scenario:
    """A checkpoint is still being written when the last round is over, and the votes are late."""
    faults = (
        Fault("delay", 1, "list", "checkpoints", nth=2, seconds=2.0),
        *(Fault("delay", rank, "create", "header", nth=5, seconds=6.0) for rank in range(3)),
    )
    return Scenario(seed, rounds=5, training=0.1, faults=faults)
