"""SageMaker's contract around a replica: `python -m diloco.sagemaker_container train …`, process 1 of a training job.

It reads what SageMaker laid down, runs :mod:`diloco.replica_entrypoint` as a child, and tells SageMaker how it ended:

- hyperparameters: names of the entrypoint's options become options, all others the trainer's arguments;
- the channel `data` (FastFile) becomes the trainer's argument `data`, the folder that it is mounted at;
- `DILOCO_HF_TOKEN_SECRET`, an ARN, becomes HF_TOKEN of the child, and of nobody else;
- SIGTERM (a stop, or two minutes before a spot instance goes) is passed on; the child leaves its round, says so in the
  bucket and ends. One that has not ended after 100 s is killed: SageMaker kills all after 120;
- the model goes to /opt/ml/model, on rank 0 or on all (`DILOCO_SAGEMAKER_MODEL`);
- the reason of a failure goes to /opt/ml/output/failure, of which SageMaker shows 1,024 characters. A child that was
  killed, for want of memory say, can't write it; this process can.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigurationError, DilocoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

ROOT = Path("/opt/ml")
CHILD = (sys.executable, "-m", "diloco.replica_entrypoint")
STOP_SECONDS = 100.0
FAILURE_CHARACTERS = 1024

OPTIONS = ("rendezvous", "world-size", "rank", "spec", "trainer-module", "trainer-fn", "exchange-json")
DATA_CHANNEL = "data"
MODEL_VARIABLE = "DILOCO_SAGEMAKER_MODEL"
MODEL_FOLDER_VARIABLE = "DILOCO_MODEL_DIR"
SECRET_VARIABLE = "DILOCO_HF_TOKEN_SECRET"  # noqa: S105 - an ARN's variable, no secret

_ERROR = "diloco: error: "
_KWARGS = "--trainer-kwargs-json"
_LAST_LINES = 40


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run one replica as SageMaker wants it; returns the exit code."""
    try:
        arguments = child_arguments(list(sys.argv[1:] if argv is None else argv), environ)
        environment = child_environment(arguments, environ)
    except DilocoError as problem:
        text = " ".join(str(problem).split())
        print(f"{_ERROR}{text}", file=sys.stderr, flush=True)  # noqa: T201
        write_failure(text)
        return problem.exit_code
    return run([*CHILD, *arguments], environment)


def run(command: Sequence[str], environment: Mapping[str, str], *, stop_seconds: float = STOP_SECONDS) -> int:
    """Run the replica's process to its end and write why it failed, if it did; returns its exit code."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    child = subprocess.Popen(list(command), env=dict(environment), stderr=subprocess.PIPE, text=True, errors="replace")  # noqa: S603
    killer = threading.Timer(stop_seconds, child.kill)
    killer.daemon = True

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)
        with suppress(RuntimeError):  # it was started by an earlier signal
            killer.start()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for line in child.stderr or ():
            sys.stderr.write(line)
            sys.stderr.flush()
            last.append(line.rstrip())
        code = child.wait()
    finally:
        killer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code != 0:
        write_failure(reason(list(last), code))
    return 128 - code if code < 0 else code


def child_arguments(argv: Sequence[str], environ: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """The entrypoint's command line: what was given, then what SageMaker's files say. Raises ConfigurationError."""
    arguments = list(argv)
    kwargs: dict[str, Any] = {}
    for name, text in _configuration("hyperparameters", root).items():
        option = name.replace("_", "-")
        if name.startswith(("sagemaker_", "sm_")):
            continue  # the toolkit's own
        if option in OPTIONS:
            arguments += [] if f"--{option}" in argv else [f"--{option}", str(_value(text))]
        else:
            kwargs[name] = _value(text)
    given = argv[argv.index(_KWARGS) + 1] if _KWARGS in argv[:-1] else environ.get("DILOCO_TRAINER_KWARGS_JSON", "{}")
    try:
        kwargs |= json.loads(given)
    except (ValueError, TypeError):
        raise ConfigurationError(f"{_KWARGS} is no JSON object: {given}") from None
    if DATA_CHANNEL in _configuration("inputdataconfig", root):
        kwargs["data"] = str(root / "input" / "data" / DATA_CHANNEL)
    return [*arguments, _KWARGS, json.dumps(kwargs)] if kwargs else arguments


def child_environment(arguments: Sequence[str], environ: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """The replica's environment. Raises DilocoError if a secret can't be read."""
    environment = dict(environ)
    # SageMaker sets only AWS_REGION, and boto3 reads only this one.
    if "AWS_REGION" in environ:
        environment.setdefault("AWS_DEFAULT_REGION", environ["AWS_REGION"])
    rank = arguments[arguments.index("--rank") + 1] if "--rank" in arguments[:-1] else environ.get("REPLICA_RANK")
    which = environ.get(MODEL_VARIABLE, "rank0")
    if which == "all" or (which == "rank0" and rank == "0"):
        environment[MODEL_FOLDER_VARIABLE] = str(root / "model")
    secret = environ.get(SECRET_VARIABLE)
    if secret is not None:
        environment["HF_TOKEN"] = read_token(secret, environment.get("AWS_DEFAULT_REGION"))
    return environment


def read_token(arn: str, region: str | None) -> str:
    """The Hugging Face token in a Secrets Manager secret: its text, or the member `HF_TOKEN` or `token` of its JSON."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    session: Any = boto3.session.Session(region_name=region)
    try:
        text = str(session.client("secretsmanager").get_secret_value(SecretId=arn)["SecretString"])
    except (BotoCoreError, ClientError, KeyError) as problem:
        raise ConfigurationError(
            f"the Hugging Face token's secret {arn} can't be read ({problem}): name it in the stack's secretArns"
        ) from None
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            token = found.get("HF_TOKEN") or found.get("token")
            if not isinstance(token, str):
                raise ConfigurationError(f"the secret {arn} has neither HF_TOKEN nor token: add one")
            return token
    return text.strip()


def reason(lines: Sequence[str], code: int) -> str:
    """Why a replica failed: its own last error line, else how its log ends."""
    for line in reversed(lines):
        if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)
    if code < 0:
        name = signal.Signals(-code).name
        hint = ": out of memory? use a larger instance or a smaller batch_size" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}"
    return " | ".join(line for line in lines[-3:] if line) or f"ended with exit code {code} and said nothing"


def write_failure(text: str, root: Path = ROOT) -> None:
    """Leave the reason where SageMaker looks for it, and does not look in vain: it shows no more than this."""
    with suppress(OSError):  # outside of SageMaker there is no such folder
        (root / "output" / "failure").write_text(text[:FAILURE_CHARACTERS])


def _configuration(name: str, root: Path) -> dict[str, Any]:
    path = root / "input" / "config" / f"{name}.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise ConfigurationError(f"{path} can't be read: {problem}") from None
    return found if isinstance(found, dict) else {}


def _value(text: Any) -> Any:
    """A hyperparameter's value: SageMaker makes every one a string, its Python SDK a JSON one."""
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return text


if __name__ == "__main__":
    sys.exit(main())
