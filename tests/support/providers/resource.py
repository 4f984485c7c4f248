"""What a stand-in resource is: one small class that makes, reads, changes and deletes one kind of thing."""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

import datetime
import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pulumi.provider.experimental.provider import PropertyDiffKind as Kind

from tests.support.providers import declared
from tests.support.providers.values import Plain, has_unknown, same, same_document

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RANDOM_DIGITS = 7


class RefusedError(Exception):
    """The provider says no; the message is what the user sees."""


class PartlyMadeError(Exception):
    """A thing exists but is not complete: the engine keeps it in its state, and the next update repairs it."""

    def __init__(self, resource_id: str, state: Plain, reason: str) -> None:
        super().__init__(reason)
        self.resource_id, self.state, self.reason = resource_id, state, reason


@dataclass(frozen=True)
class AutoName:
    """How the real provider names a thing whose program gives it no name: `<logical name>-<7 hex digits>`."""

    argument: str = "name"
    most: int = 255
    transform: Callable[[str], str] = str

    @property
    def prefix(self) -> str:
        """The argument that asks for a name which begins so and ends in 26 digits of the provider's."""
        return f"{self.argument}Prefix"

    def complete(self, inputs: Plain) -> Plain:
        """The inputs with the name that a prefix asks for."""
        if self.prefix not in inputs or self.argument in inputs:
            return inputs
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d%H%M%S%f")[:18]
        return inputs | {self.argument: f"{inputs[self.prefix]}{now}{secrets.token_hex(4)}"}

    def make(self, logical: str, seed: bytes) -> str:
        """Raises RefusedError where the name would be longer than AWS takes."""
        digits = hashlib.sha256(seed).hexdigest()[:RANDOM_DIGITS] if seed else secrets.token_hex(4)[:RANDOM_DIGITS]
        name = self.transform(f"{logical}-{digits}")
        if len(name) > self.most:
            raise RefusedError(
                f"name {logical!r} plus {RANDOM_DIGITS} random chars is longer than maximum length {self.most}"
            )
        return name


class Resource:
    """One resource type. A subclass fills in the table at the top and the four calls at the bottom.

    `inputs` and states are plain maps under the wire's names. A call may raise a botocore ClientError, which reaches
    the user as AWS's own message. `update` gets the names that changed, and must not fail on what is already so.
    """

    urn_type: ClassVar[str]
    arguments: ClassVar[frozenset[str]]
    """What the stand-in implements; the real class may declare more, which is refused by name."""
    replace_on: ClassVar[frozenset[str]] = frozenset()
    """A change of these needs a new thing ("Forces new resource" in the provider's documentation)."""
    computed: ClassVar[frozenset[str]] = frozenset()
    """Arguments that AWS fills in when the program leaves them out: absent means "as it is"."""
    recomputed: ClassVar[frozenset[str]] = frozenset()
    """Outputs that any change in place makes anew."""
    documents: ClassVar[frozenset[str]] = frozenset()
    """Arguments that are JSON policies, compared by meaning."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    auto_name: ClassVar[AutoName | None] = None
    tagged: ClassVar[bool] = False
    regional: ClassVar[bool] = True

    def __init__(self, session: Any, region: str | None = None) -> None:
        self.session = session
        self.region: str = region or session.region

    def client(self, service: str) -> Any:
        """A boto3 client of the resource's region."""
        return self.session.client(service, self.region)

    @staticmethod
    def only(found: list[Plain]) -> Plain:
        """The thing that a Describe call found. RefusedError, which `read` takes for its absence, if there is none."""
        if not found:
            raise RefusedError("it does not exist")
        return found[0]

    # ------------------------------------------------------------------ what subclasses write

    def create(self, inputs: Plain) -> str:
        """Make the thing with one call and return its id."""
        raise NotImplementedError

    def complete(self, resource_id: str, inputs: Plain) -> None:
        """Whatever `create` could not set in the same call."""

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        """Its present state, every argument and output that AWS tells; None when it is gone.

        `state` is the last known one, empty on import.
        """
        raise NotImplementedError

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        """Change it in place."""
        raise RefusedError(f"{self.urn_type} has nothing to update in place: {', '.join(sorted(changed))}")

    def delete(self, resource_id: str, state: Plain) -> None:
        """Remove it. What is already gone is no error; the caller sees to that."""
        raise NotImplementedError

    def import_id(self, resource_id: str) -> str:
        """The id in the state for the id that a user gives to `pulumi import`."""
        return resource_id

    # ------------------------------------------------------------------ the same for all

    @classmethod
    def accepted(cls) -> frozenset[str]:
        """Arguments that may be given."""
        prefix = {cls.auto_name.prefix} if cls.auto_name is not None else set()
        prefix &= declared.resource(cls.urn_type).arguments.keys()
        return cls.arguments | prefix | ({"tags"} if cls.tagged else set()) | ({"region"} if cls.regional else set())

    def check(self, logical: str, inputs: Plain, old: Plain, seed: bytes) -> tuple[Plain, dict[str, str]]:
        """Fill in defaults and the name; return the inputs and, per argument, what is wrong with it."""
        problems = declared.resource(self.urn_type).problems(inputs)
        for name in inputs.keys() - self.accepted() - problems.keys():
            if not name.startswith("__"):
                problems[name] = f"the stand-in for {self.urn_type} does not implement this argument"
        checked = {name: value for name, value in inputs.items() if name != "__defaults"}
        filled = [name for name, value in self.defaults.items() if checked.setdefault(name, value) is value]
        if self.auto_name is not None and not checked.keys() & {self.auto_name.argument, self.auto_name.prefix}:
            argument = self.auto_name.argument
            filled.append(argument)
            kept = old.get(argument) if argument in old.get("__defaults", []) else None
            try:
                checked[argument] = kept or self.auto_name.make(logical, seed)
            except RefusedError as problem:
                problems[argument] = str(problem)
        checked["__defaults"] = sorted(filled)
        return checked, problems

    def diff(self, state: Plain, inputs: Plain, ignored: frozenset[str], default_tags: Plain) -> dict[str, Kind]:
        """Argument → how it changes, compared with the last known state (not with the last inputs: drift counts)."""
        changes: dict[str, Kind] = {}
        computed, fixed = self.computed | {"region"}, self.replace_on | {"region"}
        if self.auto_name is not None:
            fixed |= {self.auto_name.prefix}
            computed |= {self.auto_name.argument} if self.auto_name.prefix in inputs else set()
        for name in self.accepted() - ignored - (computed - inputs.keys()):
            new, old = inputs.get(name), state.get(name)
            equal = same_document if name in self.documents else same
            if not has_unknown(new) and equal(new, old):
                continue
            replace = name in fixed
            if name not in inputs:
                changes[name] = Kind.DELETE_REPLACE if replace else Kind.DELETE
            elif old is None:
                changes[name] = Kind.ADD_REPLACE if replace else Kind.ADD
            else:
                changes[name] = Kind.UPDATE_REPLACE if replace else Kind.UPDATE
        if self.tagged and "tags" not in ignored:
            wanted = default_tags | inputs.get("tags", {})
            if not same(wanted, state.get("tagsAll")):
                changes["tagsAll"] = Kind.UPDATE
        return changes

    def deleted_before_replaced(self, state: Plain, inputs: Plain) -> bool:
        """A name that the program itself gave, and that stays, can't exist twice."""
        if self.auto_name is None:
            return False
        argument = self.auto_name.argument
        return argument not in inputs.get("__defaults", []) and inputs.get(argument) == state.get(argument)
