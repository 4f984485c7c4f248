"""How a mutant of the real code comes about: by a change in memory, made and undone by a test.

An :class:`Edit` names a function, pieces of its text and what stands there instead; a :class:`Wrap` makes the mutant
from the real function. The mutant replaces the real one wherever a module of `diloco` holds it, for as long as a
`with` block lasts. An edit whose text is gone says so: it has to be written anew for the new code.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Edit:
    """A function with other text: pairs of a piece of its source and the replacement."""

    def __init__(self, owner: Any, name: str, *pairs: tuple[str, str]) -> None:
        self.owner, self.name, self._pairs = owner, name, pairs

    def mutant(self) -> Any:
        real = vars(self.owner)[self.name]
        source = textwrap.dedent(inspect.getsource(real))
        for old, new in self._pairs:
            if old not in source:
                raise LookupError(f"{real.__qualname__} no longer holds {old!r}: write this mutant anew")
            source = source.replace(old, new)
        scope = dict(real.__globals__)
        # Annotations stay text, so what is imported for type checkers only is not needed.
        source = "from __future__ import annotations\n" + source
        exec(compile(source, f"<mutant of {self.name}>", "exec"), scope)  # noqa: S102 - the project's own source
        return scope[self.name]


class Wrap:
    """What `make` makes of the real function."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self.owner, self.name, self._make = owner, name, make

    def mutant(self) -> Any:
        return self._make(vars(self.owner)[self.name])


@dataclass(frozen=True)
class Mutant:
    """One broken rule, looked for in the schedules of `scenario`."""

    name: str
    rule: str
    changes: tuple[Edit | Wrap, ...]
    scenario: str = "mix"
    budget: int = 400
    """Most seeds until it must have been caught."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The code under test with this fault in it."""
        with ExitStack() as stack:
            for change in self.changes:
                real, mutant = vars(change.owner)[change.name], change.mutant()
                owners = [change.owner]
                if inspect.ismodule(change.owner):
                    modules = [module for name, module in sys.modules.items() if name.startswith("diloco.")]
                    owners = [module for module in modules if vars(module).get(change.name) is real]
                for owner in owners:
                    stack.enter_context(mock.patch.object(owner, change.name, mutant))
            yield
