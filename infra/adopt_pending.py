"""After a crash of `pulumi up`: take what was being created, and exists, into the state under its id.

    pulumi cancel && pulumi stack export --file state.json      # "pending_operations" names what may or may not exist
    python infra/adopt_pending.py state.json 'urn:pulumi:…::diloco-prod-jobs=diloco-prod-jobs-1a2b3c4'
    pulumi stack import --file state.json && pulumi refresh --clear-pending-creates && pulumi up

What is not named is forgotten by `--clear-pending-creates`, and made anew by `up`. (`pulumi refresh
--import-pending-creates` of Pulumi 3.274 drops the operation without importing anything.)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

USAGE = "usage: python infra/adopt_pending.py STATE_FILE URN=ID …"


def adopt(exported: Mapping[str, Any], ids: Mapping[str, str]) -> dict[str, Any]:
    """The exported stack with each named pending creation as a resource. ValueError names URNs that are not pending."""
    deployment = dict(exported["deployment"])
    pending = deployment.get("pending_operations") or []
    creations = {one["resource"]["urn"]: one["resource"] for one in pending if one["type"] == "creating"}
    if unknown := sorted(ids.keys() - creations.keys()):
        known = "\n  ".join(sorted(creations)) or "none"
        raise ValueError(f"not being created: {', '.join(unknown)}; pending creations:\n  {known}")
    # At the end: nothing can depend on what was never made known.
    adopted = [{**creations[urn], "id": name} for urn, name in ids.items()]
    deployment["resources"] = [*deployment.get("resources", []), *adopted]
    deployment["pending_operations"] = [one for one in pending if one["resource"]["urn"] not in ids]
    return {**exported, "deployment": deployment}


def main(arguments: list[str]) -> None:
    """The command line; rewrites the file. SystemExit says what is wrong."""
    file, *pairs = arguments or [""]
    split = [pair.rpartition("=") for pair in pairs]
    if not file or not pairs or not all(urn and name for urn, _, name in split):
        raise SystemExit(USAGE)
    try:
        state = json.loads(Path(file).read_text())
        adopted = adopt(state, {urn: name for urn, _, name in split})
    except (OSError, ValueError, KeyError) as problem:
        raise SystemExit(f"{file}: {problem}") from None
    Path(file).write_text(json.dumps(adopted, indent=4))


if __name__ == "__main__":
    main(sys.argv[1:])
