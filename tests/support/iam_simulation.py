"""IAM's SimulatePrincipalPolicy on stored policies: each action on each resource, with the context entries given.

https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.iam_authority import Authority

ACTION = "SimulatePrincipalPolicy"
NAMESPACE = "https://iam.amazonaws.com/doc/2010-05-08/"
UNDERSTOOD = ("Action", "Version", "PolicySourceArn", "ActionNames", "ResourceArns", "ContextEntries", "MaxItems")


@dataclass(frozen=True)
class Answer:
    """What goes back to the client."""

    status: int
    text: str


def simulate(authority: Authority, form: Mapping[str, str]) -> Answer:
    """Answer a request's form. Parameters that change the outcome and are not understood are refused, not ignored.

    One result for each pair of action and resource. As on AWS, a condition key without a context entry counts as absent
    (`aws:SecureTransport` too, for which :class:`Authority` would otherwise assume TLS).
    """
    unknown = sorted({name.partition(".")[0] for name in form} - set(UNDERSTOOD))
    if unknown:
        return _error("InvalidInput", f"this stand-in does not evaluate {', '.join(unknown)}")
    context = {"aws:SecureTransport": "", **dict(_context(form))}
    results = []
    for action in _members(form, "ActionNames"):
        for resource in _members(form, "ResourceArns") or ["*"]:
            decision = authority.authorise(form["PolicySourceArn"], action, resource, context)
            results.append(
                f"<member><EvalActionName>{escape(action)}</EvalActionName>"
                f"<EvalResourceName>{escape(resource)}</EvalResourceName>"
                f"<EvalDecision>{decision.kind}</EvalDecision>"
                "<MatchedStatements/><MissingContextValues/></member>"
            )
    return Answer(
        200,
        f'<{ACTION}Response xmlns="{NAMESPACE}"><{ACTION}Result><IsTruncated>false</IsTruncated>'
        f"<EvaluationResults>{''.join(results)}</EvaluationResults></{ACTION}Result>"
        f"<ResponseMetadata><RequestId>simulated</RequestId></ResponseMetadata></{ACTION}Response>",
    )


def _members(form: Mapping[str, str], name: str) -> list[str]:
    found: list[str] = []
    while (value := form.get(f"{name}.member.{len(found) + 1}")) is not None:
        found.append(value)
    return found


def _context(form: Mapping[str, str]) -> Iterator[tuple[str, str | list[str]]]:
    number = 1
    while (key := form.get(f"ContextEntries.member.{number}.ContextKeyName")) is not None:
        values = _members(form, f"ContextEntries.member.{number}.ContextKeyValues")
        several = form.get(f"ContextEntries.member.{number}.ContextKeyType", "string").endswith("List")
        yield key, values if several else values[0]
        number += 1


def _error(code: str, message: str) -> Answer:
    return Answer(
        400,
        f'<ErrorResponse xmlns="{NAMESPACE}"><Error><Type>Sender</Type><Code>{code}</Code>'
        f"<Message>{escape(message)}</Message></Error></ErrorResponse>",
    )
