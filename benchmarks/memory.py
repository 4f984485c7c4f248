"""Peak memory of one exchange, as `N` grows.

One process plays all peers and leaves their contributions in the embedded S3. The measured process holds a
pseudo-gradient of `--mib` MiB, contributes it and settles the round: it fetches and averages N payloads. Its peak
resident memory while it does so, above what it had before the pseudo-gradient was made, is compared with the claim:
under 3 payloads + 64 MiB. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import asyncio
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
    """Measure for each N, each in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="payload in fp32 (default: %(default)s)")
    parser.add_argument("--replicas", default="2,8", help="world sizes (default: %(default)s)")
    parser.add_argument("--codec", default="fp32", help="wire format (default: %(default)s)")
    parser.add_argument("--one", nargs=3, metavar=("ROLE", "N", "URI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        role, world, uri = options.one
        play = _play_peers if role == "peers" else _measure
        print(json.dumps(asyncio.run(play(uri, int(world), options.mib, options.codec))))
        return 0
    limit = 3 * options.mib + 64
    peaks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="diloco-memory-") as folder:
        for world in map(int, options.replicas.split(",")):
            with EmbeddedS3(Path(folder, f"s3-{world}")) as s3, environment(s3.env):
                uri = f"{s3.uri}/memory-{world}"
                for role in ("peers", "measured"):
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.memory",
                        "--mib",
                        str(options.mib),
                        "--codec",
                        options.codec,
                    ]
                    done = subprocess.run(
                        [*command, "--one", role, str(world), uri], check=True, stdout=subprocess.PIPE
                    )
                peaks[str(world)] = json.loads(done.stdout)
                say(f"N={world}: peak {peaks[str(world)]['peak_mib']} MiB of at most {limit}")
    figures = {"payload_mib": options.mib, "codec": options.codec, "limit_mib": limit, "by_replicas": peaks}
    return print_result(figures, holds=all(peak["peak_mib"] < limit for peak in peaks.values()))


def _member(uri: str, rank: int, world: int, codec: str) -> ObjectStoreAllReduce:
    run = RunRecord(
        run_id="memory",
        world_size=world,
        rounds=1,
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
        await peer.contribute(0, _fragment(mib), _tensors(mib, rank), weight=1)
        await peer.context.store.close()
    return {}


async def _measure(uri: str, world: int, mib: int, codec: str) -> dict[str, Any]:
    me = _member(uri, 0, world, codec)
    await me.context.store.list("warm-up/")  # connections and imports are no part of an exchange
    before = _kib("VmRSS")
    tensors = _tensors(mib, 0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    await me.contribute(0, _fragment(mib), tensors, weight=1)
    after_upload = _kib("VmHWM")
    outcome = await me.settle(0, _fragment(mib), tensors)
    peak = _kib("VmHWM")
    await me.context.store.close()
    return {
        "participants": len(outcome.commit.participants),
        "peak_mib": round((peak - before) / 1024, 1),
        "peak_until_uploaded_mib": round((after_upload - before) / 1024, 1),
        "requests": me.context.store.stats.requests,
    }


def _kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    sys.exit(main())
