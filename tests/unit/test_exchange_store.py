"""Create-once settled by nonce, the first contact's proof, and errors in one line each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from functools import partial
from typing import TYPE_CHECKING

import botocore.exceptions
import pytest
from s3fs.errors import translate_boto_error

from diloco.errors import (
    AccessDeniedError,
    BucketMissingError,
    ConditionalWriteError,
    ConfigurationError,
    CorruptObjectError,
    DilocoError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreError,
    StoreUnreachableError,
)
from diloco.exchange import layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Claim
from diloco.exchange.remote import RemoteStore
from diloco.exchange.s3_errors import AlreadyThereError, explain
from diloco.exchange.store import CREATE_ATTEMPTS, Data, check_store, create_once, open_store
from diloco.exchange.stores import LocalStore, MemoryStore
from tests.support.stores import LostAnswers, RecordingStore, UnconditionalStore, UnlistedStore, WrappedStore
from tests.support.virtual import VirtualStore, World

if TYPE_CHECKING:
    from pathlib import Path

    from diloco.exchange.store import Store

KEY = "members/00001/00001.json"


def claim(pid: int = 1) -> Claim:
    return Claim(rank=1, attempt=1, host="here", pid=pid)


def create(store: Store, record: Claim) -> tuple[bool, bytes]:
    return World().complete(create_once(store, KEY, record))[0]


def test_the_first_creates_and_the_second_reads() -> None:
    store = MemoryStore()
    first, second = claim(1), claim(2)
    assert create(store, first) == (True, first.to_json())
    assert create(store, second) == (False, first.to_json())


def test_equal_contents_by_another_process_are_not_mine() -> None:
    store = MemoryStore()
    first = claim()
    create(store, first)
    assert create(store, claim()) == (False, first.to_json())


@pytest.mark.parametrize("seed", range(20))
def test_one_of_many_wins_and_all_know_which(seed: int) -> None:
    world, store = World(seed), MemoryStore()
    found = world.complete(*(create_once(VirtualStore(world, store), KEY, claim(n)) for n in range(16)))
    assert [mine for mine, _ in found].count(True) == 1
    assert len({stored for _, stored in found}) == 1


def test_answer_lost_but_written_is_mine() -> None:
    store, mine = MemoryStore(), claim()
    assert create(LostAnswers(store, written=True), mine) == (True, mine.to_json())


def test_answer_lost_and_somebody_elses_is_not_mine() -> None:
    store, mine, theirs = MemoryStore(), claim(1), claim(2)
    for written in (True, False):
        store = MemoryStore()
        lost = LostAnswers(store, written=written, rival=theirs.to_json())
        assert create(lost, mine) == (False, theirs.to_json())


def test_answer_lost_and_not_written_is_tried_again() -> None:
    store, mine = MemoryStore(), claim()
    lost = LostAnswers(store, written=False, times=CREATE_ATTEMPTS - 1)
    assert create(lost, mine) == (True, mine.to_json())
    assert lost.left == 0


def test_a_create_that_is_never_answered_ends() -> None:
    with pytest.raises(OutcomeUnknownError, match=KEY):
        create(LostAnswers(MemoryStore(), written=False, times=1000), claim())


class Flickering(MemoryStore):
    """Says that the object exists, and that it does not."""

    async def _create(self, key: str, data: Data) -> bool:  # noqa: ARG002 - it stores nothing
        return False


def test_a_store_that_contradicts_itself_ends() -> None:
    with pytest.raises(OutcomeUnknownError, match="says that it exists, and that it does not"):
        create(Flickering(), claim())


@pytest.mark.parametrize("data", [b"", b"x", b"constant"])
def test_the_memory_store_creates_once_even_for_equal_bytes(data: bytes) -> None:
    store = MemoryStore()
    assert World().complete(store.create(KEY, data)) == [True]
    assert World().complete(store.create(KEY, data)) == [False]


def test_memory_stores_share_by_uri_and_are_forgotten() -> None:
    world = World()
    world.complete(MemoryStore("memory://shared").write("a", b"1"))
    assert world.complete(MemoryStore("memory://shared/").read("a")) == [b"1"]
    MemoryStore.forget("memory://shared")
    with pytest.raises(ObjectMissingError):
        world.complete(MemoryStore("memory://shared").read("a"))
    MemoryStore.forget("memory://shared")
    world.complete(MemoryStore().write("a", b"1"))
    with pytest.raises(ObjectMissingError):
        world.complete(MemoryStore().read("a"))


def test_requests_and_bytes_are_counted() -> None:
    world, store = World(), MemoryStore()
    world.complete(store.create("a/b", b"12345"))
    world.complete(store.write("a/c", b"123"))
    world.complete(store.read("a/b", 1, 3))
    world.complete(store.list("a/"))
    world.complete(store.delete(["a/b", "a/c"]))
    assert (store.stats.requests, store.stats.bytes_up, store.stats.bytes_down) == (6, 8, 2)


def test_a_short_answer_is_an_error() -> None:
    world, store = World(), MemoryStore()
    world.complete(store.write("a", b"12345"))
    with pytest.raises(CorruptObjectError, match="a: asked for bytes 2-9, got 3 bytes"):
        world.complete(store.read("a", 2, 9))


# ---- the first contact


def check(store: Store) -> None:
    asyncio.run(check_store(store))


def test_a_good_store_passes_and_is_left_as_it_was() -> None:
    store = RecordingStore(MemoryStore())
    check(store)
    assert [operation for operation, _ in store.operations].count("create") == 2
    assert asyncio.run(store.list("")) == []


def test_a_store_that_ignores_conditions_is_refused() -> None:
    store = UnconditionalStore()
    with pytest.raises(ConditionalWriteError, match="ignores conditional writes"):
        check(store)
    assert asyncio.run(store.list("")) == []


class SecretlyUnconditional(MemoryStore):
    """Answers 412 but writes all the same."""

    async def _create(self, key: str, data: Data) -> bool:
        there = key in self._objects
        await self._write(key, data)
        return not there


def test_a_store_that_lies_about_conditions_is_refused() -> None:
    with pytest.raises(ConditionalWriteError):
        check(SecretlyUnconditional())


def test_a_store_that_lists_late_is_refused() -> None:
    with pytest.raises(ConditionalWriteError, match="not listed"):
        check(UnlistedStore())


class Silent(WrappedStore):
    """Never answers."""

    async def before(self, operation: str, key: str) -> None:  # noqa: ARG002 - every operation alike
        await asyncio.Event().wait()


def test_a_store_that_does_not_answer_is_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.exchange.store.CHECK_SECONDS", 0.01)
    with pytest.raises(StoreUnreachableError, match="no answer within"):
        check(Silent(MemoryStore()))


# ---- addresses


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("runs/one", "has no scheme"),
        ("", "has no scheme"),
        ("s3://", "names no bucket"),
        ("file://runs/one", "three slashes"),
    ],
)
def test_addresses_that_can_not_be_used(uri: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        open_store(uri)


def test_each_scheme_has_its_store() -> None:
    assert isinstance(open_store("memory://a"), MemoryStore)
    assert isinstance(open_store("file:///a%20b"), LocalStore)
    assert isinstance(open_store("s3://bucket/prefix/"), RemoteStore)
    assert open_store("s3://bucket/prefix/").uri == "s3://bucket/prefix"
    MemoryStore.forget("memory://a")


@pytest.mark.parametrize("uri", ["nonsense://a/b", "http://host/a"])
def test_a_scheme_that_can_not_create_if_absent_is_refused_at_first_use(uri: str) -> None:
    with pytest.raises((ConfigurationError, StoreError), match=uri.split(":", 1)[0]):
        check(open_store(uri))


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/run"):
        check(open_store((tmp_path / "file" / "run").as_uri()))


def test_a_local_store_shows_only_whole_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path.as_uri())
    (tmp_path / "rounds").mkdir()
    (tmp_path / "rounds" / ".writing-abc").write_bytes(b"half")
    asyncio.run(store.create("rounds/a", b"whole"))
    assert [entry.key for entry in asyncio.run(store.list("rounds/"))] == ["rounds/a"]
    assert {path.name for path in (tmp_path / "rounds").iterdir()} == {".writing-abc", "a"}


# ---- what goes wrong in a bucket


class ClientError(Exception):
    """As botocore's: carries the answer."""

    def __init__(self, code: str, **fields: str) -> None:
        super().__init__(f"An error occurred ({code})\nwhen calling the operation")
        self.response = {"Error": {"Code": code, **fields}}


