"""Real binaries that some tests need (the Pulumi CLI, a Kubernetes control plane): where they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".engine"


def path_with_engine() -> str:
    """PATH with the unpacked binaries' folder in front: `$DILOCO_ENGINE`, else `.engine` in the checkout."""
    folder = os.environ.get("DILOCO_ENGINE", str(FOLDER))
    return os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])


def require(*names: str) -> dict[str, Path]:
    """Name → path of each binary. Skips the test when one is missing, which under `DILOCO_REQUIRE_ALL=1` fails it."""
    found = {name: shutil.which(name, path=path_with_engine()) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)}. Put their official releases on PATH, or into a folder that "
            "$DILOCO_ENGINE names (default: .engine in the checkout)"
        )
    return {name: Path(path) for name, path in found.items() if path is not None}
