"""The global state in the bucket: checkpoints, and catching up from one by replaying the committed rounds.

`checkpoints/{c}` is the state before round c. Its parts lie under their writer's own key and a create-once manifest
names them: a checkpoint is what its manifest names, so two writers can't mix. It may be loaded only once it is
*confirmed*: commits c … c+F−1 exist and carry its digests. Checkpoint 0, the initial state, needs no confirmation:
everyone starts from the one that won.

A crash between parts and manifest leaves orphaned parts and no checkpoint; writing again is harmless.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco.errors import CorruptObjectError, DivergedError, ObjectMissingError
from diloco.exchange import layout
from diloco.exchange.clock import Timer
from diloco.exchange.flat import Flat
from diloco.exchange.mean import committed_mean
from diloco.exchange.records import CheckpointPart, Commit, Manifest
from diloco.exchange.state import FragmentState
from diloco.exchange.store import create_once, read_if_there

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from diloco.exchange.clock import Poll
    from diloco.exchange.context import Context
    from diloco.exchange.state import OuterStep
    from diloco.exchange.store import Store

logger = logging.getLogger(__name__)

_PARAMETER, _MOMENTUM = "parameters/", "momentum/"


async def read_commit(store: Store, round_: int) -> Commit | None:
    """The record of a round, or None while it is open."""
    key = layout.commit(round_)
    data = await read_if_there(store, key)
    if data is None:
        return None
    commit = Commit.from_json(data, f"{store.uri}/{key}")
    if commit.round != round_:
        raise CorruptObjectError(f"{store.uri}/{key}: says that it is of round {commit.round}")
    return commit


@dataclass(frozen=True)
class Snapshot:
    """A copy of the whole state before a round, taken between two rounds, and the digests from when it was applied."""

    round: int
    states: Sequence[FragmentState]
    digests: Sequence[Awaitable[str]]


async def write_snapshot(context: Context, snapshot: Snapshot) -> Manifest:
    """Write a snapshot as a checkpoint. Raises CorruptObjectError if the copy is not what was applied."""
    for state, digest in zip(snapshot.states, snapshot.digests, strict=True):
        applied, copied = await digest, state.digest()
        if applied != copied:
            raise CorruptObjectError(
                f"{context.member}: the copy of fragment {state.index} for checkpoint {snapshot.round} ({copied[:12]}) "
                f"is not what was applied ({applied[:12]}): no checkpoint is written"
            )
    return await write_checkpoint(context, snapshot.round, snapshot.states)


async def write_checkpoint(context: Context, round_: int, states: Sequence[FragmentState]) -> Manifest:
    """Write the parts of the state before `round_`, then the manifest; returns the one that won."""
    import safetensors.torch

    parts = []
    for state in states:
        tensors = {_PARAMETER + name: tensor for name, tensor in state.named()}
        tensors |= {_MOMENTUM + name: tensor for name, tensor in state.momentum.items()}
        data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        key = layout.checkpoint_part(round_, context.member, state.index)
        await context.store.write(key, data)
        parts.append(
            CheckpointPart(
                fragment=state.index, key=key, size=len(data), digest=state.digest(), last_round=state.last_round
            )
        )
    mine = Manifest(round=round_, rank=context.member.rank, attempt=context.member.attempt, parts=parts)
    _, stored = await create_once(context.store, layout.manifest(round_), mine)
    return Manifest.from_json(stored, layout.manifest(round_))


async def read_manifest(store: Store, round_: int) -> Manifest | None:
    """The manifest of a checkpoint, or None."""
    key = layout.manifest(round_)
    data = await read_if_there(store, key)
    if data is None:
        return None
    manifest = Manifest.from_json(data, f"{store.uri}/{key}")
    if manifest.round != round_:
        raise CorruptObjectError(f"{store.uri}/{key}: says that it is of checkpoint {manifest.round}")
    return manifest


async def agree_on_initial(context: Context, states: Sequence[FragmentState]) -> Manifest:
    """Checkpoint 0, the initial state: rank 0 proposes its own, another one after `dead_after`; everyone uses the
    winner's.
    """
    waited: list[Timer] = []

    async def look(poll: Poll) -> Manifest | None:
        manifest = await read_manifest(context.store, 0)
        if manifest is not None:
            return manifest
        if not waited:
            waited.append(Timer(poll))
        if context.member.rank == 0 or waited[0].seconds > context.settings.dead_after:
            return await write_checkpoint(context, 0, states)
        context.waiting_for = ["rank 0 to write the initial state"]
        return None

    return await context.wait_until(look, doing="joining the run")


async def manifests(context: Context, *, newest_first: bool) -> list[Manifest]:
    """All readable manifests. One that can't be read is logged and left out."""
    numbers = []
    for entry in await context.store.list(layout.CHECKPOINTS):
        number = layout.parse_number(entry.key) if entry.key.endswith("/manifest.json") else None
        if number is not None:
            numbers.append(number)
    found = []
    for number in sorted(numbers, reverse=newest_first):
        try:
            manifest = await read_manifest(context.store, number)
        except CorruptObjectError as problem:
            logger.warning("%s: checkpoint %d is not used: %s", context.member, number, problem)
            continue
        if manifest is not None:
            found.append(manifest)
    return found


async def confirmed(context: Context, *, newest_first: bool, beyond: int = -1) -> AsyncIterator[Manifest]:
    """The checkpoints after round `beyond` that may be used."""
    for manifest in await manifests(context, newest_first=newest_first):
        if manifest.round > beyond and await is_confirmed(context, manifest):
            yield manifest


