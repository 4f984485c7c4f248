"""The policy pack: `pulumi preview --policy-pack infra/policies`. Every violation stops the update."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from infra.policies.pack import make_pack

make_pack()
