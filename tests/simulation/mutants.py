"""Mutants of the real code: each breaks one rule of the protocol that the code can break."""

from __future__ import annotations

import re

from diloco import supervisor
from diloco.exchange import (
    allreduce,
    checkpoint,
    codec,
    ending,
    layout,
    membership,
    pruning,
    reduce,
    replica,
    rounds,
    sharded,
)
from diloco.exchange import store as store_module
from diloco.exchange.records import Record
from diloco.exchange.state import FragmentState
from tests.simulation import wraps
from tests.simulation.mutation import Edit, Mutant, Wrap

ALLREDUCE = allreduce.ObjectStoreAllReduce
REPLICA = replica.Replica
SHARDED = sharded.ShardedMean
MINE = "return stored == body, stored"
GROUP = "groups[header.base_digest] += header.member not in rejected"

MUTANTS = (
    Mutant(
        "a commit without min_replicas",
        "a commit needs at least min_replicas headers with one base digest",
        (Edit(rounds, "decide", ("ranked[0][1] < rules.min_replicas", "ranked[0][1] < 1")),),
    ),
    Mutant(
        "the first check without min_replicas",
        "that holds for the first check too, or one fast starter runs alone",
        (
            Edit(
                rounds, "decide", ("ranked[0][1] < rules.min_replicas", "(late and ranked[0][1] < rules.min_replicas)")
            ),
        ),
        "lone_starter",
    ),
    Mutant(
        "no header of an abstention",
        "an abstention is a header like any other",
        (Edit(ALLREDUCE, "abstain", ("if self._announced != round_:", "if False:")),),
        "not_a_number",
    ),
    Mutant(
        "an abstention is not counted",
        "an abstention counts towards min_replicas",
        (Edit(rounds, "decide", (GROUP, GROUP + " and header.kind != 'abstention'")),),
        "not_a_number",
    ),
    Mutant(
        "an empty round is not committed",
        "a commit may have no participants",
        (Wrap(rounds, "decide", wraps.waits_if_empty),),
        scenario="not_a_number",
    ),
    Mutant(
        "a tie commits",
        "a tie keeps waiting",
        (Edit(rounds, "decide", ("len(ranked) > 1 and ranked[1][1] == ranked[0][1]", "False")),),
        "tie",
    ),
    Mutant("a tie ends the run", "a tie keeps waiting", (Wrap(rounds, "decide", wraps.ends_at_a_tie),), "tie"),
    Mutant(
        "another digest is averaged as well",
        "headers with another digest are left out",
        (Edit(rounds, "_propose", ("if header.base_digest != base:", "if False:")),),
        "wrong_writer",
    ),
    Mutant(
        "strict without a rank",
        "strict needs all ranks",
        (Edit(rounds, "decide", ("    if missing:", "    if len(missing) > 1:")),),
    ),
    Mutant(
        "two attempts of a rank in a commit",
        "a participant is one attempt a rank",
        (
            Wrap(rounds.HeaderReader, "read", wraps.with_older_attempts),
            Edit(rounds, "_propose", ("Participant(rank=rank", "Participant(rank=header.rank")),
        ),
        budget=1000,
    ),
    Mutant(
        "a time-out ends as an empty commit",
        "a time-out ends the local process only, and is never written into a commit",
        (Wrap(ALLREDUCE, "settle", wraps.commits_at_a_time_out),),
        "impatient",
    ),
    Mutant(
        "who loses a commit applies its own proposal",
        "whoever loses the create follows the winner's record",
        (Edit(ALLREDUCE, "settle", ("commit.participants != wait.averaged", "wait.averaged is None")),),
        budget=3000,
    ),
    Mutant(
        "the digest of a commit is not compared",
        "a replica whose digest differs from the record's has diverged",
        (Edit(ALLREDUCE, "settle", ("if commit.base_digest != fragment.base_digest:", "if False:")),),
        "wrong_writer",
    ),
    Mutant(
        "a second prepare uploads again",
        "a second prepare of a round uploads nothing",
        (Edit(ALLREDUCE, "contribute", ("if self._announced == round_:", "if False:")),),
        budget=1000,
    ),
    Mutant(
        "a contribution overwrites",
        "payloads and headers are created once",
        (
            Edit(
                store_module,
                "create_same",
                ("if await store.create(key, data):", "if await store.write(key, data) is None:"),
            ),
        ),
    ),
    Mutant(
        "averaging in order of arrival",
        "the mean is added in rank order",
        (
            Wrap(rounds.HeaderReader, "read", wraps.in_order_of_arrival),
            Edit(rounds, "_propose", ("for rank in sorted(headers):", "for rank in headers:")),
        ),
    ),
    Mutant(
        "averaging the own contribution first",
        "the mean is added in rank order",
        (
            Edit(
                reduce,
                "gather_mean",
                ("    plans =", "    each.sort(key=lambda pair: own is None or pair[0].member != own[0])\n    plans ="),
                ("plan.member == participants[0].member", "plan.member == each[0][0].member"),
            ),
        ),
    ),
    Mutant(
        "a payload is not checked",
        "a payload's bytes are verified before it is named",
        (Wrap(codec, "digest", lambda _: lambda _data: "0" * 64),),
        budget=1000,
    ),
    Mutant(
        "a payload of a sharded reduction is not checked",
        "its owner checks each chunk of a shard",
        (Wrap(codec, "digest", lambda _: lambda _data: "0" * 64),),
        "sharded",
    ),
    Mutant(
        "a mean is not checked",
        "a mean has the digest that it promises",
        (Edit(SHARDED, "_take", ("if held is not None and promised == held:", "if held is not None:")),),
        "sharded",
    ),
    Mutant(
        "one's own bits instead of the stored mean",
        "the stored mean is the truth",
        (Edit(SHARDED, "_publish", ("if not await create_same(", "if await create_same(")),),
        "two_owners",
    ),
    Mutant(
        "a create that met an object is never mine",
        "after a lost answer the object is mine if the nonce is mine",
        (Edit(store_module, "create_once", (MINE, "return False, stored")),),
        budget=1000,
    ),
    Mutant(
        "a create that met an object is always mine",
        "the object is mine only if the nonce is mine",
        (Edit(store_module, "create_once", (MINE, "return True, stored")),),
        budget=1000,
    ),
    Mutant(
        "no nonce is drawn",
        "the nonce is drawn in the process",
        (Wrap(Record, "to_json", wraps.without_nonce),),
        budget=1000,
    ),
    Mutant(
        "a payload whose answer was lost is not mine",
        "after a lost answer the object is mine if the nonce is mine",
        (Edit(store_module, "create_same", ("await _holds(store, key, memoryview(data)[:nonce_in])", "False")),),
        budget=1000,
    ),
    Mutant(
        "a fenced attempt goes on",
        "a process that sees a higher attempt of its rank exits",
        (Edit(membership, "check_fence", ("if highest > member.attempt:", "if False:")),),
        budget=1000,
    ),
    Mutant(
        "a fenced attempt is relaunched",
        "a fenced exit is never relaunched",
        (Edit(supervisor.Supervisor, "decide", ("if exit_code == ExitCode.FENCED:", "if False:")),),
        budget=1000,
    ),
    Mutant(
        "fencing deletes what the older attempt contributed",
        "fencing deletes nothing",
        (Wrap(membership, "claim", wraps.claims_and_deletes),),
    ),
    Mutant(
        "checkpoint c licenses deleting round c",
        "checkpoint c licenses deleting rounds < c, not c",
        (Edit(pruning, "prune", ("int(match[1]) < oldest", "int(match[1]) <= oldest")),),
        "overtaken",
    ),
    Mutant(
        "the newest checkpoint alone is kept",
        "the two newest confirmed checkpoints are kept",
        (Edit(pruning, "prune", ("oldest = confirmed[1]", "oldest = confirmed[0]")),),
        "overtaken",
    ),
    Mutant(
        "commits are pruned",
        "commits are never deleted",
        (
            Edit(
                pruning,
                "prune",
                (
                    "(layout.ROUNDS, _ROUND))",
                    "(layout.ROUNDS, _ROUND), (layout.COMMITS, re.compile(r'commits/(\\d{8})')))",
                ),
            ),
        ),
        "overtaken",
    ),
    Mutant(
        "pruning by an unconfirmed checkpoint",
        "only a confirmed checkpoint licenses deleting rounds",
        (
            Edit(
                pruning,
                "prune",
                ("async for manifest in checkpoint.confirmed(", "for manifest in await checkpoint.manifests("),
            ),
        ),
        "overtaken",
    ),
    Mutant(
        "an unconfirmed checkpoint is loaded",
        "only a confirmed checkpoint is loaded",
        (Edit(checkpoint, "confirmed", (" and await is_confirmed(context, manifest)", "")),),
        "wrong_writer",
    ),
    Mutant(
        "a checkpoint that a commit refutes counts as confirmed",
        "commits c … c+F−1 carry its digests",
        (Edit(checkpoint, "is_confirmed", ("if commit.base_digest != digests.get(commit.fragment):", "if False:")),),
        "wrong_writer",
    ),
    Mutant(
        "a checkpoint of live parameters",
        "a checkpoint is a copy, taken between two rounds",
        (Edit(FragmentState, "copy", ("return FragmentState(", "return self or FragmentState(")),),
    ),
    Mutant(
        "two writers share the parts' keys",
        "parts lie under the writer's own key",
        (Edit(layout, "checkpoint_part", ("{member_name(member)}", "00000-00001")),),
        budget=1000,
    ),
    Mutant(
        "the manifest comes before the parts",
        "parts, then the manifest",
        (
            Edit(
                checkpoint,
                "write_checkpoint",
                ("parts = []", "parts, late = [], []"),
                ("await context.store.write(key, data)", "late.append((key, data))"),
                (
                    "return Manifest",
                    "for key, data in late:\n        await context.store.write(key, data)\n    return Manifest",
                ),
            ),
        ),
    ),
    Mutant(
        "catching up after the first inner steps",
        "catch up before the first inner step",
        (Wrap(checkpoint, "replay", wraps.replays_at_the_second_call),),
    ),
    Mutant(
        "pruned data end the process",
        "a committed object that answers 404 was pruned: catch up",
        (Edit(REPLICA, "exchange", ("(CorruptRoundError, DivergedError, ObjectMissingError)", "DivergedError")),),
        "overtaken",
    ),
    Mutant(
        "a diverged replica ends instead of catching up",
        "a replica whose digest differs catches up from a checkpoint",
        (Edit(REPLICA, "_lose", (" and self._reloaded", "")),),
        "wrong_writer",
    ),
    Mutant(
        "contributing beyond the last round",
        "nobody contributes to a round ≥ R",
        (
            Edit(
                REPLICA,
                "quorum",
                ("if self.round >= self.context.run.rounds:", "if self.round > self.context.run.rounds:"),
            ),
        ),
    ),
    Mutant(
        "the first to finish writes the result",
        "the result rests on min_replicas equal votes",
        (Edit(ending, "await_result", ("top < context.run.min_replicas", "top < 1")),),
    ),
    Mutant(
        "a diverged replica may write the result",
        "a replica that holds the winning digest writes it",
        (Edit(ending, "await_result", ("len(mine) == top and (first", "(first")),),
        "wrong_end",
    ),
    Mutant(
        "another result is taken for one's own",
        "a replica exits well only with the result's digest",
        (Edit(ending, "await_result", ("found.digest != digest", "False")),),
        "wrong_end",
    ),
    Mutant(
        "pruning while the run ends",
        "from R on nothing is pruned until the result exists",
        (Wrap(pruning, "_is_ending", wraps.no),),
        "slow_writer",
    ),
    Mutant(
        "manifests are pruned",
        "manifests are never deleted",
        (Wrap(pruning, "_PART", lambda _: re.compile(r"checkpoints/(\d{8})/")),),
        "overtaken",
    ),
    Mutant(
        "a replica exits without a result",
        "a replica exits 0 only once the result exists",
        (Wrap(ending, "await_result", wraps.result_at_once),),
    ),
)
"""In the order of protocol.md."""
