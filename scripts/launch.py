#!/usr/bin/env python
"""Door to the command line (:mod:`diloco.cli`) that works from a checkout, from any folder, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diloco.cli import main

if __name__ == "__main__":
    sys.exit(main())
