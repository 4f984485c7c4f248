"""The program: reads Settings, composes components, exports outputs; nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `main: infra` puts only this folder there

from infra.environment import environment

environment()
