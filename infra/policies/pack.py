"""The rules as policies of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulumi_policy import (
    EnforcementLevel,
    PolicyPack,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)

from infra.policies.rules import COMPANIONS, RULES

if TYPE_CHECKING:
    from pulumi_policy import Policy

    from infra.policies.rules import Companion, Rule


def make_pack() -> PolicyPack:
    """The pack with all rules, each under the name of the scanner's rule that it stands for."""
    policies: list[Policy] = [*map(_of_rule, RULES), *map(_of_companion, COMPANIONS)]
    return PolicyPack(name="diloco", enforcement_level=EnforcementLevel.MANDATORY, policies=policies)


def _of_rule(rule: Rule) -> ResourceValidationPolicy:
    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        if args.resource_type in rule.types:
            for problem in rule.check(args.props):
                report(f"{args.name}: {problem}", args.urn)

    return ResourceValidationPolicy(name=rule.name, description=rule.description, validate=validate)


def _of_companion(rule: Companion) -> StackValidationPolicy:
    def validate(args: StackValidationArgs, report: ReportViolation) -> None:
        accompanied = {
            owner.urn
            for resource in args.resources
            if resource.resource_type == rule.companion
            for owner in resource.property_dependencies.get("bucket", [])
        }
        for resource in args.resources:
            if resource.resource_type == rule.type and resource.urn not in accompanied:
                report(f"{resource.name}: {rule.problem}", resource.urn)

    return StackValidationPolicy(name=rule.name, description=rule.description, validate=validate)
