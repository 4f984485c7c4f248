"""Sharded reduction: each participant of a round averages one shard of all payloads, publishes the mean create-once,
and reads the others': 2(N-1)/N payloads down a replica instead of N-1.

The stored mean is the truth: whoever comes second with a shard takes the stored bits. An owner who does not publish
is dead, or soon counts as such; then anyone averages its shard, from the same payloads to the same bits.

Reading others' payloads may begin before the commit (:class:`Ahead`): what was read is used only where the commit
names it, and checked against its digests like everything else.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from blake3 import blake3

from diloco.errors import CorruptObjectError, CorruptRoundError, ObjectMissingError
from diloco.exchange import codec, formats, layout
from diloco.exchange.clock import Timer
from diloco.exchange.membership import Pulse
from diloco.exchange.reduce import MissingPayloadError, Writer, gather_mean
from diloco.exchange.shards import owner
from diloco.exchange.store import Range, create_same

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from diloco.exchange.clock import Poll
    from diloco.exchange.context import Context
    from diloco.exchange.flat import Flat
    from diloco.exchange.layout import Member
    from diloco.exchange.records import Commit, Header
    from diloco.exchange.shards import Division, Shard

logger = logging.getLogger(__name__)

AHEAD_BYTES = 128 * 2**20
"""So many bytes of others' payloads are read at most before the commit is there."""


class Ahead:
    """Reads the others' objects of the shards that will fall to this replica, while it uploads and waits.

    Who takes part is not known yet: `ranks` (sorted, with this replica's) are expected. A wrong guess costs nothing
    but time.
    """

    def __init__(self, context: Context, round_: int, division: Division, ranks: list[int]) -> None:
        self._context, self._round, self._division = context, round_, division
        mine = division.owned(round_, ranks.index(context.member.rank), len(ranks))
        self._wanted = {shard.index: shard for shard in mine}
        self._tried: set[str] = set()
        self._room = AHEAD_BYTES
        self.found: dict[tuple[Member, int], bytes] = {}
        """Objects by member and shard."""

    async def look(self) -> None:
        """Read what is there."""
        listed = await self._context.store.list(layout.payloads(self._round))
        parts = [(entry, layout.parse_part(entry.key)) for entry in listed]
        await self._read((entry.key, entry.size, *part) for entry, part in parts if part is not None)

    async def take(self, headers: Iterable[Header]) -> None:
        """Read what those have written whose headers are there."""
        await self._read(
            (key, end - start, header.member, shard.index)
            for header in headers
            if header.payload is not None
            for shard, (key, start, end) in zip(
                self._division.shards,
                self._division.parts(self._round, header.member, header.payload.data_offset),
                strict=True,
            )
        )

    async def _read(self, parts: Iterable[tuple[str, int, Member, int]]) -> None:
        chosen = []
        for key, size, member, shard in parts:
            wanted = shard in self._wanted and member.rank != self._context.member.rank
            if wanted and key not in self._tried and size <= self._room:
                self._room -= size
                self._tried.add(key)
                chosen.append((key, size, member, shard))
        fetched = self._context.store.fetch([Range(key, 0, size) for key, size, _, _ in chosen])
        try:
            for _, _, member, shard in chosen:
                self.found[member, shard] = await anext(fetched)
        except (ObjectMissingError, CorruptObjectError) as problem:
            await fetched.aclose()
            logger.warning("round %d: not read ahead: %s", self._round, problem)


