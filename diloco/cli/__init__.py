"""The command line. Standard output carries the result; errors are one line on standard error, never a traceback.

Exit codes: 0 the run succeeded, 1 it failed, 2 wrong usage or configuration, 128 + n stopped by signal n (130: Ctrl-C).
"""

from __future__ import annotations

from diloco.cli import access, jobs, plan, prune, run, verify
from diloco.cli.app import app, main
from diloco.cli.output import resume_command

__all__ = ["access", "app", "jobs", "main", "plan", "prune", "resume_command", "run", "verify"]