def caused(outer: Exception, code: str) -> Exception:
    """As s3fs raises it: a Python error with botocore's as its cause."""
    outer.__cause__ = ClientError(code)
    return outer


def named(name: str) -> Exception:
    """An error of a library, of which only the class's name is looked at."""
    kind: type[Exception] = type(name, (Exception,), {})
    return kind("something\nhappened")


@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        (caused(FileNotFoundError(), "NoSuchBucket"), BucketMissingError, "s3://b/run: the bucket does not exist"),
        (caused(FileNotFoundError(), "NoSuchKey"), ObjectMissingError, "s3://b/run/key"),
        (caused(FileNotFoundError(), "404"), ObjectMissingError, "s3://b/run/key"),
        (caused(FileNotFoundError(), "NoSuchUpload"), ObjectMissingError, "s3://b/run/key"),
        (caused(PermissionError(), "ExpiredToken"), AccessDeniedError, "s3://b/run/key: the credentials have expired"),
        (ClientError("ExpiredTokenException"), AccessDeniedError, "the credentials have expired"),
        (caused(PermissionError(), "InvalidAccessKeyId"), AccessDeniedError, "AWS_ACCESS_KEY_ID"),
        (caused(PermissionError(), "SignatureDoesNotMatch"), AccessDeniedError, "secret access key is wrong"),
        (named("NoCredentialsError"), AccessDeniedError, "no usable AWS credentials"),
        (named("ProfileNotFound"), AccessDeniedError, "AWS_PROFILE"),
        (caused(OSError(errno.EINVAL, "x"), "412"), AlreadyThereError, "s3://b/run/key"),
        (caused(OSError(errno.EINVAL, "x"), "PreconditionFailed"), AlreadyThereError, "s3://b/run/key"),
        (FileExistsError(), AlreadyThereError, "s3://b/run/key"),
        (caused(OSError(errno.EBUSY, "x"), "409"), StoreUnreachableError, "no answer on create"),
        (caused(OSError(errno.EIO, "x"), "ConditionalRequestConflict"), StoreUnreachableError, "no answer on create"),
        (named("EndpointConnectionError"), StoreUnreachableError, "no answer on create: something happened"),
        (named("ReadTimeoutError"), StoreUnreachableError, "no answer on create"),
        (caused(OSError(errno.EBUSY, "x"), "SlowDown"), StoreUnreachableError, "no answer on create"),
        (caused(OSError(errno.EIO, "x"), "InternalError"), StoreUnreachableError, "no answer on create"),
        (TimeoutError(), StoreUnreachableError, "time-out"),
        (ConnectionResetError("reset"), StoreUnreachableError, "reset"),
        (named("InvalidBucketName"), ConfigurationError, "something happened"),
        (caused(OSError(errno.EIO, "x"), "EntityTooLarge"), StoreError, "create failed: OSError"),
        (ValueError("odd\nthing"), StoreError, "create failed: ValueError: odd thing"),
    ],
)
def test_each_error_is_explained_in_one_line(problem: Exception, kind: type[DilocoError], text: str) -> None:
    found = explain(problem, "create", "s3://b/run", "key")
    assert type(found) is kind
    assert text in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidIdentityToken", "ExpiredTokenException"])
