"""Pruning deletes runs that are over, all of them, and never one in which anything may be alive."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from diloco import prune
from diloco.cli import main
from diloco.errors import AccessDeniedError, ConfigurationError
from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Beat, LauncherBeat
from diloco.exchange.store import open_store
from diloco.prune import DAY, SILENCE, Selection, Verdict, prune_runs
from tests.support.stores import RecordingStore, WrappedStore, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.exchange.store import Store

MEMBER = Member(0, 1)
WATCH = 0.2  # for runs in which nothing is alive
PATIENCE = 3.0  # for those in which a beat changes every 0.1 s
FINISHED = (
    layout.SPEC,
    layout.RUN,
    layout.launcher(1),
    layout.claim(MEMBER),
    layout.payload(3, MEMBER),
    layout.header(3, MEMBER),
    layout.commit(3),
    layout.checkpoint_part(3, MEMBER, 0),
    layout.manifest(3),
    layout.result(MEMBER),
    f"{layout.MODEL}/model.safetensors",
    layout.RESULT,
)


async def write_run(store: Store, run_id: str, keys: tuple[str, ...] = FINISHED) -> None:
    for key in keys:
        await store.write(f"{run_id}/{key}", b"{}")
    beat = Beat(rank=0, attempt=1, counter=7, phase="finished")
    await store.write(f"{run_id}/{layout.beat(MEMBER)}", beat.to_json())
    await store.write(f"{run_id}/{layout.launcher_beat(1)}", LauncherBeat(number=1, counter=7, ended=True).to_json())


async def write_runs(uri: str, **runs: tuple[str, ...]) -> None:
    async with opened(uri) as store:
        for run_id, keys in runs.items():
            await write_run(store, run_id, keys)


UNFINISHED = tuple(key for key in FINISHED if key != layout.RESULT)


def runs_left(uri: str) -> set[str]:
    async def listed() -> set[str]:
        async with opened(uri) as store:
            return {entry.key.partition("/")[0] for entry in await store.list("")}

    return asyncio.run(listed())


def pruned(
    uri: str, selection: Selection | None = None, *, delete: bool = True, watch: float = WATCH, now: float | None = None
) -> dict[str, Verdict]:
    verdicts = asyncio.run(prune_runs(uri, selection or Selection(), delete=delete, watch=watch, now=now))
    return {verdict.run_id: verdict for verdict in verdicts}


def test_finished_runs_go_and_others_stay(store_uri: str) -> None:
    asyncio.run(write_runs(store_uri, done=FINISHED, going=UNFINISHED))
    verdicts = pruned(store_uri)
    assert verdicts["done"].delete
    assert verdicts["done"].objects == len(FINISHED) + 2
    assert not verdicts["going"].delete
    assert "--failed" in verdicts["going"].reason
    assert runs_left(store_uri) == {"going"}


def test_without_delete_nothing_changes(store_uri: str) -> None:
    asyncio.run(write_runs(store_uri, done=FINISHED))
    assert pruned(store_uri, delete=False)["done"].delete
    assert runs_left(store_uri) == {"done"}


def test_the_model_can_be_kept(store_uri: str) -> None:
    asyncio.run(write_runs(store_uri, done=FINISHED))
    assert pruned(store_uri, Selection(keep_model=True))["done"].objects == len(FINISHED)

    async def listed() -> set[str]:
        async with opened(store_uri) as store:
            return {entry.key for entry in await store.list("")}

    assert asyncio.run(listed()) == {"done/final/result.json", "done/final/model/model.safetensors"}
    again = pruned(store_uri, Selection(keep_model=True))["done"]
    assert (again.delete, again.reason) == (False, "only its model is left, and --keep-model keeps it")
    assert pruned(store_uri)["done"].delete
    assert runs_left(store_uri) == set()


def test_only_named_runs(store_uri: str) -> None:
    asyncio.run(write_runs(store_uri, one=FINISHED, two=FINISHED))
    assert pruned(store_uri, Selection(run_ids=frozenset({"one"}))).keys() == {"one"}
    assert runs_left(store_uri) == {"two"}
    with pytest.raises(ConfigurationError, match="--run-id three: no such run"):
        pruned(store_uri, Selection(run_ids=frozenset({"two", "three"})))
    assert runs_left(store_uri) == {"two"}


def test_what_is_no_run_is_left_alone(store_uri: str) -> None:
    async def write() -> None:
        async with opened(store_uri) as store:
            await store.write("notes/readme.txt", b"mine")
            await store.write("Data/final/result.json", b"a name that no run has")
            await store.write("final/result.json", b"the folder is a run itself")

    asyncio.run(write())
    assert [verdict for verdict in pruned(store_uri).values() if verdict.delete] == []
    assert runs_left(store_uri) >= {"notes", "Data"}


def with_beats(uri: str, run: Callable[[], Any], keys: list[str]) -> Any:
    """Call `run` in a thread while the objects of some keys change."""

    async def both() -> Any:
        async with opened(uri) as store:
            task = asyncio.create_task(asyncio.to_thread(run))
            counter = 0
            while not task.done():
                counter += 1
                for key in keys:
                    if "launcher" in key:
                        data = LauncherBeat(number=1, counter=counter).to_json()
                    else:
                        data = Beat(rank=0, attempt=1, counter=counter, phase="training").to_json()
                    await store.write(key, data)
                await asyncio.wait([task], timeout=0.1)
            return task.result()

    return asyncio.run(both())


@pytest.mark.parametrize(
    "key", [layout.beat(MEMBER), layout.launcher_beat(1), layout.beat(Member(5, 2))], ids=["replica", "launcher", "new"]
)
def test_a_run_whose_beats_change_is_alive(store_uri: str, key: str) -> None:
    asyncio.run(write_runs(store_uri, busy=FINISHED, done=FINISHED))
    verdicts = with_beats(store_uri, lambda: pruned(store_uri, watch=PATIENCE), [f"busy/{key}"])
    assert verdicts["done"].delete
    assert not verdicts["busy"].delete
    assert verdicts["busy"].reason == f"alive: {key} changes"
    assert runs_left(store_uri) == {"busy"}


def later(days: float) -> float:
    return time.time() + days * DAY


def knows_age(uri: str) -> bool:
    return not uri.startswith("memory:")


def test_age_is_that_of_the_newest_object(store_uri: str) -> None:
    asyncio.run(write_runs(store_uri, done=FINISHED))
    week = Selection(older_than=7 * DAY)
    young = pruned(store_uri, week, now=later(6))["done"]
    assert not young.delete
    assert runs_left(store_uri) == {"done"}
    old = pruned(store_uri, week, now=later(8))["done"]
    if knows_age(store_uri):
        assert young.reason == "6.0 days old: less than 7"
        assert old.delete
        assert old.age_days == pytest.approx(8, abs=0.01)
    else:
        assert old.reason == "the store does not say how old it is"
        assert runs_left(store_uri) == {"done"}


def test_an_unfinished_run_must_have_been_silent_for_longer_than_any_spot_job_waits(store_uri: str) -> None:
    asyncio.run(write_runs(store_uri, gone=UNFINISHED))
    failed = Selection(failed=True, older_than=DAY)
    assert not pruned(store_uri, failed, now=later(SILENCE / DAY - 1))["gone"].delete
    verdict = pruned(store_uri, failed, now=later(SILENCE / DAY + 1))["gone"]
    assert verdict.delete == knows_age(store_uri)
    assert runs_left(store_uri) == (set() if knows_age(store_uri) else {"gone"})


def test_an_old_unfinished_run_may_still_be_alive(store_uri: str) -> None:
    if not knows_age(store_uri):
        return  # nothing without a date is old
    asyncio.run(write_runs(store_uri, busy=UNFINISHED))
    selection = Selection(failed=True)
    run = lambda: pruned(store_uri, selection, watch=PATIENCE, now=later(100))  # noqa: E731
    assert not with_beats(store_uri, run, [f"busy/{layout.beat(MEMBER)}"])["busy"].delete
    assert runs_left(store_uri) == {"busy"}


def through(monkeypatch: pytest.MonkeyPatch, wrapper: type[WrappedStore], *arguments: Any) -> list[Any]:
    """Let pruning see its store through a wrapper; returns a list that will hold it."""
    made: list[Any] = []

    def wrapped(uri: str, **options: Any) -> Store:
        store: Store = wrapper(open_store(uri, **options), *arguments)
        made.append(store)
        return store

    monkeypatch.setattr(prune, "open_store", wrapped)
    return made


def test_what_says_that_the_run_is_over_goes_last(store_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(write_runs(store_uri, done=FINISHED))
    made = through(monkeypatch, RecordingStore)
    pruned(store_uri)
    deleted = [key for operation, key in made[0].operations if operation == "delete"]
    assert deleted[-3:] == [f"done/{key}" for key in (layout.RUN, layout.SPEC, layout.RESULT)]
    assert deleted.index(f"done/{layout.commit(3)}") > deleted.index(f"done/{layout.payload(3, MEMBER)}")


class Unplugged(WrappedStore):
    """Deletes only so many objects."""

    def __init__(self, inner: Store, left: int) -> None:
        super().__init__(inner)
        self._left = left

    async def before(self, operation: str, key: str) -> None:
        if operation == "delete":
            self._left -= 1
            if self._left < 0:
                raise AccessDeniedError(f"{key}: s3:DeleteObject is missing")


@pytest.mark.parametrize("deletions", [0, 1, 5, len(FINISHED) + 1])
def test_a_deletion_that_was_cut_short_can_be_repeated(
    store_uri: str, monkeypatch: pytest.MonkeyPatch, deletions: int
) -> None:
    asyncio.run(write_runs(store_uri, done=FINISHED))
    with monkeypatch.context() as patch:
        through(patch, Unplugged, deletions)
        with pytest.raises(AccessDeniedError):
            pruned(store_uri)
    assert runs_left(store_uri) == {"done"}
    assert pruned(store_uri)["done"].delete
    assert runs_left(store_uri) == set()


def test_the_command_line_deletes_only_when_told(
    store_uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prune, "WATCH", WATCH)
    asyncio.run(write_runs(store_uri, done=FINISHED))
    assert main(["prune", store_uri]) == 0
    printed = capsys.readouterr().out
    assert "would delete done: finished" in printed
    assert "--yes deletes" in printed
    assert runs_left(store_uri) == {"done"}
    assert main(["prune", store_uri, "--yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["deleted"]
    assert [run["run_id"] for run in document["runs"]] == ["done"]
    assert runs_left(store_uri) == set()


def test_the_command_line_refuses_a_negative_age(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "memory://nothing", "--older-than", "-1"]) == 2
    assert "--older-than -1 is below 0" in capsys.readouterr().err
