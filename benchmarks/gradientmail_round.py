"""One learner of GradientMail 0.0.2, for `benchmarks/round.py`: it runs in GradientMail's own environment, Python 3.12.

Standard DiLoCo as its documentation describes it: one fragment, a barrier at every round, all learners in the quorum,
the weighted mean. All else is its default, but for the poll interval, which is a second there and would be most of a
round here.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from itertools import pairwise

import gradientmail as gm  # type: ignore[import-not-found]
import torch
from gradientmail.algorithms.diloco import WeightedMean  # type: ignore[import-not-found]

POLL_SECONDS = 0.1


def main() -> None:
    """Take part in `rounds` + 1 rounds, and print what was measured."""
    settings = json.loads(sys.argv[1])
    model = torch.nn.Module()
    for index in range(16):
        values = torch.zeros(settings["mib"] * 2**18 // 16)
        model.register_parameter(f"weight{index}", torch.nn.Parameter(values))
    narrow = {"delta_dtype": "F4", "commit_dtype": "F4"} if settings["codec"] == "int4" else {}
    mailbox = gm.S3Mailbox(
        bucket=settings["bucket"], prefix="gradientmail", endpoint_url=os.environ["AWS_ENDPOINT_URL"]
    )
    requests = 0

    def count(**_: object) -> None:
        nonlocal requests
        requests += 1

    mailbox._client.meta.events.register("before-send.s3", count)
    session = gm.Session(
        model,
        algorithm=gm.DiLoCo(
            sync_every=1,
            fragments=1,
            in_flight=1,
            overlap_steps=0,
            follow=0,
            quorum_size=settings["replicas"],
            merge=WeightedMean(),
            **narrow,
        ),
        mailbox=mailbox,
        node_id=f"node-{settings['rank']}",
        poll_interval=POLL_SECONDS,
        callbacks=(),
    )
    session.join()
    generator = torch.Generator().manual_seed(settings["rank"])
    starts: list[float] = []

    def step(_: int) -> int:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(torch.randn(parameter.shape, generator=generator))
        starts.append(time.monotonic())
        return 1

    # The step after a round begins when the round is in the model: one more than are measured.
    session.run(step, range(settings["rounds"] + 2))
    spans = list(pairwise(starts))
    whole = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(
        json.dumps(
            {
                "spans": spans,
                "requests": requests,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "digest": whole,
            }
        )
    )


if __name__ == "__main__":
    main()