class ShardedMean:
    """The mean of one committed round, put together in `out`."""

    def __init__(
        self,
        context: Context,
        commit: Commit,
        division: Division,
        out: Flat,
        *,
        own: tuple[Member, bytearray] | None,
        at_hand: Mapping[tuple[Member, int], bytes],
    ) -> None:
        self._context, self._commit, self._division, self._out = context, commit, division, out
        self._own, self._at_hand = own, at_hand
        self._codec = formats.codec(context.run.mean_codec)
        self._left = {shard.index: shard for shard in division.shards}
        self._owners = [participant.member for participant in commit.participants]
        self._silent: Timer | None = None
        self._looked: Timer | None = None
        self._pulses: dict[Member, Pulse] = {}

    async def get(self) -> None:
        """Average the shards that fall to this rank, then read the others; average those of dead owners, too.

        Raises RoundTimeoutError that names whom it waited for, BadPayloadError, CorruptRoundError.
        """
        ranks = [member.rank for member in self._owners]
        if self._context.member.rank in ranks:
            place = ranks.index(self._context.member.rank)
            owned = self._division.owned(self._commit.round, place, len(ranks))
            # One at a time: each is held encoded.
            publish = [partial(self._publish, shard) for shard in owned]
            await self._context.store.each(publish, at_once=1, beside=self._take_those_there)
        if self._left:
            await self._context.wait_until(self._look, doing=f"the mean of round {self._commit.round}")

    async def audit(self) -> list[str]:
        """Average every shard, and read the stored ones into their places. Returns in which these differ, in words."""
        differences = []
        for shard in self._division.shards:
            encoded = await self._averaged(shard)
            key = layout.mean(self._commit.round, shard.index)
            try:
                _, held = await self._read(shard)
            except ObjectMissingError:  # its owner has died, and nobody has needed it yet
                held = None
            if held is None:
                await self._decode(shard, encoded)
            elif held != encoded.info.chunks[0]:
                differences.append(f"{key} is not the mean of the round's payloads")
        return differences

    async def _look(self, poll: Poll) -> bool | None:
        if self._silent is None:
            self._silent = Timer(poll)
        if await self._take_those_there():
            self._silent.restart()
        elif (orphan := await self._orphan(poll, self._silent)) is not None:
            logger.warning("round %d: nobody averages shard %d: it is done here", self._commit.round, orphan.index)
            await self._publish(orphan)
        self._context.waiting_for = sorted({f"rank {self._owner(index).rank}" for index in self._left})
        return None if self._left else True

    async def _take_those_there(self) -> bool:
        """Read the means of other ranks that are published; whether there was one. This rank's own are being published,
        those too that an earlier attempt has left.
        """
        listed = await self._context.store.list(layout.means(self._commit.round))
        found = {layout.parse_mean(entry.key) for entry in listed}
        mine = self._context.member.rank
        there = [shard for index, shard in self._left.items() if index in found and self._owner(index).rank != mine]
        await self._context.store.each([partial(self._take, shard) for shard in there])
        return bool(there)

    def _owner(self, index: int) -> Member:
        return self._owners[owner(self._commit.round, index, len(self._owners))]

    async def _orphan(self, poll: Poll, silent: Timer) -> Shard | None:
        """A shard whose owner's beat does not change, once nothing was published for a while: another one for each who
        looks, or all would average the same.

        Raises MissingPayloadError when the round was pruned: then no owner will publish again what is missing.
        """
        half = self._context.settings.dead_after / 2
        if self._looked is None or self._looked.seconds >= self._context.settings.beat_every:
            self._looked = Timer(poll)
            await self._check_payloads()
            for member in sorted({self._owner(index) for index in self._left}) if silent.seconds >= half else ():
                if member not in self._pulses:
                    self._pulses[member] = Pulse(self._context.store, member, poll)
                await self._pulses[member].look()
        dead = {member for member, pulse in self._pulses.items() if pulse.seconds >= half}
        orphans = [index for index in sorted(self._left) if self._owner(index) in dead]
        return self._left[orphans[self._context.member.rank % len(orphans)]] if orphans else None

    async def _check_payloads(self) -> None:
        there = {entry.key for entry in await self._context.store.list(layout.payloads(self._commit.round))}
        for participant in self._commit.participants:
            parts = self._division.parts(self._commit.round, participant.member, participant.payload.data_offset)
            for key, _, _ in parts:
                if key not in there:
                    raise MissingPayloadError(participant.member, key)

    async def _publish(self, shard: Shard) -> None:
        store, key = self._context.store, layout.mean(self._commit.round, shard.index)
        encoded = await self._averaged(shard)
        if not await create_same(store, key, encoded.data):
            logger.warning("%s/%s: another replica has published other bits: those are taken", store.uri, key)
            await self._take(shard)
            return
        if self._codec.name != "fp32":
            await self._decode(shard, encoded)
        del self._left[shard.index]

    async def _averaged(self, shard: Shard) -> codec.Encoded:
        commit, store = self._commit, self._context.store
        await gather_mean(
            store,
            commit.round,
            commit.participants,
            self._division,
            own=self._own,
            out=self._out,
            shards=[shard],
            at_hand=self._at_hand,
        )
        values = self._out.views(shard.start, shard.stop)
        return await store.meanwhile(
            lambda: codec.encode_mean(values, self._codec, round_=commit.round, shard=shard.index)
        )

    async def _decode(self, shard: Shard, encoded: codec.Encoded) -> None:
        """Put what others will read into its place: encoding may have rounded."""
        body = memoryview(encoded.data)[codec.DATA_OFFSET :]
        await self._context.store.meanwhile(lambda: self._writer(shard)(body))

    def _writer(self, shard: Shard) -> Writer:
        return Writer(self._codec, self._out, shard.start, shard.stop)

    async def _take(self, shard: Shard) -> None:
        """Read a stored mean. One that differs from its digest is read once more, then averaged here: if that has the
        digest, these are the stored bits.
        """
        promised: str | None = None
        for _ in range(2):
            promised, held = await self._read(shard)
            if held is not None and promised == held:
                del self._left[shard.index]
                return
        encoded = await self._averaged(shard)
        if encoded.info.chunks[0] != promised:
            raise CorruptRoundError(
                f"{self._context.store.uri}/{layout.mean(self._commit.round, shard.index)}: this mean is corrupt, and "
                "averaging again does not give the bits that it promises. Who has not read it before can only go on "
                "from a checkpoint beyond that round, which strict never reaches: start a new run there",
                self._commit.round,
            )
        await self._decode(shard, encoded)
        del self._left[shard.index]

    async def _read(self, shard: Shard) -> tuple[str | None, str | None]:
        """Decode a stored mean into its place; the digest that it promises, and the one that it has."""
        store, numel = self._context.store, shard.stop - shard.start
        key = layout.mean(self._commit.round, shard.index)
        read_digest = partial(
            codec.mean_digest, codec_=self._codec, numel=numel, round_=self._commit.round, shard=shard.index, key=key
        )
        write, hashed, promised = self._writer(shard), blake3(), None
        blocks = store.stream(key, 0, codec.DATA_OFFSET + self._codec.body_bytes(numel))
        try:
            async for data in blocks:
                block = memoryview(data)
                if promised is None:
                    promised = read_digest(bytes(block[: codec.DATA_OFFSET]))
                    block = block[codec.DATA_OFFSET :]
                await store.meanwhile(partial(_hash_and_write, hashed, write, block))
        except CorruptObjectError as problem:
            await blocks.aclose()
            logger.warning("%s", problem)
            return promised, None
        return promised, hashed.hexdigest()


def _hash_and_write(hashed: blake3, write: Writer, block: memoryview) -> None:
    hashed.update(block)
    write(block)
