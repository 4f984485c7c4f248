"""What a run is: the launcher's settings, checked as a whole, and `spec.json`, which keeps a resumed run the same."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.errors import ConfigurationError, RunMismatchError
from diloco.exchange import layout
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import create_once, read_if_there
from diloco.executors.base import ReplicaSpec
from diloco.spec_record import SCHEDULE, SpecRecord

if TYPE_CHECKING:
    from diloco.exchange.store import Store

DEFAULT_TRAINER = ("diloco.training", "diloco_train")

LAUNCHER_VARIABLE = "DILOCO_LAUNCHER"
"""Tells a replica the nonce of its launcher, for its claim."""

_RESERVED = {name: f"use --{name.replace('_', '-')}" for name in SCHEDULE}
_RESERVED |= dict.fromkeys(("manager", "rank", "world_size"), "every trainer gets it anyway")
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # without those that are mistaken for others


def new_run_id() -> str:
    """Return a fresh run id that sorts by time: `20261130-1412-k3f9` (UTC)."""
    suffix = "".join(secrets.choice(_LETTERS) for _ in range(4))
    return f"{datetime.now(UTC):%Y%m%d-%H%M}-{suffix}"


class RunSettings(BaseModel):
    """All that a launcher decides about a run. Steps are inner steps; `rendezvous` and `output` are parents of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    replicas: int
    steps: int
    sync_every: int
    fragments: int = 1
    sync_delay: int = 0
    seed: int = 0
    run_id: str = Field(default_factory=new_run_id)
    rendezvous: str
    output: str | None = None
    trainer_module: str = DEFAULT_TRAINER[0]
    trainer_fn: str = DEFAULT_TRAINER[1]
    trainer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """The trainer's own arguments, beside those of :data:`SCHEDULE`."""
    exchange: ExchangeSettings = Field(default_factory=ExchangeSettings)
    max_restarts: int = 3
    """How often one launch relaunches each rank; 0: never."""

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Build from values of any kind; one :class:`ConfigurationError` lists all that can't work."""
        try:
            settings = cls.model_validate(values)
        except ValidationError as problem:
            raise ConfigurationError(_one_line([_explain(error) for error in problem.errors()])) from None
        settings.check()
        return settings

    def check(self) -> None:
        """Raise one :class:`ConfigurationError` that lists every setting that can't work, each with values that do."""
        problems = [*self._schedule_problems(), *self._other_problems()]
        if problems:
            raise ConfigurationError(_one_line(problems))

    @property
    def policy(self) -> Literal["strict", "skip"]:
        """What a round does about a straggler."""
        return self.exchange.policy

    @property
    def min_replicas(self) -> int:
        """Replicas that a round needs under `skip`."""
        return self.exchange.majority(self.replicas)

    @property
    def rounds(self) -> int:
        """Rounds of the whole run: one a fragment every `sync_every` steps."""
        return self.steps // self.sync_every * self.fragments

    @property
    def uri(self) -> str:
        """The run's own prefix, the replicas' RENDEZVOUS_URI."""
        return f"{self.rendezvous.rstrip('/')}/{self.run_id}"

    @property
    def output_uri(self) -> str | None:
        """Where the trained model goes, if not under the run's prefix."""
        return None if self.output is None else f"{self.output.rstrip('/')}/{self.run_id}"

    @property
    def default_trainer(self) -> bool:
        """Whether the project's own trainer is used."""
        return (self.trainer_module, self.trainer_fn) == DEFAULT_TRAINER

    def replica_specs(self, launcher: str | None = None) -> list[ReplicaSpec]:
        """Return what to launch: one specification a rank. `launcher` is the launcher's nonce."""
        exchange = self.exchange.model_copy(update={"output_uri": self.output_uri})
        return [
            ReplicaSpec(
                rank=rank,
                world_size=self.replicas,
                rendezvous_uri=self.uri,
                trainer_module=self.trainer_module,
                trainer_fn=self.trainer_fn,
                trainer_kwargs={**{name: getattr(self, name) for name in SCHEDULE}, **self.trainer_kwargs},
                exchange=exchange.model_dump(mode="json"),
                env={} if launcher is None else {LAUNCHER_VARIABLE: launcher},
            )
            for rank in range(self.replicas)
        ]

    def _schedule_problems(self) -> list[str]:
        least = {
            "replicas": 1,
            "steps": 1,
            "sync_every": 1,
            "fragments": 1,
            "sync_delay": 0,
            "seed": 0,
            "max_restarts": 0,
        }
        problems = [
            f"--{name.replace('_', '-')} {getattr(self, name)} is below {low}: use at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if problems:
            return problems
        if self.sync_every > self.steps:
            problems.append(
                f"--sync-every {self.sync_every} is above --steps {self.steps}, so nothing would be exchanged:"
                f" use --sync-every {self.steps} or less"
            )
        elif self.steps % self.sync_every:
            near = _multiples_near(self.steps, self.sync_every)
            problems.append(
                f"--steps {self.steps} is not a multiple of --sync-every {self.sync_every}: use --steps {near}"
            )
        if self.sync_every % self.fragments:
            near = _multiples_near(self.sync_every, self.fragments)
            problems.append(
                f"--sync-every {self.sync_every} is not a multiple of --fragments {self.fragments}:"
                f" use --sync-every {near}"
            )
        elif self.sync_delay >= self.sync_every // self.fragments:
            most = self.sync_every // self.fragments - 1
            problems.append(
                f"--sync-delay {self.sync_delay} is not below sync-every / fragments = {most + 1}:"
                f" use --sync-delay {most} or less"
            )
        return problems

    def _other_problems(self) -> list[str]:
        problems = []
        least = self.exchange.min_replicas
        if least is not None and least > self.replicas >= 1:
            problems.append(
                f"--min-replicas {least} is above --replicas {self.replicas}:"
                f" use --min-replicas {self.replicas} or less"
            )
        if least is not None and self.policy == "strict":
            problems.append(f"--min-replicas {least} goes with --policy skip: strict needs all replicas")
        if not layout.RUN_ID.fullmatch(self.run_id):
            problems.append(
                f"--run-id {self.run_id!r}: use 1 to 40 lower-case letters, digits and hyphens, no hyphen first or last"
            )
        problems.extend(
            f"trainer argument {name!r} is reserved: {fix}, not --trainer-kwargs-json"
            for name, fix in _RESERVED.items()
            if name in self.trainer_kwargs
        )
        try:
            json.dumps(self.trainer_kwargs, allow_nan=False)
        except (TypeError, ValueError) as problem:
            problems.append(f"trainer arguments must be JSON values: {problem}")
        return problems


def spec_record(settings: RunSettings) -> SpecRecord:
    """Return the settings that may not change: all but where logs and the model go, and the waiting times."""
    same = settings.model_dump(mode="json", include=set(SpecRecord.model_fields))
    return SpecRecord(
        **same,
        policy=settings.policy,
        min_replicas=settings.min_replicas,
        codec=settings.exchange.codec,
        reduce=settings.exchange.reduce,
        mean_codec=settings.exchange.mean_codec,
    )


async def claim_spec(store: Store, settings: RunSettings) -> None:
    """Create `spec.json`, or compare with the one that is there: RunMismatchError names the first difference.

    One of a run that no replica has begun is replaced.
    """
    mine = spec_record(settings)
    created, stored = await create_once(store, layout.SPEC, mine)
    if created:
        return
    difference = mine.first_difference(SpecRecord.from_json(stored, layout.SPEC))
    if difference is not None and await read_if_there(store, layout.RUN) is None:
        # No replica ever got as far as to agree on the run: a first attempt with a mistake in it is no run to protect.
        await store.write(layout.SPEC, mine.to_json())
        return
    if difference is not None:
        name, theirs, now = difference
        raise RunMismatchError(
            f"run {settings.run_id} was started with {name} {_shown(theirs)}, not {_shown(now)}:"
            " repeat the first command's value to resume it, or choose another --run-id"
        )


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)


def _multiples_near(value: int, factor: int) -> str:
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def _explain(error: Any) -> str:
    path = [str(part) for part in error["loc"] if part != "exchange"]
    name = ".".join(path).replace("_", "-")
    return f"--{name} {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _one_line(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems: " + "; ".join(f"({n}) {text}" for n, text in enumerate(problems, 1))
