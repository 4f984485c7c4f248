"""Every key of a run, in one place: relative to the run's prefix, numbers zero-padded so that they sort, listed
prefixes end in a slash.

The prefix itself (`RENDEZVOUS_URI`) is the user's parent folder plus `/<run id>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SPEC = "spec.json"
RUN = "run.json"
RESULT = "final/result.json"
MODEL = "final/model"
PROBES = "probes/"
LAUNCHERS = "launcher/"
MEMBERS = "members/"
BEATS = "beats/"
COMMITS = "commits/"
ROUNDS = "rounds/"
RESULTS = "results/"
ERRORS = "errors/"
CHECKPOINTS = "checkpoints/"
EVALUATIONS = "evaluations/"

RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
"""Run ids: also part of job names and labels, hence lower case, digits and hyphens, at most 40 characters."""

_MEMBER = re.compile(r"(?:^|/)(?P<rank>\d{5})[-/](?P<attempt>\d{5})\.(?:json|safetensors)$")


@dataclass(frozen=True, order=True)
class Member:
    """One process that takes part: a rank and which attempt of it (attempts count from 1)."""

    rank: int
    attempt: int

    def __str__(self) -> str:
        return f"rank {self.rank} (attempt {self.attempt})"


def member_name(member: Member) -> str:
    """How a member is written inside a key: `00003-00001`."""
    return f"{member.rank:05d}-{member.attempt:05d}"


def parse_member(key: str) -> Member | None:
    """The member at the end of a key (`…/00003-00001.json`, `…/00003/00001.json`), or None for an alien name."""
    found = _MEMBER.search(key)
    return Member(int(found["rank"]), int(found["attempt"])) if found else None


def claims(rank: int) -> str:
    """Prefix of a rank's claims."""
    return f"{MEMBERS}{rank:05d}/"


def claim(member: Member) -> str:
    """Create-once claim of one attempt."""
    return f"{claims(member.rank)}{member.attempt:05d}.json"


def beat(member: Member) -> str:
    """Overwritten by its member: what it is doing now."""
    return f"{BEATS}{member.rank:05d}/{member.attempt:05d}.json"


def launcher(number: int) -> str:
    """Create-once: who supervises the run; the highest number does."""
    return f"{LAUNCHERS}{number:05d}.json"


def parse_launcher(key: str) -> int | None:
    """The number in `launcher/00002.json`, or None for an alien name."""
    found = re.fullmatch(rf"{LAUNCHERS}(\d{{5}})\.json", key)
    return int(found[1]) if found else None


def launcher_beat(number: int) -> str:
    """Overwritten by that launcher while it supervises."""
    return f"{BEATS}{launcher(number)}"


def headers(round_: int) -> str:
    """Prefix of a round's headers; round R (one past the last) holds the votes on the result."""
    return f"rounds/{round_:08d}/h/"


def header(round_: int, member: Member) -> str:
    """Create-once header of a contribution, an abstention or a vote."""
    return f"{headers(round_)}{member_name(member)}.json"


def payloads(round_: int) -> str:
    """Prefix of a round's payloads."""
    return f"rounds/{round_:08d}/p/"


def payload(round_: int, member: Member, shard: int | None = None) -> str:
    """Create-once payload, or one shard of it, written before its header."""
    name = f"{payloads(round_)}{member_name(member)}"
    return f"{name}.safetensors" if shard is None else f"{name}/{shard:05d}.part"


def parse_part(key: str) -> tuple[Member, int] | None:
    """Member and shard of `rounds/…/p/00003-00001/00002.part`, or None for another name."""
    found = re.search(r"/(\d{5})-(\d{5})/(\d{5})\.part$", key)
    return (Member(int(found[1]), int(found[2])), int(found[3])) if found else None


def means(round_: int) -> str:
    """Prefix of a round's means, of a sharded reduction."""
    return f"rounds/{round_:08d}/m/"


def mean(round_: int, shard: int) -> str:
    """Create-once mean of one shard: whoever averages it writes the same bits."""
    return f"{means(round_)}{shard:05d}.safetensors"


def parse_mean(key: str) -> int | None:
    """The shard in `rounds/…/m/00002.safetensors`, or None for an alien name."""
    found = re.search(r"/m/(\d{5})\.safetensors$", key)
    return int(found[1]) if found else None


def commit(round_: int) -> str:
    """Create-once record of who is in a round."""
    return f"{COMMITS}{round_:08d}.json"


def parse_number(key: str) -> int | None:
    """The number in `commits/00000012.json` or `checkpoints/00000012/manifest.json`, or None for an alien name."""
    found = re.search(r"/(\d{8})(?:\.json|/manifest\.json)$", key)
    return int(found[1]) if found else None


def manifest(checkpoint: int) -> str:
    """Create-once: names the parts of the checkpoint that holds the state before that round."""
    return f"{CHECKPOINTS}{checkpoint:08d}/manifest.json"


def checkpoint_part(checkpoint: int, member: Member, fragment: int) -> str:
    """One fragment of a checkpoint, under its writer's own key."""
    return f"{CHECKPOINTS}{checkpoint:08d}/{member_name(member)}/{fragment:05d}.safetensors"


def evaluation(round_: int) -> str:
    """Create-once: the held-out loss of the global parameters before that round."""
    return f"{EVALUATIONS}{round_:08d}.json"


def inner_states(rank: int) -> str:
    """Prefix of a rank's own state: what its inner optimizer remembers."""
    return f"replicas/{rank:05d}/"


def inner_state(member: Member, round_: int) -> str:
    """A member's own state as it was before that round."""
    return f"{inner_states(member.rank)}{member.attempt:05d}/{round_:08d}.safetensors"


def result(member: Member) -> str:
    """What a replica reports at its end."""
    return f"{RESULTS}{member_name(member)}.json"


def error(member: Member) -> str:
    """Why a process gave up."""
    return f"{ERRORS}{member_name(member)}.json"
