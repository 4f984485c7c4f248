#!/usr/bin/env python
"""Door to the command line (:mod:`diloco.cli`) that works from a checkout, from any folder, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

try:
    from diloco.cli import main
except ModuleNotFoundError as missing:
    if missing.name in (None, "diloco"):
        raise
    sys.exit(
        f"diloco: error: this Python ({sys.executable}) has no {missing.name}: run `make install` in {ROOT}, then use "
        f"{ROOT / '.venv' / 'bin' / 'python'} or activate .venv"
    )

if __name__ == "__main__":
    sys.exit(main())
