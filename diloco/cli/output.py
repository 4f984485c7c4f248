"""How commands print: documents on standard output, words for people on the console."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from diloco.report import RunReport


def print_document(report: RunReport) -> None:
    """Print a run's report as one JSON document."""
    print_json(report.document())


def print_json(document: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def say(console: Console, text: str) -> None:
    """Print words for people, as they are."""
    console.print(text, markup=False, soft_wrap=True)


def resume_command(run_id: str, argv: Sequence[str] | None = None) -> str:
    """Return the command that resumes the present one, as it can be pasted into a shell."""
    words = list(sys.argv if argv is None else argv)
    program = ["python", words[0]] if words[0].endswith(".py") else [Path(words[0]).name]
    rest = words[1:]
    if not any(word == "--run-id" or word.startswith("--run-id=") for word in rest):
        rest += ["--run-id", run_id]
    return shlex.join([*program, *rest])
