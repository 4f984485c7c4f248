"""The end of a run: who writes the result, on which votes, and who may not end well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import DivergedError, RoundTimeoutError
from diloco.exchange import ending, layout
from diloco.exchange.layout import Member
from diloco.exchange.records import RunResult, Vote
from diloco.exchange.stores import MemoryStore
from tests.support.virtual import World, member_context, run_record

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.exchange.context import Context

RUN = run_record()


class End:
    """Members of a run of three, `min_replicas` 2, after the last round."""

    def __init__(self, seed: int = 0) -> None:
        self.world, self.store = World(seed), MemoryStore()

    def member(self, rank: int, attempt: int = 1, **settings: Any) -> Context:
        return member_context(self.world, self.store, rank, attempt=attempt, run=RUN, **settings)

    def vote(self, rank: int, digest: str, attempt: int = 1) -> None:
        self.world.complete(ending.vote(self.member(rank, attempt), digest))

    def await_(self, rank: int, digest: str, **settings: Any) -> RunResult | list[Vote]:
        return self.world.complete(ending.await_result(self.member(rank, **settings), digest))[0]

    def result(self) -> RunResult | None:
        return self.world.complete(ending.read_result(self.store))[0]


async def finish(context: Context, digest: str) -> RunResult:
    await ending.vote(context, digest)
    found = await ending.await_result(context, digest)
    if isinstance(found, RunResult):
        return found
    return await ending.write_result(context, digest, found, None, None)


@pytest.mark.parametrize("seed", range(25))
def test_all_end_with_one_result(seed: int) -> None:
    end = End(seed)
    results = end.world.complete(*(finish(end.member(rank), "d") for rank in range(3)))
    assert results[0] == results[1] == results[2] == end.result()
    assert results[0].digest == "d"
    assert len(results[0].votes) >= 2


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_majority_decides_and_a_diverged_replica_does_not_end_well(seed: int, odd: int) -> None:
    end = End(seed)
    tasks = [
        end.world.start(finish(end.member(rank), "odd" if rank == odd else "d"), f"rank {rank}") for rank in range(3)
    ]
    end.world.run()
    assert isinstance(tasks[odd].problem, DivergedError)
    assert f"rank {odd} (attempt 1)" in str(tasks[odd].problem)
    result = end.result()
    assert result is not None
    assert result.digest == "d"
    assert {v.rank for v in result.votes} == {0, 1, 2} - {odd}


def test_no_result_below_min_replicas() -> None:
    end = End()
    end.vote(0, "d")
    with pytest.raises(
        RoundTimeoutError,
        match=r"rank 0 \(attempt 1\): the end of the run .* votes on the result \(1 of 2\)",
    ):
        end.await_(0, "d", timeout=50)
    assert end.result() is None


def test_a_tie_gives_no_result() -> None:
    end = End()
    for rank, digest in enumerate("aabb"):
        end.vote(rank, digest)
    with pytest.raises(RoundTimeoutError):
        end.await_(0, "a", timeout=100)
    end.vote(4, "b")
    assert end.await_(2, "b") == [Vote(rank=rank, attempt=1) for rank in (2, 3, 4)]


def test_the_lowest_rank_with_the_winning_state_writes() -> None:
    end = End()
    end.vote(0, "odd")
    end.vote(1, "d")
    end.vote(2, "d")
    before = end.world.monotonic()
    assert end.await_(1, "d") == [Vote(rank=1, attempt=1), Vote(rank=2, attempt=1)]
    assert end.world.monotonic() == before


def test_another_takes_over_after_dead_after() -> None:
    end = End()
    for rank in range(3):
        end.vote(rank, "d")
    assert end.await_(2, "d", dead_after=20) == [Vote(rank=rank, attempt=1) for rank in range(3)]
    assert 20 < end.world.monotonic() < 25


def test_a_diverged_replica_never_takes_over() -> None:
    end = End()
    end.vote(0, "odd")
    end.vote(1, "d")
    end.vote(2, "d")
    with pytest.raises(RoundTimeoutError, match="rank 1 to write the model"):
        end.await_(0, "odd", dead_after=5, timeout=100)


def test_only_the_newest_attempts_vote_counts() -> None:
    end = End()
    end.vote(0, "d", attempt=1)
    end.vote(0, "e", attempt=2)
    end.vote(1, "e")
    assert end.await_(0, "e", timeout=10) == [Vote(rank=0, attempt=2), Vote(rank=1, attempt=1)]


def test_what_is_no_vote_does_not_count() -> None:
    end = End()
    end.vote(0, "d")
    end.world.complete(end.store.write(layout.header(RUN.rounds, Member(1, 1)), b"vote for d"))
    with pytest.raises(RoundTimeoutError):
        end.await_(0, "d", timeout=10)


def test_the_first_result_stays() -> None:
    end = End()
    votes = [Vote(rank=0, attempt=1), Vote(rank=1, attempt=1)]
    [first] = end.world.complete(ending.write_result(end.member(0), "d", votes, None, None))
    [second] = end.world.complete(ending.write_result(end.member(1), "d", votes, None, None))
    assert first == second
    assert (first.rank, first.rounds, first.model_uri) == (0, RUN.rounds, None)
    assert end.await_(2, "d") == first


def test_the_model_is_there_before_the_result(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "sub" / "weights").write_bytes(b"1234")
    end = End()
    [result] = end.world.complete(ending.write_result(end.member(0), "d", [], tmp_path, None))
    keys = list(end.store._objects)
    assert keys == ["final/model/config.json", "final/model/sub/weights", layout.RESULT]
    assert result.model_uri == f"{end.store.uri}/final/model"


def test_the_model_may_go_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    end, output = End(), MemoryStore("memory://output-of-a-test")
    [result] = end.world.complete(ending.write_result(end.member(0), "d", [], tmp_path, output))
    assert list(output._objects) == ["config.json"]
    assert result.model_uri == "memory://output-of-a-test"
    assert list(end.store._objects) == [layout.RESULT]
    MemoryStore.forget(output.uri)
