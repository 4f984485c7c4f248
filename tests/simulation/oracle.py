"""What must hold after every step, judged from the objects in the store and from what each replica says it holds.

The oracle sees each operation as it takes effect. It keeps a truth of its own: the state before each round, computed in
numpy from the committed payloads as they were sent, added in rank order. Nothing here trusts the code under test
except for parsing records, the layout of keys, and the digest of a state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch

from diloco.exchange import codec, layout
from diloco.exchange.records import Commit, Header, Manifest, RunResult
from diloco.exchange.round_cost import shards_of
from diloco.exchange.shards import Division
from diloco.exchange.state import FragmentState, whole_digest
from tests.simulation.scenario import CHUNK_BYTES, VALUES, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from diloco.exchange.layout import Member
    from tests.simulation.process import Process
    from tests.simulation.scenario import Scenario

OVERWRITABLE = {"part", "beat", "inner", "report", "error"}
DELETABLE = {"payload", "header", "mean", "part", "inner"}
LR, MOMENTUM = 0.7, 0.9


class Violation(BaseException):
    """Something that must never happen has happened."""


def require(holds: bool, text: str | Callable[[], str]) -> None:
    """Raise :class:`Violation` unless it holds."""
    if not holds:
        raise Violation(text if isinstance(text, str) else text())


@dataclass
class Truth:
    """The state of all fragments before a round."""

    states: list[FragmentState]
    digests: list[str]


@dataclass
class Oracle:
    """Watches one run."""

    scenario: Scenario
    objects: dict[str, bytes]
    truth: list[Truth] = field(default_factory=list)
    """By round; one more than there are commits, once the initial state is agreed on."""
    commits: list[Commit] = field(default_factory=list)
    headers: dict[int, dict[Member, Header]] = field(default_factory=dict)
    means: dict[int, np.ndarray] = field(default_factory=dict)
    """Of the committed rounds, as numpy has them."""
    sent: dict[str, bytes] = field(default_factory=dict)
    """Payloads as they were sent, by key."""
    spoilt: set[str] = field(default_factory=set)
    """Payloads that a fault has changed."""
    created: set[str] = field(default_factory=set)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    sound: dict[int, bool] = field(default_factory=dict)
    """Whether a checkpoint's parts are the truth."""
    claimed: dict[int, dict[int, Process]] = field(default_factory=dict)
    claim_steps: dict[Member, int] = field(default_factory=dict)
    result: RunResult | None = None
    broken_since: int = 0
    """The step since which a committed payload is corrupt: from then on the run can't go on everywhere."""
    seen: set[str] = field(default_factory=set)
    """What happened."""
    step: int = 0
    """How many steps of the schedule there were."""

    # ---- operations as they take effect

    def created_once(self, process: Process, key: str, data: bytes, *, late: bool = False) -> None:
        """An object was created; `late`: by a request whose sender has long given it up."""
        kind = kind_of(key)
        if key in self.created:
            # A request may arrive once its round was pruned: an orphan that nobody reads, and the next prune deletes.
            pruned = late and kind in ("payload", "header", "mean") and int(key.split("/")[1]) < self.oldest_kept()
            require(pruned, f"{process} creates {key} a second time: it was deleted")
            return
        self.created.add(key)
        if kind == "payload":
            self.sent[key] = data
        elif kind == "mean":
            self._mean(process, key, data)
        elif kind == "header":
            self._header(process, Header.from_json(data, key))
        elif kind == "commit":
            self._commit(process, Commit.from_json(data, key))
        elif kind == "manifest":
            self._manifest(process, Manifest.from_json(data, key))
        elif kind == "claim":
            member = layout.parse_member(key)
            if member is not None:
                own = [a for a, owner in self.claimed.get(member.rank, {}).items() if owner is process]
                require(not own, f"{process} claims attempt {member.attempt}, though it is attempt {own}")
                self.claimed.setdefault(member.rank, {})[member.attempt] = process
                self.claim_steps[member] = self.step
        elif kind == "result":
            self._result(process, RunResult.from_json(data, key))

    def written(self, process: Process, key: str, before: bytes | None, data: bytes) -> None:
        """An object was written, whether or not it was there."""
        kind = kind_of(key)
        require(kind in OVERWRITABLE, f"{process} writes {key} without asking whether it is there")
        if kind == "part":
            require(before is None or before == data, f"{process} puts other bytes into {key}")

    def deleted(self, process: Process, key: str) -> None:
        """An object that was there was deleted."""
        kind = kind_of(key)
        require(kind in DELETABLE, f"{process} deletes {key}: a record is never deleted")
        if kind == "inner":
            return
        oldest, number = self.oldest_kept(), int(key.split("/")[1])
        require(
            number < oldest, lambda: f"{process} deletes {key}: confirmed are {self.confirmed()}, {oldest} is needed"
        )
        task = process.simulation.current
        late = self.result is None and task is not None and task.listed_while_ending
        require(not late, f"{process} deletes {key} while the run ends")
        self.seen.add("pruning")

    def reads(self, process: Process, key: str) -> None:
        """An object is about to be read."""
        if kind_of(key) == "part" and not key.startswith(f"{layout.CHECKPOINTS}{0:08d}/"):
            number = int(key.split("/")[1])
            require(number in self.confirmed(), f"{process} loads checkpoint {number}, which no commit confirms")
            self.seen.add("a checkpoint is loaded")

    # ---- records

    def _header(self, process: Process, header: Header) -> None:
        last = header.round >= self.scenario.rounds
        require(header.member == process.member, f"{process} writes a header of {header.member}")
        require(last == (header.kind == "vote"), f"{process} writes a {header.kind} in round {header.round}")
        self.headers.setdefault(header.round, {})[header.member] = header
        newer = [a for a in self.claimed.get(header.rank, {}) if a > header.attempt]
        for attempt in newer:
            since = self.claim_steps[layout.Member(header.rank, attempt)]
            require(
                last or since > process.turn_began,
                f"{process} takes part in round {header.round}, which it began after attempt {attempt} had fenced it",
            )

    def _commit(self, process: Process, commit: Commit) -> None:
        what = f"{process} commits round {commit.round}"
        require(commit.round == len(self.commits), f"{what} after {len(self.commits)} rounds")
        require(commit.round < self.scenario.rounds, f"{what} of {self.scenario.rounds}")
        truth, headers = self.truth[commit.round], self.headers.get(commit.round, {})
        fragment = commit.round % self.scenario.fragments
        require(commit.fragment == fragment, f"{what} of fragment {commit.fragment}, not {fragment}")
        require(commit.base_digest == truth.digests[fragment], f"{what} on other bits than the run's")
        with_it = {m.rank for m, header in headers.items() if header.base_digest == commit.base_digest}
        enough = self.scenario.min_replicas if self.scenario.policy == "skip" else self.scenario.world_size
        require(len(with_it) >= enough, f"{what} with headers of ranks {sorted(with_it)}, {enough} are needed")
        ranks = [participant.rank for participant in commit.participants]
        require(len(set(ranks)) == len(ranks), f"{what} with two attempts of a rank: {ranks}")
        for participant in commit.participants:
            header = headers.get(participant.member)
            require(
                header is not None
                and header.kind == "contribution"
                and header.base_digest == commit.base_digest
                and (header.payload, header.weight) == (participant.payload, participant.weight),
                f"{what} with {participant.member}, whose header says something else",
            )
            # Of a divided payload the owners of the shards see the chunks, after the commit.
            require(
                self.scenario.reduce == "shard"
                or process.member == participant.member
                or not self.spoilt.intersection(self.payload_keys(commit.round, participant.member)),
                f"{what} with {participant.member}, whose payload is corrupt",
            )
        self.commits.append(commit)
        self.seen |= {f"left out: {out.reason.split(':')[0].split(',')[0]}" for out in commit.left_out}
        self.seen |= {"an empty round"} if not commit.participants else set()
        if commit.participants:
            self.means[commit.round] = self._true_mean(commit)
        self.truth.append(self._after(truth, commit))
        self._look_for_broken()

    def _after(self, truth: Truth, commit: Commit) -> Truth:
        """The truth after a round, in numpy: the mean added in rank order, then the outer step."""
        if not commit.participants:
            return truth
        old, mean = truth.states[commit.fragment], self.means[commit.round]
        state, start = old.copy(), 0
        for name in sorted(state.parameters):
            parameter, momentum = state.parameters[name].numpy(), state.momentum[name].numpy()
            part = mean[start : start + parameter.size].reshape(parameter.shape)
            start += parameter.size
            momentum *= np.float32(MOMENTUM)
            momentum += part
            parameter -= (momentum * np.float32(MOMENTUM) + part) * np.float32(LR)
        state.last_round = commit.round
        states, digests = list(truth.states), list(truth.digests)
        states[commit.fragment], digests[commit.fragment] = state, state.digest()
        return Truth(states, digests)

    def _true_mean(self, commit: Commit) -> np.ndarray:
        total, mean = sum(p.weight for p in commit.participants), np.zeros(0, np.float32)
        for number, participant in enumerate(sorted(commit.participants, key=lambda p: p.rank)):
            data = b"".join(self.sent[key] for key in self.payload_keys(commit.round, participant.member))
            share = np.float32(participant.weight / total)
            term = np.frombuffer(data, np.float32, offset=codec.DATA_OFFSET) * share
            mean = term if number == 0 else mean + term
        return mean

    def payload_keys(self, round_: int, member: Member) -> list[str]:
        """The objects of a payload, in order."""
        division = Division(VALUES, "fp32", CHUNK_BYTES, shards_of(self.scenario.reduce, self.scenario.world_size))
        return [key for key, _, _ in division.parts(round_, member, codec.DATA_OFFSET)]

    def _mean(self, process: Process, key: str, data: bytes) -> None:
        round_, shard = int(key.split("/")[1]), layout.parse_mean(key)
        require(round_ in self.means and shard is not None, f"{process} publishes {key} of a round without a commit")
        values = np.frombuffer(data, np.float32, offset=codec.DATA_OFFSET)
        owned = Division(VALUES, "fp32", CHUNK_BYTES, self.scenario.world_size).shards[shard or 0]
        if values.tobytes() != self.means[round_][owned.start : owned.stop].tobytes():
            wrong = key in process.wrong_means
            require(wrong, f"{process} publishes {key}, which is not the mean of the round's payloads")
            # What is stored is the truth: nobody can have applied the round without it.
            require(len(self.commits) == round_ + 1, f"{key} comes when round {len(self.commits) - 1} is committed")
            self.means[round_][owned.start : owned.stop] = values
            self.truth[round_ + 1] = self._after(self.truth[round_], self.commits[round_])
        self.seen.add("a mean is published")

    def _manifest(self, process: Process, manifest: Manifest) -> None:
        number, what = manifest.round, f"{process} writes checkpoint {manifest.round}"
        require(manifest.rank == process.rank, f"{what} as rank {manifest.rank}")
        states = [self._stored(part.key, part.fragment, part.last_round) for part in manifest.parts]
        stored = [state.digest() if state is not None else None for state in states]
        named = [part.digest for part in manifest.parts]
        if number == 0:
            require(stored == named, f"{what}, of which the parts are not what it names")
            self.truth.append(Truth([state for state in states if state is not None], named))
        require(number < len(self.truth), f"{what} before round {number - 1} was committed")
        right = self.truth[number].digests
        # Whoever is very late finds its parts pruned: nobody loads them any more.
        whole = stored == right or (number < self.oldest_kept() and stored.count(None) > 0)
        require(whole or named != right, f"{what}: its digests are the run's, its parts are not")
        require(named == right or process.was_tainted, f"{what}: a sound replica's checkpoint is not the run's state")
        self.manifests[number] = manifest
        self.sound[number] = named == right
        self.seen |= {"a wrong checkpoint"} if named != right else set()

    def _stored(self, key: str, index: int, last_round: int) -> FragmentState | None:
        if key not in self.objects:
            return None
        tensors = safetensors.torch.load(self.objects[key])
        groups: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        for name, tensor in tensors.items():
            head, _, tail = name.partition("/")
            groups[head == "momentum"][tail] = tensor
        return FragmentState(index, *groups, last_round)

    def _result(self, process: Process, result: RunResult) -> None:
        what = f"{process} writes the result"
        require(len(self.commits) == self.scenario.rounds, f"{what} after {len(self.commits)} rounds")
        right = whole_digest(self.truth[-1].digests)
        require(result.digest == right, f"{what} of other bits than the run's")
        require(process.whole_digest() == right, f"{what} without holding that state")
        voters = {m.rank for m, header in self.headers[result.rounds].items() if header.base_digest == right}
        require(len(voters) >= self.scenario.min_replicas, f"{what} on the votes of ranks {sorted(voters)}")
        self.result = result

    @property
    def ended(self) -> bool:
        """Whether all rounds are committed."""
        return len(self.commits) == self.scenario.rounds

    @property
    def ending(self) -> bool:
        """Whether all rounds are committed and there is no result."""
        return self.ended and self.result is None

    def spoil(self, key: str) -> None:
        """A fault has changed a payload."""
        self.spoilt.add(key)
        self._look_for_broken()

    def _look_for_broken(self) -> None:
        if self.broken_since or not self.spoilt:
            return
        named = {key for c in self.commits for p in c.participants for key in self.payload_keys(c.round, p.member)}
        if named & self.spoilt:
            self.broken_since = self.step

    # ---- what is confirmed, and what replicas hold

    def confirmed(self) -> list[int]:
        """Rounds of the confirmed checkpoints, in order."""
        ready = len(self.commits) - self.scenario.fragments
        return [c for c in sorted(self.manifests) if c == 0 or (c <= ready and self.sound[c])]

    def oldest_kept(self) -> int:
        """The older of the two newest confirmed checkpoints: what is below may go."""
        return [0, 0, *self.confirmed()][-2]

    def holds(self, process: Process, states: Sequence[FragmentState], round_: int, doing: str) -> None:
        """A replica says that these are the states before that round."""
        require(round_ < len(self.truth), f"{process} {doing}: is in round {round_} of {len(self.truth) - 1} committed")
        found, right = [state.digest() for state in states], self.truth[round_].digests
        require(found == right or process.tainted, f"{process} {doing}: holds other bits before round {round_}")
        process.tainted = found != right

    def averaged(self, process: Process, commit: Commit, base: str) -> None:
        """A replica is about to apply that commit's mean to a fragment of that digest."""
        true = self.commits[commit.round] if commit.round < len(self.commits) else None
        require(commit == true, f"{process} applies a record of round {commit.round} that is not the stored one")
        require(
            commit.base_digest == base, f"{process} averages round {commit.round} though it started from other bits"
        )
