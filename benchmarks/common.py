"""What all benchmarks share: the machine's name, and how a result is printed."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures were measured on: processor, usable cores, memory, versions."""
    import torch

    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [
            line.split(":", 1)[1].strip() for line in information.read_text().splitlines() if "model name" in line
        ]
        processor = models[0] if models else processor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor,
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def print_result(figures: dict[str, Any], *, holds: bool) -> int:
    """Print the figures with the machine's name; returns the exit code, 1 if the claim does not hold."""
    print(json.dumps({"machine": machine(), **figures, "holds": holds}, indent=2))
    return 0 if holds else 1


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
