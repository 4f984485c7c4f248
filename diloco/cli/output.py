"""How commands print: documents on standard output, words for people on the console."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.report import RunReport

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")


def print_document(report: RunReport) -> None:
    """Print a run's report as one JSON document."""
    print_json(report.document())


def print_json(document: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def say(console: Console, text: str) -> None:
    """Print words for people, as they are."""
    console.print(text, markup=False, soft_wrap=True)


def print_log_line(console: Console, rank: int, text: str) -> None:
    """Print a line of a rank's log, as it is, after the rank in its colour."""
    console.print(Text.assemble((f"[{rank}] ", _COLOURS[rank % len(_COLOURS)]), text), soft_wrap=True)


def print_runs(runs: Sequence[Mapping[str, Any]], counted: str, *, as_json: bool) -> None:
    """List runs: `run_id`, `started`, and under `counted` how many jobs or replicas by status."""
    if as_json:
        print_json(runs)
        return
    table = Table("run", "started", counted, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for run in runs:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(run[counted].items()))
        table.add_row(run["run_id"], run["started"], counts)
    Console(highlight=False).print(table if runs else "no runs")


def resume_command(run_id: str, argv: Sequence[str] | None = None) -> str:
    """Return the command that resumes the present one, as it can be pasted into a shell."""
    words = list(sys.argv if argv is None else argv)
    program = ["python", words[0]] if words[0].endswith(".py") else [Path(words[0]).name]
    rest = words[1:]
    if not any(word == "--run-id" or word.startswith("--run-id=") for word in rest):
        rest += ["--run-id", run_id]
    return shlex.join([*program, *rest])
