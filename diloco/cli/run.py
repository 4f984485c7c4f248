"""`run`: train one model by N replicas."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from diloco.cli.app import FAILED, app, exit_code
from diloco.errors import ConfigurationError, DilocoError, ExitCode
from diloco.signals import Interrupted, Signals

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from diloco.embedded import EmbeddedS3
    from diloco.local_run import RunFolder
    from diloco.report import RunReport
    from diloco.spec import RunSettings


class Policy(StrEnum):
    """What a round does about a straggler."""

    strict = "strict"
    skip = "skip"


class Codec(StrEnum):
    """Wire format of pseudo-gradients."""

    fp32 = "fp32"
    bf16 = "bf16"


@app.command()
def run(
    replicas: Annotated[int, typer.Option(help="Independent replicas of the model.")],
    steps: Annotated[int, typer.Option(help="Inner steps of each replica.")],
    sync_every: Annotated[int, typer.Option(help="Inner steps between two synchronisations of a parameter.")],
    local: Annotated[bool, typer.Option("--local", help="Run the replicas as processes of this machine.")] = False,
    fragments: Annotated[int, typer.Option(help="Parts of the model that are synchronised in turn.")] = 1,
    sync_delay: Annotated[int, typer.Option(help="Inner steps that an exchange may overlap with.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(help="tiny, small, a Hugging Face name, or a folder.  [default: tiny]", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="stdlib, a path or glob, or a data set's name.  [default: stdlib]", show_default=False),
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(help="Parent of the run, s3://… or file://…; without it an S3 is started here.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Parent of the trained model, instead of the run's own prefix.")
    ] = None,
    policy: Annotated[
        Policy, typer.Option(help="strict: every round needs all; skip: stragglers are left out.")
    ] = Policy.strict,
    min_replicas: Annotated[
        int | None,
        typer.Option(help="Replicas that a round needs under skip.  [default: a majority]", show_default=False),
    ] = None,
    codec: Annotated[Codec, typer.Option(help="Wire format of pseudo-gradients.")] = Codec.fp32,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a round that is not committed ends a replica.")
    ] = 1800.0,
    grace: Annotated[
        float | None,
        typer.Option(
            help="Seconds that skip waits for stragglers.  [default: by the ranks' recent arrivals]", show_default=False
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between two checkpoints.")] = 10,
    max_restarts: Annotated[int, typer.Option(help="Relaunches of each rank whose process died; 0: none.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the model's first state and of the order of data.")] = 0,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; the same name resumes it.")] = None,
    takeover: Annotated[bool, typer.Option("--takeover", help="Replace a launcher that may live at once.")] = False,
    trainer_module: Annotated[str, typer.Option(help="Module of the trainer.")] = "diloco.training",
    trainer_fn: Annotated[str, typer.Option(help="Function of the trainer.")] = "diloco_train",
    trainer_kwargs_json: Annotated[str, typer.Option(help="More arguments of the trainer, a JSON object.")] = "{}",
    endpoint_url: Annotated[str | None, typer.Option(help="Endpoint of an S3 that is not Amazon's.")] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also train one process by plain data parallelism.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")
    ] = False,
) -> None:
    """Train one model by N replicas."""
    if not local:
        raise ConfigurationError("only runs on this machine exist today: add --local")
    from diloco.embedded import BUCKET
    from diloco.spec import RunSettings, new_run_id

    if endpoint_url is not None and not endpoint_url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--endpoint-url {endpoint_url}: begin it with http:// or https://")
    settings = RunSettings.checked(
        replicas=replicas,
        steps=steps,
        sync_every=sync_every,
        fragments=fragments,
        sync_delay=sync_delay,
        seed=seed,
        run_id=new_run_id() if run_id is None else run_id,
        rendezvous=f"s3://{BUCKET}" if rendezvous is None else _parent("--rendezvous", rendezvous),
        output=None if output is None else _parent("--output", output),
        trainer_module=trainer_module,
        trainer_fn=trainer_fn,
        trainer_kwargs=_trainer_kwargs(trainer_module, trainer_kwargs_json, model=model, data=data),
        max_restarts=max_restarts,
        exchange={
            "policy": policy.value,
            "min_replicas": min_replicas,
            "codec": codec.value,
            "timeout": timeout,
            "grace": grace,
            "checkpoint_every": checkpoint_every,
        },
    )
    if baseline and not settings.default_trainer:
        raise ConfigurationError("--baseline knows only the default trainer: leave out --baseline or --trainer-module")
    launch = _LocalLaunch(
        settings,
        embedded=rendezvous is None,
        endpoint_url=endpoint_url,
        takeover=takeover,
        baseline=baseline,
        as_json=as_json,
    )
    raise typer.Exit(launch.run())


def _parent(option: str, uri: str) -> str:
    """Return the URI if replicas, which are other processes, can use it."""
    if uri.startswith("memory:"):
        raise ConfigurationError(
            f"{option} {uri}: replicas are processes and can't share memory; use s3://bucket/prefix or file:///folder"
        )
    scheme, separator, rest = uri.partition("://")
    if separator and scheme not in ("s3", "file"):
        raise ConfigurationError(
            f"{option} {uri}: {scheme}:// is no store of runs: use s3://bucket/prefix or file:///folder"
        )
    if separator and not rest.strip("/"):
        raise ConfigurationError(f"{option} {uri} names no {'bucket' if scheme == 's3' else 'folder'}: add it")
    if not separator:
        raise ConfigurationError(
            f"{option} {uri} has no scheme: use s3://bucket/prefix or {Path(uri).absolute().as_uri()}"
        )
    return uri


def _trainer_kwargs(module: str, text: str, **options: str | None) -> dict[str, Any]:
    """Merge `--trainer-kwargs-json` with the options that belong to the default trainer."""
    from diloco.spec import DEFAULT_TRAINER

    try:
        parsed = json.loads(text)
    except ValueError as problem:
        raise ConfigurationError(f"--trainer-kwargs-json is not JSON ({problem}): write '{{\"name\": 1}}'") from None
    if not isinstance(parsed, dict):
        raise ConfigurationError("--trainer-kwargs-json must be a JSON object: write '{\"name\": 1}'")
    kwargs: dict[str, Any] = parsed
    for name, value in options.items():
        if value is None:
            continue
        if module != DEFAULT_TRAINER[0]:
            raise ConfigurationError(f"--{name} belongs to the default trainer: put {name} into --trainer-kwargs-json")
        if name in kwargs:
            raise ConfigurationError(f"{name} is given twice: by --{name} and in --trainer-kwargs-json; leave one out")
        kwargs[name] = value
    if module == DEFAULT_TRAINER[0]:
        kwargs = {"model": "tiny", "data": "stdlib"} | kwargs
    return kwargs


class _LocalLaunch:
    """One `run --local`: everything that lives around the replicas, in the order in which it must be undone."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        embedded: bool,
        endpoint_url: str | None,
        takeover: bool,
        baseline: bool,
        as_json: bool,
    ) -> None:
        from diloco.local_run import RunFolder

        self._settings = settings
        self._embedded = embedded
        self._endpoint_url = endpoint_url
        # The embedded S3 lives in the folder whose lock this launcher holds: no other one can be alive.
        self._takeover = takeover or embedded
        self._baseline = baseline
        self._as_json = as_json
        self._console = Console(stderr=as_json, highlight=False)
        self._folder: RunFolder = RunFolder.of(settings.run_id)
        self._started = time.monotonic()
        self._report: RunReport | None = None

    def run(self) -> int:
        """Run it and return the exit code."""
        from diloco.local_run import check_packages
        from diloco.preflight import preflight

        preflight(self._settings)
        check_packages()
        with Signals() as signals:
            try:
                with ExitStack() as stack:
                    report = self._run_in(stack, signals)
            except Interrupted as stopped:
                return self._interrupted(stopped)
            except DilocoError as problem:
                if exit_code(problem) == FAILED and self._as_json:
                    self._print_document(self._failed(str(problem)))
                raise
        self._print(report)
        return 0 if report.succeeded else FAILED

    def _run_in(self, stack: ExitStack, signals: Signals) -> RunReport:
        from diloco.embedded import EmbeddedS3, environment

        lock = stack.enter_context(self._folder.lock())
        if self._embedded:
            s3 = EmbeddedS3(self._folder.s3, log=self._folder.logs / "s3.log", hold=[lock])
            stack.callback(s3.stop)
            s3.start()
            stack.enter_context(environment(s3.env))
        elif self._endpoint_url is not None:
            stack.enter_context(environment({"AWS_ENDPOINT_URL_S3": self._endpoint_url}))
        report: RunReport = signals.run(self._beside(s3, self._train(lock)) if self._embedded else self._train(lock))
        return report

    async def _beside(self, s3: EmbeddedS3, training: Coroutine[Any, Any, RunReport]) -> RunReport:
        """Train while the embedded S3 lives; DilocoError at once when it has ended."""
        task = asyncio.ensure_future(training)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=0.5)
                if not task.done() and not s3.alive:
                    log = _shown(self._folder.logs / "s3.log")
                    raise DilocoError(
                        f"the embedded S3 has ended (its log: {log}): the same command with --run-id resumes"
                    )
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _train(self, lock: int) -> RunReport:
        from diloco.executors.local import LocalProcessExecutor
        from diloco.local_run import copy_model, train_baseline
        from diloco.run import run_replicas
        from diloco.status import make_view

        executor = LocalProcessExecutor(log_dir=self._folder.logs, hold=[lock])
        with make_view(self._console) as view:
            report = await run_replicas(
                executor, self._settings, takeover=self._takeover, on_status=view.show, on_note=self._say
            )
        self._report = report
        if self._embedded and report.model_uri is not None:
            try:
                await copy_model(report.model_uri, self._folder.model)
            except (DilocoError, OSError) as problem:
                error = (
                    f"the model is in {report.model_uri}, but could not be copied to {self._folder.model}: {problem}"
                )
                report = report.model_copy(update={"error": error})
        if self._baseline and report.succeeded:
            self._say("training the baseline: one process, gradients averaged at every step")
            try:
                loss: float | None = await train_baseline(self._settings, self._folder, hold=lock)
                changes: dict[str, Any] = {"baseline_eval_loss": loss}
            except DilocoError as problem:
                changes = {"baseline_eval_loss": None, "error": str(problem)}
            report = report.model_copy(update=changes)
        return report.model_copy(update={"wall_seconds": round(time.monotonic() - self._started, 3)})

    def _interrupted(self, stopped: Interrupted) -> int:
        name = signal.Signals(stopped.number).name
        self._say(f"stopped by {name}; all replicas are gone. To resume:\n  {resume_command(self._settings.run_id)}")
        if self._as_json:
            self._print_document(self._failed(f"stopped by {name}"))
        return 128 + stopped.number

    def _failed(self, error: str) -> RunReport:
        from diloco.report import RunReport

        if self._report is not None:  # the run itself was over
            return self._report.model_copy(update={"error": error})
        return RunReport(
            run_id=self._settings.run_id,
            status="failed",
            rendezvous_uri=self._settings.uri,
            rounds_expected=self._settings.rounds,
            wall_seconds=round(time.monotonic() - self._started, 3),
            error=error,
        )

    def _print(self, report: RunReport) -> None:
        from diloco.report import summary

        self._console.print(summary(report))
        if self._embedded and report.model_uri is not None:
            self._say(f"model: {_shown(self._folder.model)}")
        if not report.succeeded:
            self._say(f"logs: {_shown(self._folder.logs)}")
            if f"exit code {ExitCode.BAD_CONFIGURATION:d}" not in (report.error or ""):
                self._say(f"To resume:\n  {resume_command(self._settings.run_id)}")
        if self._as_json:
            self._print_document(report)

    def _print_document(self, report: RunReport) -> None:
        sys.stdout.write(json.dumps(report.document(), indent=1) + "\n")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def resume_command(run_id: str, argv: Sequence[str] | None = None) -> str:
    """Return the command that resumes the present one, as it can be pasted into a shell."""
    words = list(sys.argv if argv is None else argv)
    program = ["python", words[0]] if words[0].endswith(".py") else [Path(words[0]).name]
    rest = words[1:]
    if not any(word == "--run-id" or word.startswith("--run-id=") for word in rest):
        rest += ["--run-id", run_id]
    return shlex.join([*program, *rest])


def _shown(path: Path) -> str:
    """A path as the user would type it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
