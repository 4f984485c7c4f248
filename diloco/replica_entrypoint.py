"""What every backend runs in its container: `python -m diloco.replica_entrypoint`.

The contract: `--rendezvous`, `--world-size`, `--rank`, `--spec`, `--trainer-module`, `--trainer-fn`,
`--trainer-kwargs-json`, `--exchange-json`. What is not on the command line comes from the environment:
`RENDEZVOUS_URI`, `WORLD_SIZE`, `REPLICA_RANK` (or `JOB_COMPLETION_INDEX`, which Kubernetes sets in an Indexed Job),
`DILOCO_SPEC`, `DILOCO_TRAINER_MODULE`, `DILOCO_TRAINER_FN`, `DILOCO_TRAINER_KWARGS_JSON`, `DILOCO_EXCHANGE_JSON`; what
trainer there is and what it gets also from the launcher's `spec.json`, which `--spec` names. SageMaker's `train` may
come first.

It joins the run, imports the trainer, and calls `trainer_fn(manager=…, rank=…, world_size=…, **kwargs)`. Exit codes
are those of :class:`diloco.errors.ExitCode`; the last line on stderr of a process that failed begins with `diloco:
error: `.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NoReturn

from diloco.errors import ConfigurationError, DilocoError, ExitCode, ObjectMissingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_STOPPED = "stopped by a signal; start the run again with the same run id to go on"


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    """End at once: nothing is begun yet, and an exception could get lost in somebody's import."""
    os.write(2, f"diloco: error: {_STOPPED}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


def _on_signals(handler: signal.Handlers | Callable[[int, FrameType | None], NoReturn]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


if __name__ == "__main__":
    # Before the imports: they take seconds on a cold disk, and the kernel drops a container's first process's SIGTERM
    # until there is a handler.
    _on_signals(_end)

import argparse
import gc
import importlib
import inspect
import json
import logging
import math
import sys
import traceback
from typing import Any

from pydantic import ValidationError

from diloco.exchange.settings import ExchangeSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.manager import ObjectStoreManager

DEFAULT_TRAINER = ("diloco.training", "diloco_train")


class Interrupted(BaseException):
    """SIGTERM or SIGINT: unwinds the training thread wherever it is."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run one replica; returns its exit code. A signal before the run is joined ends the process."""
    _on_signals(_end)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for noisy in ("torchft", "aiobotocore", "botocore", "httpx", "datasets"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    manager: ObjectStoreManager | None = None
    try:
        options = parse(argv, environ)
        exchange = _settings(options.exchange_json)
        kwargs = _object(options.trainer_kwargs_json, "--trainer-kwargs-json")
        if options.spec is not None:
            kwargs = follow_spec(options, kwargs)
        trainer = find_trainer(options.trainer_module, options.trainer_fn)
        from diloco.manager import ObjectStoreManager

        manager = ObjectStoreManager(
            options.rendezvous,
            rank=options.rank,
            world_size=options.world_size,
            settings=exchange,
            launcher=environ.get("DILOCO_LAUNCHER"),
        )
        _on_signals(_interrupt)
        manager.start()
        returned = trainer(manager=manager, rank=options.rank, world_size=options.world_size, **kwargs)
        manager.check_finished()
        manager.close(trainer=_plain(returned))
    except BaseException as problem:  # noqa: BLE001 - every end of a replica gets its exit code and its last line
        return _give_up(manager, problem)
    return ExitCode.OK


def _give_up(manager: ObjectStoreManager | None, problem: BaseException) -> int:
    _on_signals(signal.SIG_IGN)
    code: int
    if isinstance(problem, SystemExit):
        code = problem.code if isinstance(problem.code, int) and problem.code else ExitCode.FAILED
        text = f"the trainer ended its process with sys.exit({problem.code!r}) before the run was over"
    elif isinstance(problem, Interrupted):
        code, text = ExitCode.INTERRUPTED, _STOPPED
    elif isinstance(problem, DilocoError):
        code, text = problem.exit_code, str(problem)
    else:
        traceback.print_exception(problem)
        code, text = ExitCode.FAILED, f"the trainer failed: {type(problem).__name__}: {problem}"
    if manager is not None:
        try:
            manager.close(problem=problem)
        except Exception as lost:  # noqa: BLE001 - the first problem is the one to tell
            print(f"diloco: warning: could not say so in the store: {lost}", file=sys.stderr)  # noqa: T201
    print(f"diloco: error: {' '.join(text.split())}", file=sys.stderr, flush=True)  # noqa: T201
    return code


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted(signal.Signals(number).name)


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong with the command line as the error that it is, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def parse(argv: Sequence[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    """The contract's values; argv wins over the environment. Raises ConfigurationError that names every missing one."""
    parser = _Parser(prog="python -m diloco.replica_entrypoint", description="Run one replica of a run.")
    parser.add_argument(
        "command", nargs="?", choices=["train"], help="what SageMaker says to every training container; changes nothing"
    )
    parser.add_argument("--rendezvous", default=environ.get("RENDEZVOUS_URI"))
    parser.add_argument("--world-size", type=int, default=None)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--spec", default=environ.get("DILOCO_SPEC"), help="URI of the run's spec.json")
    parser.add_argument("--trainer-module", default=environ.get("DILOCO_TRAINER_MODULE"))
    parser.add_argument("--trainer-fn", default=environ.get("DILOCO_TRAINER_FN"))
    parser.add_argument("--trainer-kwargs-json", default=environ.get("DILOCO_TRAINER_KWARGS_JSON", "{}"))
    parser.add_argument("--exchange-json", default=environ.get("DILOCO_EXCHANGE_JSON", "{}"))
    options = parser.parse_args(argv)
    if options.spec is None:
        options.trainer_module = options.trainer_module or DEFAULT_TRAINER[0]
        options.trainer_fn = options.trainer_fn or DEFAULT_TRAINER[1]
    if options.world_size is None:
        options.world_size = _number(environ, "WORLD_SIZE")
    if options.rank is None:
        options.rank = _number(environ, "REPLICA_RANK", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX")
    missing = [
        f"{flag} or {variable}"
        for flag, variable, value in (
            ("--rendezvous", "RENDEZVOUS_URI", options.rendezvous),
            ("--world-size", "WORLD_SIZE", options.world_size),
            ("--rank", "REPLICA_RANK", options.rank),
        )
        if value is None
    ]
    if missing:
        raise ConfigurationError(f"missing: {', '.join(missing)}")
    return options


def follow_spec(options: argparse.Namespace, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Take trainer and arguments from the launcher's `spec.json`, as far as nothing else names them: a backend's
    command line may be too short for them. Returns the trainer's arguments.

    Raises ConfigurationError if there is none, StoreError if it can't be read.
    """
    import asyncio

    from diloco.exchange.clock import SystemClock
    from diloco.exchange.retrying import RetryingStore
    from diloco.exchange.store import open_store
    from diloco.spec_record import SCHEDULE, SpecRecord

    parent, _, key = options.spec.rpartition("/")

    async def read() -> bytes:
        store = RetryingStore(open_store(parent), SystemClock(), budget=ExchangeSettings().retry_for)
        try:
            return await store.read(key)
        finally:
            await store.close()

    try:
        spec = SpecRecord.from_json(asyncio.run(read()), key)
    except ObjectMissingError:
        raise ConfigurationError(f"--spec {options.spec}: no such object: it is the launcher's to write") from None
    options.trainer_module = options.trainer_module or spec.trainer_module
    options.trainer_fn = options.trainer_fn or spec.trainer_fn
    return {**{name: getattr(spec, name) for name in SCHEDULE}, **spec.trainer_kwargs, **kwargs}


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise ConfigurationError(f"{name} is {environ[name]!r}: it must be a whole number") from None
    return None


def _settings(text: str) -> ExchangeSettings:
    try:
        return ExchangeSettings.model_validate(_object(text, "--exchange-json"))
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ConfigurationError(f"--exchange-json: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _object(text: str, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise ConfigurationError(f"{flag} is no JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{flag} is a JSON {type(value).__name__}: it must be an object")
    return value


def find_trainer(module: str, name: str) -> Callable[..., Any]:
    """Import the trainer. Raises ConfigurationError when the module or the function is not there, or can't take what
    it will be given.
    """
    try:
        trainer = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as problem:
        raise ConfigurationError(f"--trainer-module {module}: {problem}; is it on PYTHONPATH?") from problem
    if not callable(trainer):
        raise ConfigurationError(f"--trainer-fn {name}: {module} has no such function")
    parameters = inspect.signature(trainer).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in ("manager", "rank", "world_size") if name not in parameters]
    if missing and not takes_any:
        raise ConfigurationError(
            f"{module}.{name} takes no {', '.join(missing)}: a trainer is fn(*, manager, rank, world_size, **kwargs)"
        )
    return trainer  # type: ignore[no-any-return]  # checked to be callable


def _plain(returned: object) -> dict[str, Any]:
    """What JSON can hold of a trainer's result."""
    if not isinstance(returned, dict):
        return {}
    plain = {str(key): value for key, value in returned.items() if isinstance(value, str | int | float | None)}
    return {key: value for key, value in plain.items() if not isinstance(value, float) or math.isfinite(value)}


if __name__ == "__main__":
    code = main()
    # Or the interpreter's last collections walk every object of torch and transformers, for seconds.
    gc.freeze()
    sys.exit(code)