def test_a_token_that_sts_refuses_is_no_missing_permission_in_the_bucket(code: str) -> None:
    refused = botocore.exceptions.ClientError({"Error": {"Code": code, "Message": "no"}}, "AssumeRoleWithWebIdentity")
    found = explain(translate_boto_error(refused), "create", "s3://b/run", "key")
    assert type(found) is AccessDeniedError
    assert "s3:PutObject" not in str(found)
    assert f"({code}) when calling the AssumeRoleWithWebIdentity operation: no: check AWS_ROLE_ARN" in str(found)


@pytest.mark.parametrize("variable", ["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE"])
def test_a_token_file_that_is_not_there_is_no_missing_object(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "token"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/pods")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/v1/credentials")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, str(missing))

    async def use() -> None:
        store = open_store("s3://b/run")
        for operation in (store.read("key"), store.create("key", b"1"), store.list("key/")):
            with pytest.raises(AccessDeniedError) as refused:
                await operation
            assert str(refused.value).startswith(
                f"s3://b/run: no usable AWS credentials: {missing} of {variable} can't be read: No such file"
            )
        await store.close()

    asyncio.run(use())


@pytest.mark.parametrize(
    ("operation", "permission"),
    [
        ("read", "s3:GetObject"),
        ("create", "s3:PutObject"),
        ("write", "s3:PutObject"),
        ("list", "s3:ListBucket"),
        ("delete", "s3:DeleteObject"),
    ],
)
@pytest.mark.parametrize("problem", [caused(PermissionError(), "AccessDenied"), PermissionError(), ClientError("403")])
def test_a_denial_names_the_key_and_the_permission(problem: Exception, operation: str, permission: str) -> None:
    found = explain(problem, operation, "s3://b/run", "rounds/1")
    assert type(found) is AccessDeniedError
    assert f"s3://b/run/rounds/1: access denied on {operation}" in str(found)
    assert permission in str(found)


