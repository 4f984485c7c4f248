"""What every command shares: the application, exit codes, and how an error is told."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import typer

from diloco.errors import ConfigurationError, DilocoError, StoreError
from diloco.executors.local import ERROR_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED = 1
USAGE = 2

app = typer.Typer(
    name="diloco", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True
)


@app.callback()
def commands() -> None:
    """Decoupled DiLoCo: train one model by replicas that share nothing but an object store."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except typer.TyperException as problem:
        if type(problem).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{problem.format_message()}\n")
            return USAGE
        return _fail(f"{problem.format_message()} (see --help)", USAGE)
    except DilocoError as problem:
        return _fail(str(problem), exit_code(problem))
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    return int(code or 0)


def exit_code(problem: DilocoError) -> int:
    """The exit code for an error: wrong usage or configuration, or a failure."""
    return USAGE if isinstance(problem, ConfigurationError | StoreError) else FAILED


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"{ERROR_PREFIX}{' '.join(message.split())}\n")
    return code
