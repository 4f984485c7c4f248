"""A stack of the real Pulumi engine: a backend, a state and a configuration of its own in one folder.

The project is a copy of what the checkout's own consists of, so no test writes into the checkout, and two stacks can
run side by side. Everything started here is guarded: nothing survives the test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml  # type: ignore[import-untyped]

from diloco import guard
from tests.support.engine import ROOT, path_with_engine

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence

PROVIDERS = Path(__file__).with_name("providers")
COPIED = (
    "infra",
    "diloco",
    "container",
    "pyproject.toml",
    "requirements.lock",
    "README.md",
    "LICENSE",
    ".dockerignore",
)
"""Program, package, and what the image is made of."""
REAL_AWS_PLUGIN = os.environ.get("DILOCO_TEST_REAL_AWS_PLUGIN") == "1"
"""Whether the engine finds (and fetches) the real aws plugin, instead of the stand-in on PATH."""
PATIENCE = 180.0
"""Seconds for one command; a few are usual."""


@dataclass(frozen=True)
class Step:
    """What the engine did, or in a preview would do, to one resource."""

    op: str
    type: str
    name: str
    diffs: tuple[str, ...]
    urn: str


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    command: str
    code: int
    stdout: str
    stderr: str
    seconds: float
    events: list[dict[str, Any]] = field(repr=False)

    @property
    def steps(self) -> list[Step]:
        """What was done, without what stayed as it was."""
        steps = []
        for event in self.events:
            if not (pre := event.get("resourcePreEvent")):
                continue
            about = pre["metadata"]
            if about["op"] in {"same", "read", "read-discard"}:
                continue
            diffs = tuple(sorted(about.get("diffs") or about.get("detailedDiff") or ()))
            steps.append(Step(about["op"], about["type"], about["urn"].rsplit("::", 1)[1], diffs, about["urn"]))
        return steps

    def of(self, op: str) -> set[str]:
        """`type name` of everything that one operation was done to."""
        return {f"{step.type.rpartition(':')[2]} {step.name}" for step in self.steps if step.op == op}

    @property
    def drift(self) -> dict[str, str]:
        """After `refresh`: `type name` of all that is not as the state had it, and whether it changed or is gone."""
        found = {}
        for event in self.events:
            if (about := event.get("resOutputsEvent", {}).get("metadata")) and about["op"] in {"update", "delete"}:
                found[f"{about['type'].rpartition(':')[2]} {about['urn'].rpartition('::')[2]}"] = str(about["op"])
        return found

    @property
    def changes(self) -> dict[str, int]:
        """How many resources by operation, as the engine's summary has it; without what stays the same."""
        summaries = [event["summaryEvent"] for event in self.events if "summaryEvent" in event]
        counted: dict[str, int] = summaries[-1].get("resourceChanges", {}) if summaries else {}
        return {op: number for op, number in counted.items() if op not in {"same", "read"} and number}

    @property
    def errors(self) -> str:
        """Every error that the engine showed, and what the command itself wrote as one."""
        shown = [
            event["diagnosticEvent"]["message"]
            for event in self.events
            if event.get("diagnosticEvent", {}).get("severity") == "error"
        ]
        return "\n".join([*shown, self.stderr])

    @property
    def text(self) -> str:
        """All that a user sees."""
        return self.stdout + self.stderr


