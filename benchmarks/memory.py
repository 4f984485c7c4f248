"""Peak memory of one exchange, as `N` grows.

One process plays all peers and leaves their contributions in the embedded S3. The measured process holds a
pseudo-gradient of `--mib` MiB, contributes it and settles the round: it fetches and averages N payloads. Its peak
resident memory while it does so, above what it had before the pseudo-gradient was made, is compared with the claim:
under 3 fp32 payloads + 64 MiB. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import print_result, say
from diloco.embedded import EmbeddedS3, environment
from diloco.exchange.allreduce import Fragment, ObjectStoreAllReduce
from diloco.exchange.clock import SystemClock
from diloco.exchange.context import Context
from diloco.exchange.layout import Member
from diloco.exchange.records import RunRecord
from diloco.exchange.settings import ExchangeSettings
from diloco.exchange.store import open_store

TENSORS = 16


def main() -> int:
    """Measure each combination in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="8,16,32,64", help="pseudo-gradients in fp32 (default: %(default)s)")
    parser.add_argument("--replicas", default="2,8", help="world sizes (default: %(default)s)")
    parser.add_argument("--codecs", default="fp32,bf16", help="wire formats (default: %(default)s)")
    parser.add_argument("--one", nargs=5, metavar=("ROLE", "N", "MIB", "CODEC", "URI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        role, world, mib, codec, uri = options.one
        play = _play_peers if role == "peers" else _measure
        print(json.dumps(asyncio.run(play(uri, int(world), int(mib), codec))))
        return 0
    lists = (options.codecs.split(","), map(int, options.mib.split(",")), map(int, options.replicas.split(",")))
    measured = [_measure_apart(*one) for one in itertools.product(*lists)]
    return print_result({"measured": measured}, holds=all(one["peak_mib"] < one["limit_mib"] for one in measured))


def _measure_apart(codec: str, mib: int, world: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="diloco-memory-") as folder,
        EmbeddedS3(Path(folder, "s3")) as s3,
        environment(s3.env),
    ):
        for role in ("peers", "measured"):
            arguments = [role, str(world), str(mib), codec, f"{s3.uri}/memory"]
            command = [sys.executable, "-m", "benchmarks.memory", "--one", *arguments]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    one = {"codec": codec, "replicas": world, "pseudo_gradient_mib": mib, "limit_mib": 3 * mib + 64}
    one |= json.loads(done.stdout)
    say(f"{codec}, {mib} MiB, N={world}: peak {one['peak_mib']} MiB of at most {one['limit_mib']}")
    return one


def _member(uri: str, rank: int, world: int, codec: str) -> ObjectStoreAllReduce:
    run = RunRecord(
        run_id="memory",
        world_size=world,
        rounds=2,
        fragments=1,
        sync_every=1,
        codec=codec,
        policy="strict",
        min_replicas=world,
        outer_lr=0.7,
        outer_momentum=0.9,
        nesterov=True,
        chunk_bytes=2**19,
        parameters={},
        constants={},
    )
    return ObjectStoreAllReduce(Context(open_store(uri), SystemClock(), Member(rank, 1), ExchangeSettings(), run))


def _fragment(mib: int) -> Fragment:
    return Fragment(index=0, numel=mib * 2**18, layout="layout", base_digest="base")


def _tensors(mib: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(mib * 2**18 // TENSORS, generator=generator) for _ in range(TENSORS)]


async def _play_peers(uri: str, world: int, mib: int, codec: str) -> dict[str, Any]:
    for rank in range(1, world):
        peer = _member(uri, rank, world, codec)
        for round_, size in enumerate((1, mib)):
            await peer.contribute(round_, _fragment(size), _tensors(size, rank), weight=1)
        await peer.context.store.close()
    return {}


async def _measure(uri: str, world: int, mib: int, codec: str) -> dict[str, Any]:
    me = _member(uri, 0, world, codec)
    # A first small round: connections, thread pools and imports are no part of an exchange.
    tensors = _tensors(1, 0)
    await me.contribute(0, _fragment(1), tensors, weight=1)
    await me.settle(0, _fragment(1), tensors)
    before = _kib("VmRSS")
    tensors = _tensors(mib, 0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    await me.contribute(1, _fragment(mib), tensors, weight=1)
    outcome = await me.settle(1, _fragment(mib), tensors)
    peak = _kib("VmHWM")
    await me.context.store.close()
    return {"participants": len(outcome.commit.participants), "peak_mib": round((peak - before) / 1024, 1)}


def _kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    sys.exit(main())
