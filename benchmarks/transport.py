"""Who carries bulk payloads best, side by side on one server: the exchange with s3fs alone, the exchange with obstore,
or the AWS CRT.

Each creates one object of `--mib` and reads it back in blocks of 8 MiB, in order, as an average does; the CRT with as
many parts and requests at once as s3fs. Once straight from the embedded S3, once through a link of `--mbps`
and `--latency-ms` a way. Contenders take turns, the median of `--rounds` counts. CPU time is that of the client's
process: where server and clients share cores, as here, it says more than the seconds do. Peak memory is beyond the
object (Linux).

awscrt is no dependency: `pip install awscrt`; who is missing is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import print_result, say
from benchmarks.link import Lane, Link
from diloco.embedded import BUCKET, REGION, EmbeddedS3, environment
from diloco.exchange.remote import CONCURRENT_PARTS, PART_BYTES
from diloco.exchange.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Transport = Callable[[str, bytearray], Coroutine[Any, Any, tuple[float, float]]]

CONTENDERS = {"s3fs": "s3fs", "obstore": "obstore", "crt": "awscrt"}
"""The module that each needs."""


def _same(found: object, expected: object) -> None:
    if found != expected:
        sys.exit("what came back is not what was sent")


async def _exchange(key: str, data: bytearray) -> tuple[float, float]:
    store = open_store(f"s3://{BUCKET}/transport")
    await store.open()
    try:
        began = time.monotonic()
        _same(await store.create(key, data), True)
        up = time.monotonic() - began
        began, start = time.monotonic(), 0
        async for block in store.stream(key, 0, len(data)):
            _same(memoryview(block), memoryview(data)[start : start + len(block)])
            start += len(block)
        return up, time.monotonic() - began
    finally:
        await store.close()


async def _crt(key: str, data: bytearray) -> tuple[float, float]:
    from awscrt import auth, http, s3  # type: ignore[import-untyped,import-not-found,unused-ignore]

    provider = auth.AwsCredentialsProvider.new_static(
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    )
    client = s3.S3Client(
        region=REGION,
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        credential_provider=provider,
        part_size=PART_BYTES,
        multipart_upload_threshold=2 * PART_BYTES,
    )
    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    path = f"/{BUCKET}/transport/{key}"

    async def request(kind: Any, method: str, *headers: tuple[str, str], **options: Any) -> None:
        body = options.pop("body", None)
        asked = http.HttpRequest(method, path, http.HttpHeaders([("host", host), *headers]), body)
        done = client.make_request(
            type=kind, request=asked, max_active_connections_override=CONCURRENT_PARTS, **options
        )
        await asyncio.wrap_future(done.finished_future)

    began = time.monotonic()
    put = s3.S3RequestType.PUT_OBJECT
    length = ("content-length", str(len(data)))
    await request(put, "PUT", length, ("if-none-match", "*"), body=io.BytesIO(data))
    up = time.monotonic() - began

    def compare(*, chunk: bytes, offset: int, **_: Any) -> None:
        _same(chunk, data[offset : offset + len(chunk)])

    began = time.monotonic()
    await request(s3.S3RequestType.GET_OBJECT, "GET", on_body=compare)
    return up, time.monotonic() - began


TRANSPORTS: dict[str, Transport] = {"s3fs": _exchange, "obstore": _exchange, "crt": _crt}


def _measure(name: str, key: str, mib: int) -> dict[str, Any]:
    """In a process of its own: one transfer up and down, after a small one that loads and connects."""
    transport = TRANSPORTS[name]
    if name == "s3fs":
        sys.modules["obstore"] = sys.modules["obstore.store"] = None  # type: ignore[assignment]
    asyncio.run(transport(f"{key}-small", bytearray(2**20)))
    data = bytearray(mib * 2**20)
    for start in range(0, len(data), 2**20):
        data[start : start + 2**20] = os.urandom(2**20)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, cpu = _kib("VmRSS"), time.process_time()
    up, down = asyncio.run(transport(key, data))
    return {
        "up_seconds": up,
        "down_seconds": down,
        "cpu_seconds": time.process_time() - cpu,
        "extra_mib": (_kib("VmHWM") - before) / 1024,
    }


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--mbps", type=float, default=200.0, help="of the link (default: %(default)s)")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="one way (default: %(default)s)")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "KEY", "MIB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, key, mib = options.one
        print(json.dumps(_measure(name, key, int(mib))))
        return 0
    names = [name for name, module in CONTENDERS.items() if importlib.util.find_spec(module)]
    measured: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="diloco-transport-") as folder,
        EmbeddedS3(Path(folder, "s3")) as s3,
        Link(s3.endpoint_url, Lane(options.mbps, options.latency_ms), Lane(options.mbps, options.latency_ms)) as link,
    ):
        for way, url in (("straight", s3.endpoint_url), ("link", link.endpoint_url)):
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for round_ in range(options.rounds):
                for name in names:
                    runs[name].append(_apart(s3, url, name, f"{way}-{name}-{round_}", options.mib))
                    say(f"{way}, {name}: {runs[name][-1]}")
            measured[way] = {
                name: {figure: round(statistics.median(run[figure] for run in ones), 3) for figure in ones[0]}
                for name, ones in runs.items()
            }
    floor = options.mib * 2**20 * 8 / (options.mbps * 1e6)
    figures = {"mib": options.mib, "mbps": options.mbps, "latency_ms": options.latency_ms, "floor_seconds": floor}
    figures["missing"] = [name for name in CONTENDERS if name not in names]
    return print_result(figures | {"measured": measured}, holds=True)


def _apart(s3: EmbeddedS3, url: str, name: str, key: str, mib: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.transport", "--one", name, key, str(mib)]
    with environment(s3.env | {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_S3": url}):
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


if __name__ == "__main__":
    sys.exit(main())