class Failing(RemoteStore):
    """A bucket whose filesystem raises."""

    def __init__(self, problem: Exception) -> None:
        super().__init__("s3://b/run", {})
        self._problem = problem

    def _client(self) -> object:
        problem = self._problem

        class Filesystem:
            async def set_session(self) -> None: ...

            def split_path(self, path: str) -> tuple[str, str, None]:
                bucket, _, key = path.partition("/")
                return bucket, key, None

            async def _call_s3(self, *_: object, **__: object) -> None:
                raise problem

        return Filesystem()


def try_create(problem: Exception) -> bool:
    return asyncio.run(Failing(problem).create("key", b"data"))


def test_412_in_any_shape_means_that_it_is_there() -> None:
    for problem in (FileExistsError(), caused(OSError(errno.EINVAL, "x"), "412"), ClientError("PreconditionFailed")):
        assert try_create(problem) is False


@pytest.mark.parametrize(
    "problem",
    [
        TimeoutError(),
        ConnectionResetError(),
        named("EndpointConnectionError"),
        caused(OSError(errno.EBUSY, "x"), "409"),
        caused(FileNotFoundError(), "NoSuchUpload"),
        caused(OSError(errno.EIO, "x"), "InternalError"),
    ],
)
def test_a_create_without_a_clear_answer_has_an_unknown_outcome(problem: Exception) -> None:
    with pytest.raises(OutcomeUnknownError, match="s3://b/run/key"):
        try_create(problem)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (caused(FileNotFoundError(), "NoSuchBucket"), BucketMissingError),
        (caused(PermissionError(), "AccessDenied"), AccessDeniedError),
        (caused(PermissionError(), "ExpiredToken"), AccessDeniedError),
    ],
)
def test_a_create_that_was_refused_for_good_fails_at_once(problem: Exception, kind: type[DilocoError]) -> None:
    with pytest.raises(kind):
        try_create(problem)


def test_a_store_that_is_down_is_unreachable_at_the_first_contact() -> None:
    with pytest.raises(StoreUnreachableError, match="s3://b/run"):
        check(Failing(named("EndpointConnectionError")))


def test_members_write_as_they_are_read() -> None:
    assert str(Member(3, 2)) == "rank 3 (attempt 2)"
    assert layout.member_name(Member(3, 2)) == "00003-00002"


def test_of_several_transfers_the_first_failure_ends_the_others() -> None:
    began, ended = [], []

    async def long(name: str) -> None:
        began.append(name)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # as a library below may do
                await asyncio.sleep(3600)
            await asyncio.sleep(3600)
        finally:
            ended.append(name)

    async def failing() -> None:
        began.append("failing")
        raise StoreUnreachableError("no answer")

    async def transfer() -> None:
        store = RemoteStore("s3://bucket/run", {})
        with pytest.raises(StoreUnreachableError):
            await store.each([partial(long, "first"), failing, partial(long, "never")])

    asyncio.run(asyncio.wait_for(transfer(), 20))
    assert began == ["first", "failing"]
    assert ended == ["first"]


def test_several_transfers_go_on_two_at_a_time_with_another_thing_beside_them(caplog: pytest.LogCaptureFixture) -> None:
    running, most = set[int](), 0
    order: list[int | str] = []

    async def short(name: int) -> None:
        nonlocal most
        running.add(name)
        most = max(most, len(running))
        for _ in range(5):  # several turns of the loop, so that others run
            await asyncio.sleep(0)
        running.remove(name)
        order.append(name)

    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        if looks == 2:
            raise ObjectMissingError("not there")
        order.append(f"look {looks}")

    async def then() -> None:
        order.append("then")

    async def transfer() -> None:
        await RemoteStore("s3://bucket/run", {}).each([partial(short, n) for n in range(6)], then=then, beside=look)

    asyncio.run(asyncio.wait_for(transfer(), 20))
    assert most == 2
    assert [one for one in order if isinstance(one, int)] == list(range(6))
    assert looks > 1
    assert order[-2:] == [5, "then"], "nothing is begun beside what has ended"
    assert "not there" in caplog.text


def test_what_is_under_way_beside_transfers_is_finished() -> None:
    done = []

    async def then() -> None:
        done.append("then")
        followed.set()

    async def short() -> None:
        await asyncio.sleep(0)

    async def look() -> None:
        await followed.wait()
        done.append("looked")

    async def transfer() -> None:
        await RemoteStore("s3://bucket/run", {}).each([short] * 3, then=then, beside=look)

    followed = asyncio.Event()
    asyncio.run(asyncio.wait_for(transfer(), 20))
    assert done == ["then", "looked"], "what follows the transfers does not wait"
