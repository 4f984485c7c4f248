"""An AWS account for tests: MiniStack that enforces IAM, its front end over TLS, SageMaker, quotas, a launcher's user.

The stack is the real Pulumi program's, run by the real engine. The launcher is `scripts/launch.py` in a process of its
own, as an IAM user with the stack's launcher policy and nothing else; the jobs' containers are processes with the
stack's role and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.support.engine import ROOT
from tests.support.iam_authority import Authority
from tests.support.pulumi_stack import PulumiStack
from tests.support.quotas import QuotaServer
from tests.support.sagemaker import Callers, SageMakerServer, Service, Timing
from tests.support.sagemaker.logs import GROUP
from tests.support.sagemaker.ministack import ministack, put_image
from tests.support.tls_proxy import FrontEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.support.sagemaker import Emulator

ACCOUNT, REGION, USER = "123456789012", "us-east-1", "launcher"
QUOTAS = {
    **{f"{name} for training job usage": 8.0 for name in ("ml.m5.xlarge", "ml.c5.xlarge", "ml.g5.xlarge")},
    **{f"{name} for spot training job usage": 8.0 for name in ("ml.m5.xlarge", "ml.c5.xlarge")},
    **{f"{name} for training warm pool usage": 0.0 for name in ("ml.m5.xlarge", "ml.c5.xlarge", "ml.g5.xlarge")},
    "Longest run time for a training job": 432_000.0,
}
PATIENCE = 280.0


@dataclass
class TestAccount:
    """The account, after `pulumi up`."""

    __test__ = False

    emulator: Emulator
    """Over TLS."""
    service: Service
    quotas: QuotaServer
    outputs: Path
    """What `pulumi stack output --json` printed."""
    environment: dict[str, str]
    """Of the launcher."""
    stack: PulumiStack
    folder: Path
    """Where the launcher works."""
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    def launch(self, command: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command of `scripts/launch.py` on the stack's outputs."""
        return self._start("launch.py", command, *arguments, **environment)

    def script(self, name: str, *arguments: str, code: int | None = 0, **environment: str) -> Ended:
        """Run another script to its end."""
        return self.finish(self._start(name, *arguments, **environment), code=code)

    def _start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / name), *arguments, "--outputs", str(self.outputs)],
            env=self.environment | environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def run(self, command: str, *arguments: str, code: int | None = 0, **environment: str) -> Ended:
        """Run a command to its end; AssertionError for another exit code."""
        return self.finish(self.launch(command, *arguments, **environment), code=code)

    def finish(self, process: subprocess.Popen[str], *, code: int | None = 0) -> Ended:
        out, err = process.communicate(timeout=PATIENCE)
        assert code is None or process.returncode == code, (
            f"exit code {process.returncode}:\n{out}\n{err}\n{self.told()}"
        )
        return Ended(process.returncode, out, err)

    def elsewhere(self, folder: Path) -> TestAccount:
        """The same account seen from another machine: an empty home, and a folder with the outputs alone."""
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        outputs = work / self.outputs.name
        outputs.write_text(self.outputs.read_text())
        return replace(self, outputs=outputs, folder=work, environment=self.environment | {"HOME": str(home)})

    def told(self) -> str:
        """What the jobs said of themselves, for a test that failed."""
        lines = [f"{job.name}: {job.status} ({job.secondary}) {job.failure or ''}" for job in self.service.jobs]
        logs = self.emulator.client("logs")
        try:
            events = logs.filter_log_events(logGroupName="/aws/sagemaker/TrainingJobs")["events"]
        except logs.exceptions.ResourceNotFoundException:
            events = []
        return "\n".join([*lines, *self.service.problems, *(event["message"] for event in events[-60:])])

    def stop(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.communicate()


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@contextmanager
def account(folder: Path, config: Mapping[str, Any] | None = None) -> Iterator[TestAccount]:
    """Everything, from nothing: the emulators, then `pulumi up`."""
    with ExitStack() as stack:
        plain = stack.enter_context(ministack(folder, auth=True))
        authority = Authority(plain.client("iam"))
        front = stack.enter_context(FrontEnd(plain.endpoint_url, folder, authority=authority))
        tls = replace(plain, endpoint_url=front.endpoint_url, ca_bundle=front.ca_bundle)
        user, keys = _make_user(tls)
        service = Service(
            folder / "jobs",
            emulator=tls,
            callers=Callers(tls, authority),
            timing=Timing(starting=0.1, stop_grace=30.0),
            container_env=_network(tls) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        server = stack.enter_context(SageMakerServer(service))
        quotas = stack.enter_context(QuotaServer(QUOTAS))
        root = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        (folder / "stack").mkdir()
        pulumi = stack.enter_context(
            PulumiStack(
                folder / "stack",
                name="dev",
                environment=_network(tls) | root | {"AWS_ENDPOINT_URL_SERVICE_QUOTAS": quotas.endpoint_url},
                config={
                    "aws:region": REGION,
                    "diloco:image": {"uri": put_image(tls)},
                    "diloco:launcher": {"attachTo": [user]},
                    **(config or {}),
                },
            )
        )
        pulumi.up().check()
        outputs = folder / "outputs.json"
        outputs.write_text(json.dumps(pulumi.outputs()))
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        environment |= _network(tls) | {
            "AWS_ENDPOINT_URL_SAGEMAKER": server.url,
            "AWS_ENDPOINT_URL_SERVICE_QUOTAS": quotas.endpoint_url,
            "AWS_ACCESS_KEY_ID": keys["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": keys["SecretAccessKey"],
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
        }
        made = TestAccount(tls, service, quotas, outputs, environment, pulumi, folder)
        stack.callback(made.stop)
        yield made


def _network(tls: Emulator) -> dict[str, str]:
    """How a process reaches the account: over TLS, and nothing of this machine's own AWS set-up."""
    return {
        "AWS_ENDPOINT_URL": tls.endpoint_url,
        "AWS_CA_BUNDLE": str(tls.ca_bundle),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def _make_user(tls: Emulator) -> tuple[str, dict[str, str]]:
    iam = tls.client("iam")
    arn = str(iam.create_user(UserName=USER)["User"]["Arn"])
    # CloudWatch Logs authorises reading a stream on the stream, as the stack's policy has it; MiniStack on its group.
    group = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{GROUP}"
    reading = {"Effect": "Allow", "Action": ["logs:GetLogEvents", "logs:DescribeLogStreams"], "Resource": group}
    document = json.dumps({"Version": "2012-10-17", "Statement": reading})
    iam.put_user_policy(UserName=USER, PolicyName="logs-of-ministack", PolicyDocument=document)
    return arn, iam.create_access_key(UserName=USER)["AccessKey"]
