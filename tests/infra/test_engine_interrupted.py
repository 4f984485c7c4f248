"""An `up` that is cut short: by Ctrl-C, by a crash of the CLI, by a refusal of AWS half-way."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from infra import adopt_pending
from tests.infra.conftest import inventory

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from tests.infra.conftest import MakeStack
    from tests.support.gate import Gate
    from tests.support.sagemaker.emulator import Emulator


def test_up_goes_on_after_an_interrupt(make_stack: MakeStack, gate: Gate, aws: Emulator) -> None:
    before = inventory(aws)
    stack = make_stack()
    held = gate.hold("iam", "CreateRole")
    running = stack.start("up", "--yes", "--skip-preview")
    running.until(held.reached.is_set, "the role's creation")

    running.signal(signal.SIGINT)
    running.until(lambda: "cancelling" in running.text(), "the engine's notice")
    held.release()
    interrupted = running.wait().failed()

    # What was on its way is finished and known; nothing after it was begun.
    assert stack.state().get("pending_operations", []) == []
    assert "Role diloco-dev-jobs" in _known(stack.resources())
    assert "Policy diloco-dev-launcher" not in _known(stack.resources())
    assert "Traceback" not in interrupted.text

    stack.up().check()
    stack.preview("--refresh", "--expect-no-changes").check()
    made = {kind: len(names - before[kind]) for kind, names in inventory(aws).items()}
    assert {kind: number for kind, number in made.items() if number} == {"buckets": 1, "roles": 1, "policies": 1}


CREATED = {
    "CreateRole": ("roles", "aws:iam/role:Role::diloco-dev-jobs"),
    "CreateBucket": ("buckets", "aws:s3/bucket:Bucket::diloco-dev-sagemaker"),
}


@pytest.mark.parametrize("call", CREATED)
def test_after_a_crash_cancel_and_adopting_what_was_pending_do(
    call: str, make_stack: MakeStack, gate: Gate, aws: Emulator, tmp_path: Path
) -> None:
    """The procedure of docs/infrastructure.md, at the worst moment: a thing is made, and nobody knows it."""
    before = inventory(aws)
    stack = make_stack()
    held = gate.hold("s3" if call == "CreateBucket" else "iam", call, answered=True)
    running = stack.start("up", "--yes", "--skip-preview")
    running.until(held.reached.is_set, call)
    running.signal(signal.SIGKILL)
    running.wait().failed()
    held.release()

    assert "pulumi cancel" in stack.up().failed().text
    stack.cancel().check()

    file = tmp_path / "state.json"
    stack("stack", "export", "--stack", stack.name, "--file", str(file)).check()
    deployment = json.loads(file.read_text())["deployment"]
    known = {one.get("id") for one in deployment["resources"]}
    # The other of the two may have been on its way as well.
    lost = {
        one["resource"]["urn"]: name
        for one in deployment["pending_operations"]
        for kind, urn_end in CREATED.values()
        for name in inventory(aws)[kind] - before[kind] - known
        if one["resource"]["urn"].endswith(urn_end)
    }
    assert any(urn.endswith(CREATED[call][1]) for urn in lost)
    adopt_pending.main([str(file), *(f"{urn}={name}" for urn, name in lost.items())])
    stack("stack", "import", "--stack", stack.name, "--file", str(file)).check()
    stack.refresh("--clear-pending-creates").check()

    finished = stack.up().check()
    assert not {change for change in finished.changes if "replace" in change or "delete" in change}
    stack.preview("--refresh", "--expect-no-changes").check()
    made = {kind: len(names - before[kind]) for kind, names in inventory(aws).items()}
    assert {kind: number for kind, number in made.items() if number} == {"buckets": 1, "roles": 1, "policies": 1}
    assert set(lost.values()) <= {one.get("id") for one in stack.resources()}

    stack.destroy().check()
    assert inventory(aws) == before


def test_only_what_is_being_created_can_be_adopted(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text(json.dumps({"version": 3, "deployment": {"resources": []}}))
    with pytest.raises(SystemExit, match="not being created: urn:a; pending creations:\n  none"):
        adopt_pending.main([str(file), "urn:a=b"])
    with pytest.raises(SystemExit, match="usage"):
        adopt_pending.main([str(file), "urn:a"])


def test_a_refusal_half_way_leaves_nothing_unmanaged(make_stack: MakeStack, gate: Gate, aws: Emulator) -> None:
    """The bucket exists when AWS refuses its tags: it is in the state all the same, and the next `up` completes it."""
    before = inventory(aws)
    stack = make_stack()
    gate.refuse("s3", "PUT tagging")

    refused = stack.up().failed()
    assert "AccessDenied" in refused.errors
    (bucket,) = inventory(aws)["buckets"] - before["buckets"]
    assert bucket in {one.get("id") for one in stack.resources()}

    gate.allow()
    repaired = stack.up().check()
    assert "Bucket diloco-dev-sagemaker" in repaired.of("update")
    stack.preview("--refresh", "--expect-no-changes").check()
    assert inventory(aws)["buckets"] - before["buckets"] == {bucket}
    assert aws.client("s3").get_bucket_tagging(Bucket=bucket)["TagSet"]


def _known(resources: list[dict[str, Any]]) -> set[str]:
    return {f"{one['type'].rpartition(':')[2]} {one['urn'].rpartition('::')[2]}" for one in resources}