class PulumiStack:
    """One stack. Use it as a context manager; it destroys nothing by itself."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "test",
        environment: Mapping[str, str],
        config: Mapping[str, Any] | None = None,
        main: Path | None = None,
    ) -> None:
        """`main` is another program than the checkout's `infra`; `config` are full keys, `diloco:bucket`."""
        self.name = name
        self.project = folder / "project"
        self._logs = folder / "logs"
        self._environment = _environment(folder, environment)
        self._running: list[Command] = []
        self._count = 0
        self.project.mkdir(parents=True)
        self._logs.mkdir()
        (folder / "backend").mkdir(exist_ok=True)
        self._lay_out(main)
        self("stack", "init", name, "--no-select").check()
        self._salt = yaml.safe_load(self._config_file.read_text())
        self.configure(config or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop whatever still runs."""
        for command in self._running:
            command.stop()

    def configure(self, config: Mapping[str, Any]) -> None:
        """Replace the whole configuration."""
        self._config_file.write_text(yaml.safe_dump({**self._salt, "config": dict(config)}))

    @property
    def environment(self) -> dict[str, str]:
        """In which a command of the user's finds this stack, from the folder `project`."""
        return dict(self._environment)

    @property
    def _config_file(self) -> Path:
        return self.project / f"Pulumi.{self.name}.yaml"

    # ------------------------------------------------------------------ commands

    def up(self, *options: str) -> Ended:
        return self._run("up", "--yes", "--skip-preview", *options)

    def preview(self, *options: str) -> Ended:
        return self._run("preview", *options)

    def refresh(self, *options: str) -> Ended:
        return self._run("refresh", "--yes", "--skip-preview", *options)

    def destroy(self, *options: str) -> Ended:
        return self._run("destroy", "--yes", "--skip-preview", *options)

    def cancel(self) -> Ended:
        return self("cancel", "--yes", self.name)

    def outputs(self) -> dict[str, Any]:
        """The stack's outputs, secrets shown."""
        shown = self("stack", "output", "--json", "--show-secrets", "--stack", self.name).check()
        return dict(json.loads(shown.stdout))

    def state(self) -> dict[str, Any]:
        """The deployment as `pulumi stack export` has it."""
        exported = self("stack", "export", "--stack", self.name).check()
        return dict(json.loads(exported.stdout)["deployment"])

    def resources(self) -> list[dict[str, Any]]:
        """What the state holds."""
        return list(self.state().get("resources", []))

    def start(self, *arguments: str) -> Command:
        """Start an operation (`up`, …) and return while it runs."""
        return self._start(*arguments, "--stack", self.name, "--non-interactive", log_events=True)

    def __call__(self, *arguments: str) -> Ended:
        """Run any command to its end."""
        return self._start(*arguments, "--non-interactive", log_events=False).wait()

    def _run(self, *arguments: str) -> Ended:
        return self.start(*arguments).wait()

    def _start(self, *arguments: str, log_events: bool) -> Command:
        self._count += 1
        log = self._logs / f"{self._count:03}-{arguments[0]}"
        events = log.with_suffix(".events")
        more = ("--event-log", str(events)) if log_events else ()
        command = Command((*arguments, *more), self.project, self._environment, log, events)
        self._running.append(command)
        return command

    def _lay_out(self, main: Path | None) -> None:
        description = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
        if main is None:
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(
                        ROOT / name, self.project / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / name, self.project / name)
            (self.project / ".venv").symlink_to(sys.prefix)
        else:
            description |= {"main": str(main), "runtime": {"name": "python"}}
        (self.project / "Pulumi.yaml").write_text(yaml.safe_dump(description))


class Ended(Done):
    """A `Done` that can be insisted on."""

    def check(self) -> Ended:
        """AssertionError, with all that was shown, unless it succeeded."""
        assert self.code == 0, f"pulumi {self.command} ended with {self.code}:\n{self.text}"
        return self

    def failed(self) -> Ended:
        """AssertionError unless it failed."""
        assert self.code != 0, f"pulumi {self.command} succeeded:\n{self.text}"
        return self


class Command:
    """A running command of the CLI under a guard."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, events: Path
    ) -> None:
        self.arguments = arguments
        self._out, self._err, self._events = log.with_suffix(".out"), log.with_suffix(".err"), events
        self._started = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            shell = ["sh", "-c", 'cd "$1" && shift && exec pulumi "$@"', "sh", str(folder), *arguments]
            self._guard = guard.spawn(shell, env=environment, output=out, errors=err, grace=1.0)

    def wait(self, patience: float = PATIENCE) -> Ended:
        """Its end; AssertionError after `patience` seconds."""
        try:
            self._guard.wait(patience)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"pulumi {self.arguments[0]} did not end:\n{self._out.read_text()}") from None
        code = guard.exit_code(self._guard)
        assert code is not None
        return Ended(
            command=self.arguments[0],
            code=code,
            stdout=self._out.read_text(),
            stderr=self._err.read_text(),
            seconds=time.monotonic() - self._started,
            events=self.events(),
        )

    def text(self) -> str:
        """What was shown so far."""
        return self._out.read_text() + self._err.read_text()

    def events(self) -> list[dict[str, Any]]:
        """What the engine has told so far."""
        if not self._events.exists():
            return []
        lines = self._events.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, condition: Callable[[], bool], what: str, patience: float = 300.0) -> None:
        """Return when `condition` holds; AssertionError when the command ends first, or after `patience` seconds."""
        deadline = time.monotonic() + patience
        while not condition():
            assert self._guard.poll() is None, f"ended before {what}:\n{self._out.read_text()}{self._err.read_text()}"
            assert time.monotonic() < deadline, f"no {what} within {patience:g} s:\n{self._out.read_text()}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        """Signal the CLI itself, as a terminal or a crash would; SIGKILL takes its plugins along."""
        children = Path(f"/proc/{self._guard.pid}/task/{self._guard.pid}/children").read_text().split()
        os.kill(int(children[0]), number)

    def stop(self) -> None:
        """End it and all that it started."""
        guard.stop([self._guard])


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    kept = ("HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "NO_PROXY", "no_proxy")
    base = {name: os.environ[name] for name in kept if name in os.environ}
    plugins = folder / "plugins"
    plugins.mkdir(exist_ok=True)
    for plugin in PROVIDERS.glob("pulumi-resource-*"):
        if not (REAL_AWS_PLUGIN and plugin.name == "pulumi-resource-aws"):
            (plugins / plugin.name).symlink_to(plugin)
    path = [str(plugins), str(Path(sys.executable).parent), path_with_engine()]
    home = Path(os.environ.get("PULUMI_HOME", Path.home() / ".pulumi")) if REAL_AWS_PLUGIN else folder / "home"
    return base | {
        "PATH": os.pathsep.join(path),
        "PULUMI_HOME": str(home),
        "PULUMI_BACKEND_URL": (folder / "backend").as_uri(),
        "PULUMI_CONFIG_PASSPHRASE": "test",
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "false" if REAL_AWS_PLUGIN else "true",
        "PULUMI_DEBUG_COMMANDS": "true",
        "PYTHONDONTWRITEBYTECODE": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        **more,
    }
