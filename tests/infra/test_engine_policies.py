"""The policy pack, run by the real engine: it passes the environment, and stops a program that breaks every rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infra.policies.rules import COMPANIONS, RULES
from tests.infra.test_engine_lifecycle import CONFIGURATIONS
from tests.support.engine import ROOT

if TYPE_CHECKING:
    from tests.infra.conftest import MakeStack
    from tests.support.pulumi_stack import Done

PACK = ("--policy-pack", str(ROOT / "infra" / "policies"))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_environment_violates_nothing(configuration: str, make_stack: MakeStack) -> None:
    stack = make_stack(CONFIGURATIONS[configuration] | {"protect": False}, name="prod")
    stack.preview(*PACK).check()
    # Names and policies that are unknown in a preview are known here.
    assert _violations(stack.up(*PACK).check()) == set()


def test_every_rule_stops_a_program_that_breaks_it(make_stack: MakeStack) -> None:
    stack = make_stack(main=ROOT / "tests" / "support" / "violations")
    stopped = stack.preview(*PACK).failed()
    assert _violations(stopped) == {rule.name for rule in (*RULES, *COMPANIONS)}


def _violations(done: Done) -> set[str]:
    return {event["policyEvent"]["policyName"] for event in done.events if "policyEvent" in event}
