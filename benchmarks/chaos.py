"""What faults cost: one run without any, then the same run while replicas are killed and stopped and the store fails.

Replicas are real processes of this machine, supervised as `launch.py run` does it, on the embedded S3 behind a loopback
proxy. Inner steps are paced to a fixed time, so that two cores do not speed up the survivors. Of 40 faults 10 are
SIGKILLs of a replica, 5 stop one for a second (SIGSTOP, SIGCONT), and 25 hit one request to the store: 500, 503, a
reset before or after the request went through, a body cut short either way, one that trickles, a late one. They are
spread evenly over the run, each at a random moment of its share, in an order drawn from `--seed`.

Tokens are counted where they matter: the weights of the contributions that commits name. Claims: at least 99 % of the
rounds are committed; the share of the fault-free throughput that is lost, scaled from `--faults-per-hour` to 125 an
hour, is at most 2 %; all digests are equal; every kill is recovered from.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import print_result, say
from diloco.embedded import EmbeddedS3
from diloco.exchange import layout
from diloco.exchange.clock import SystemClock
from diloco.exchange.membership import newest_attempts
from diloco.exchange.records import Claim, Commit
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import open_store, read_if_there
from diloco.exchange.verify import verify
from diloco.executors.local import LocalProcessExecutor
from diloco.run import make_diloco_run
from diloco.spec import RunSettings
from tests.support.faults import TRANSIENT, FaultProxy, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.exchange.layout import Member
    from diloco.exchange.store import Store
    from diloco.exchange.verify import Verdict
    from diloco.report import RunReport

MIX = {"kill": 10, "stop": 5, "store": 25}
STOP_SECONDS = 1.0
ANCHOR = 125.0
"""Faults an hour to which the loss is scaled: those of ft-diloco's published figure."""
MOST_LOST, LEAST_COMMITTED = 0.02, 0.99
LOOK_EVERY = 0.1


@dataclass
class _Kill:
    member: Member
    at: float
    rejoined: float | None = None
    """When a later attempt of the rank had a contribution committed."""
    claimed: float | None = None
    """When that attempt had claimed its place."""


@dataclass
class _Watch:
    """What is seen of a run from outside, on this process's clock."""

    committed: list[tuple[float, Commit]] = field(default_factory=list)
    claims: dict[Member, float] = field(default_factory=dict)

    def tokens(self, seconds: float) -> float:
        """Committed tokens in the first `seconds` after the first commit."""
        began = self.committed[0][0]
        return sum(_tokens(commit) for at, commit in self.committed[1:] if at - began <= seconds)

    @property
    def seconds(self) -> float:
        """From the first commit to the last."""
        return self.committed[-1][0] - self.committed[0][0]


def _tokens(commit: Commit) -> int:
    return sum(participant.weight for participant in commit.participants)


class _Bench:
    def __init__(self, options: argparse.Namespace, s3: EmbeddedS3, proxy: FaultProxy, folder: Path) -> None:
        self._options, self._s3, self._proxy, self._folder = options, s3, proxy, folder
        every = round(options.round_seconds / options.step_seconds)
        self._sync_every = every
        self._steps = round(options.minutes * 60 / options.round_seconds) * every
        self._random = random.Random(options.seed)

    def run(self, name: str, faults: Sequence[str]) -> tuple[RunReport, _Watch, list[_Kill], Verdict]:
        """One run to its end, with these faults spread over it; what was seen of it, and what its bucket says."""
        settings = RunSettings.checked(
            replicas=self._options.replicas,
            steps=self._steps,
            sync_every=self._sync_every,
            sync_delay=int(self._sync_every * self._options.overlap),
            run_id=name,
            rendezvous=f"{self._s3.uri}/chaos",
            trainer_module="benchmarks.paced",
            trainer_fn="train",
            trainer_kwargs={"step_seconds": self._options.step_seconds},
            max_restarts=1000,
            exchange=ExchangeSettings(policy="skip", timeout=120.0),
        )
        executor = LocalProcessExecutor(log_dir=self._folder / name, env=self._env())
        reports: list[RunReport | BaseException] = []

        def launch() -> None:
            try:
                reports.append(make_diloco_run(executor, settings, storage_options=self._s3.storage_options))
            except BaseException as problem:  # noqa: BLE001 - raised in the main thread
                reports.append(problem)

        launching = threading.Thread(target=launch)
        launching.start()
        watch, kills = asyncio.run(self._follow(settings.uri, faults, launching))
        launching.join()
        [report] = reports
        if isinstance(report, BaseException):
            raise report
        if report.error is not None:
            sys.exit(f"the run {name} failed: {report.error}")
        return report, watch, kills, asyncio.run(self._verify(settings.uri))

    def _env(self) -> dict[str, str | None]:
        url = self._proxy.endpoint_url
        return self._s3.env | {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url}

    async def _verify(self, uri: str) -> Verdict:
        store = open_store(uri, storage_options=self._s3.storage_options)
        try:
            return await verify(store, SystemClock())
        finally:
            await store.close()

    async def _follow(self, uri: str, faults: Sequence[str], launching: threading.Thread) -> tuple[_Watch, list[_Kill]]:
        """Watch the run until it has ended, and inject the faults from its first commit on."""
        store = open_store(uri, storage_options=self._s3.storage_options)
        watch, kills = _Watch(), list[_Kill]()
        injecting: asyncio.Task[None] | None = None
        try:
            while launching.is_alive():
                await self._look(store, watch)
                if injecting is None and watch.committed:
                    injecting = asyncio.create_task(self._inject(store, faults, kills))
                if injecting is not None and injecting.done():
                    injecting.result()
                await asyncio.sleep(LOOK_EVERY)
            await self._look(store, watch)
        finally:
            if injecting is not None:
                injecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await injecting
            await store.close()
        for kill in kills:
            _recovery(kill, watch)
        return watch, kills

    async def _look(self, store: Store, watch: _Watch) -> None:
        while (data := await read_if_there(store, layout.commit(len(watch.committed)))) is not None:
            watch.committed.append((time.monotonic(), Commit.from_json(data, "commit")))
        for rank, attempt in (await newest_attempts(store)).items():
            watch.claims.setdefault(layout.Member(rank, attempt), time.monotonic())

    async def _inject(self, store: Store, faults: Sequence[str], kills: list[_Kill]) -> None:
        """Each fault at a random moment of its share of the run."""
        began, share = time.monotonic(), self._options.minutes * 60 / max(len(faults), 1)
        for number, fault in enumerate(faults):
            due = began + (number + self._random.random()) * share
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if fault in ("kill", "stop"):
                await self._signal(store, fault, kills)
            else:
                self._proxy.add(Rule(fault))

    async def _signal(self, store: Store, fault: str, kills: list[_Kill]) -> None:
        """Hit a random replica; one that is down already is no target."""
        newest = [layout.Member(rank, attempt) for rank, attempt in sorted((await newest_attempts(store)).items())]
        for member in self._random.sample(newest, len(newest)):
            data = await store.read(layout.claim(member))
            pid = Claim.from_json(data, "claim").pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                say(f"{fault}: {member}")
                if fault == "kill":
                    kills.append(_Kill(member, time.monotonic()))
                    return
                await asyncio.sleep(STOP_SECONDS)
                os.kill(pid, signal.SIGCONT)
                return