async def is_confirmed(context: Context, manifest: Manifest) -> bool:
    """Whether commits carry a checkpoint's digests: only then may it be loaded, or license deleting rounds.

    Without this, one diverged writer could turn the run. A checkpoint that a commit refutes is named in the log.
    """
    if manifest.round == 0:
        return True
    digests = {part.fragment: part.digest for part in manifest.parts}
    for round_ in range(manifest.round, manifest.round + context.run.fragments):
        commit = await read_commit(context.store, round_)
        if commit is None:
            return False
        if commit.base_digest != digests.get(commit.fragment):
            logger.warning(
                "%s: checkpoint %d of rank %d is not used: round %d was committed on other bits",
                context.member,
                manifest.round,
                manifest.rank,
                round_,
            )
            return False
    return True


async def load_newest(context: Context, states: Sequence[FragmentState], *, beyond: int = -1) -> int:
    """Load the newest confirmed checkpoint into `states`, waiting for one after round `beyond`; returns the round
    before which it was taken.

    One with a corrupt part is named in the log, and the one before it is loaded.
    """

    async def look(_: Poll) -> int | None:
        corrupt: CorruptObjectError | None = None
        async for manifest in confirmed(context, newest_first=True, beyond=beyond):
            try:
                await load_checkpoint(context, manifest, states)
            except CorruptObjectError as problem:
                logger.warning("%s: checkpoint %d is not used: %s", context.member, manifest.round, problem)
                corrupt = corrupt or problem
                continue
            return manifest.round
        if corrupt is not None:
            raise corrupt
        if beyond < 0:
            raise ObjectMissingError(f"{context.store.uri}/{layout.CHECKPOINTS}: no checkpoint that can be loaded")
        context.waiting_for = [f"a checkpoint beyond round {beyond}"]
        return None

    return await context.wait_until(look, doing=f"catching up past round {beyond}, of which a payload is corrupt,")


async def load_checkpoint(context: Context, manifest: Manifest, states: Sequence[FragmentState]) -> None:
    """Copy a checkpoint into `states`, a fragment at a time.

    Raises CorruptObjectError if it is of another model, or its bits are not what the manifest says.
    """
    parts = _parts(manifest)
    if parts.keys() != {state.index for state in states}:
        raise CorruptObjectError(
            f"{layout.manifest(manifest.round)}: names the fragments {sorted(parts)}, the model has {len(states)}"
        )
    for state in states:
        stored = await _read_part(context, parts[state.index])
        for targets, sources in ((state.parameters, stored.parameters), (state.momentum, stored.momentum)):
            for name, target in targets.items():
                source = sources.get(name)
                if source is None or source.shape != target.shape or source.dtype != target.dtype:
                    key = parts[state.index].key
                    raise CorruptObjectError(f"{key}: has no {name} of shape {list(target.shape)}")
                target.copy_(source)
        state.last_round = stored.last_round
        if state.digest() != parts[state.index].digest:
            raise CorruptObjectError(
                f"{parts[state.index].key}: its bits are not what the manifest of checkpoint {manifest.round} says"
            )


async def read_states(context: Context, manifest: Manifest) -> list[FragmentState]:
    """A checkpoint as states of their own. Raises as :func:`load_checkpoint`."""
    parts = _parts(manifest)
    states = [await _read_part(context, parts[index]) for index in sorted(parts)]
    for state in states:
        if state.digest() != parts[state.index].digest:
            raise CorruptObjectError(f"{parts[state.index].key}: its bits are not what its manifest says")
    return states


def _parts(manifest: Manifest) -> dict[int, CheckpointPart]:
    writer = layout.Member(manifest.rank, manifest.attempt)
    for part in manifest.parts:
        if part.key != layout.checkpoint_part(manifest.round, writer, part.fragment):
            raise CorruptObjectError(f"{layout.manifest(manifest.round)}: names {part.key}, which is not its writer's")
    return {part.fragment: part for part in manifest.parts}


async def _read_part(context: Context, part: CheckpointPart) -> FragmentState:
    import safetensors
    import safetensors.torch

    try:
        tensors = safetensors.torch.load(await context.store.read(part.key, 0, part.size))
    except safetensors.SafetensorError as problem:
        raise CorruptObjectError(f"{part.key}: no safetensors file: {problem}") from problem
    parameters, momentum = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix in (_PARAMETER, _MOMENTUM)
    )
    if parameters.keys() != momentum.keys():
        raise CorruptObjectError(f"{part.key}: has parameters without momenta, or momenta without parameters")
    return FragmentState(part.fragment, parameters, momentum, part.last_round)


async def replay(
    context: Context,
    states: Sequence[FragmentState],
    round_: int,
    step: OuterStep,
    on_commit: Callable[[Commit], None] = lambda _: None,
) -> int:
    """Apply the committed rounds from `round_` on to `states`; returns the first round that is still open, or R.

    Raises DivergedError if a record was made on other bits than `states`.
    """
    while round_ < context.run.rounds:
        commit = await read_commit(context.store, round_)
        if commit is None:
            break
        check_fragment(context, commit)
        state = states[commit.fragment]
        if commit.base_digest != state.digest():
            raise DivergedError(
                f"{context.member}: fragment {commit.fragment} before round {round_} is not what the others agreed on"
            )
        if commit.participants:
            mean = torch.empty(state.numel, dtype=torch.float32)
            await committed_mean(context, commit, state.layout, Flat([mean]))
            state.apply(mean, step, round_)
        on_commit(commit)
        round_ += 1
    return round_


def check_fragment(context: Context, commit: Commit) -> None:
    """Raise CorruptObjectError unless the record is of the fragment whose turn it was."""
    if commit.fragment != commit.round % context.run.fragments:
        raise CorruptObjectError(
            f"{layout.commit(commit.round)}: says that it is of fragment {commit.fragment}, it was the turn of "
            f"{commit.round % context.run.fragments}"
        )