def _recovery(kill: _Kill, watch: _Watch) -> None:
    """Find when a later attempt of the rank was back."""
    later = {member: at for member, at in watch.claims.items() if member.rank == kill.member.rank and at > kill.at}
    kill.claimed = min(later.values(), default=None)
    for at, commit in watch.committed:
        if any(p.rank == kill.member.rank and p.attempt > kill.member.attempt for p in commit.participants):
            kill.rejoined = at
            return


def _plan(count: int, chance: random.Random) -> list[str]:
    """So many faults in the proportions of MIX, in random order; the store's by kind in turn."""
    total = sum(MIX.values())
    numbers = {kind: round(count * share / total) for kind, share in MIX.items()}
    store = [TRANSIENT[number % len(TRANSIENT)] for number in range(numbers["store"])]
    faults = ["kill"] * numbers["kill"] + ["stop"] * numbers["stop"] + store
    chance.shuffle(faults)
    return faults


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--faults-per-hour", type=float, default=600.0, help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each of the two runs (default: %(default)s)")
    parser.add_argument("--round-seconds", type=float, default=4.0, help="of inner steps (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="of one inner step (default: %(default)s)")
    parser.add_argument(
        "--overlap", type=float, default=0.5, help="share of a round's inner steps that the exchange overlaps with"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    options = parser.parse_args()
    faults = _plan(round(options.faults_per_hour * options.minutes / 60), random.Random(options.seed))
    with (
        tempfile.TemporaryDirectory(prefix="diloco-chaos-") as folder,
        EmbeddedS3(Path(folder, "s3")) as s3,
        FaultProxy(s3.endpoint_url) as proxy,
    ):
        bench = _Bench(options, s3, proxy, Path(folder, "logs"))
        say("without faults")
        _, calm, _, _ = bench.run("calm", [])
        say(f"with {len(faults)} faults")
        report, stormy, kills, verdict = bench.run("storm", faults)
        injected = Counter(kind for kind in faults if kind == "stop") + Counter(proxy.counts)
    injected["kill"] = len(kills)
    seconds = min(calm.seconds, stormy.seconds)
    throughput = stormy.tokens(seconds) / calm.tokens(seconds)
    lost = (1 - throughput) * ANCHOR / options.faults_per_hour
    committed = (report.rounds_committed or 0) / report.rounds_expected
    recovered = [kill for kill in kills if kill.rejoined is not None]
    final = {line.digest for line in report.replicas}
    equal = verdict.same and len(final) == 1 and None not in final
    figures = {
        "replicas": options.replicas,
        "faults_per_hour": options.faults_per_hour,
        "round_seconds": options.round_seconds,
        "overlap": options.overlap,
        "faults": dict(sorted(injected.items())),
        "rounds_attempted": report.rounds_expected,
        "rounds_committed": report.rounds_committed,
        "seconds_compared": round(seconds, 1),
        "tokens_fault_free": calm.tokens(seconds),
        "tokens_with_faults": stormy.tokens(seconds),
        "throughput": round(throughput, 4),
        "throughput_at_125_an_hour": round(1 - lost, 4),
        "kills": len(kills),
        "kills_recovered": len(recovered),
        "claimed_again_seconds": _spread([k.claimed - k.at for k in kills if k.claimed is not None]),
        "rejoin_seconds": _spread([k.rejoined - k.at for k in recovered if k.rejoined is not None]),
        "digests_compared": verdict.compared,
        "digests_equal": verdict.compared - len(verdict.differences),
        "final_digests": f"{sum(line.digest is not None for line in report.replicas)} of {options.replicas}"
        + (", equal" if len(final) == 1 else ", DIFFERENT"),
    }
    holds = (
        committed >= LEAST_COMMITTED and lost <= MOST_LOST and equal and len(recovered) == len(kills) and bool(kills)
    )
    return print_result(figures, holds=holds)


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {
        "median": round(statistics.median(seconds), 2),
        "most": round(max(seconds), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
