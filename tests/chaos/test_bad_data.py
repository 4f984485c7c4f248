"""What must never be averaged or loaded: NaN, other shapes, other bits, garbage, code."""

from __future__ import annotations

import os
import pickle
import signal
from typing import TYPE_CHECKING, Any

import pytest

from diloco.errors import ExitCode
from diloco.exchange import codec, layout
from diloco.exchange.layout import Member
from diloco.exchange.records import Header, Manifest, new_nonce
from tests.chaos.harness import KILLED, Run, header, held, payload, stopped, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    NewRun = Callable[..., Run]

NAN = {"do": "nan"}
FLIP = {"do": "flip"}


# ---- NaN


def test_a_nan_is_left_out_and_named_and_a_round_of_nothing_but_nan_is_empty(new_run: NewRun) -> None:
    run = new_run(rounds=6)
    acts = {0: [{"round": 3} | NAN], 1: [{"round": 3} | NAN], 2: [{"round": 1} | NAN, {"round": 3} | NAN]}
    processes = [run.start(rank, acts=acts[rank]) for rank in range(3)]
    assert run.end(*processes) == [0, 0, 0]
    assert "NaN or Inf" in run.left_out(1)[2]
    assert run.participants(3) == []
    assert all("NaN or Inf" in reason for reason in run.left_out(3).values())
    assert run.read(payload(1, 2)) is None
    run.check(reported={0: 1, 1: 1, 2: 1})


def test_three_empty_rounds_in_a_row_end_the_run_with_the_reason(new_run: NewRun) -> None:
    run = new_run(replicas=2)
    processes = [run.start(rank, acts=[{"round": round_} | NAN for round_ in (1, 2, 3)]) for rank in range(2)]
    assert run.end(*processes) == [ExitCode.FAILED] * 2
    for rank in range(2):
        assert "round 3" in run.error(rank).error
        assert "NaN or Inf" in run.error(rank).error


def test_a_nan_ends_a_strict_run_and_rank_and_round_are_named(new_run: NewRun) -> None:
    run = new_run(replicas=2, exchange={"policy": "strict"})
    processes = [run.start(0), run.start(1, acts=[{"round": 1} | NAN])]
    assert run.end(*processes) == [ExitCode.FAILED] * 2
    for rank in range(2):
        assert "round 1 can't be completed: rank 1 (attempt 1) abstains: its pseudo-gradient holds NaN" in (
            run.error(rank).error
        )


# ---- other models, other files


def test_a_replica_with_another_model_is_refused_by_the_first_difference(new_run: NewRun) -> None:
    run = new_run(replicas=2, rounds=2, exchange={"policy": "strict"})
    first = run.start(0)
    run.wait_for(layout.RUN)
    other = run.start(1, width=8)
    assert other.end() == ExitCode.BAD_CONFIGURATION
    assert "parameters 0/0.bias is float32[16] there and float32[8] here" in run.error(1).error
    assert run.end(first, run.start(1)) == [0, 0]
    run.check(reported={0: 1, 1: 2})


class _Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.folder,)


def test_forged_contributions_alien_files_and_code_are_never_averaged(new_run: NewRun, tmp_path: Path) -> None:
    """Rank 2 is the test: each of its headers is a copy of rank 0's with something wrong in it, or in the payload."""
    pwned = tmp_path / "pwned"
    code = pickle.dumps(_Malicious(str(pwned)))
    run = new_run(rounds=9)
    # Rank 1 waits in each round for what rank 2 is said to contribute, so that it is there in time.
    processes = [run.start(0), run.start(1, acts=[held(round_, header(round_, 2)) for round_ in range(9)])]
    reasons = []
    for round_, forge in enumerate(
        (_other_shape, _other_codec, _garbage, _flipped_bit, _nan, _other_base, _no_json, _too_short, _nothing)
    ):
        true = Header.from_json(run.wait_for(header(round_, 0)), "header")
        body = run.read(payload(round_, 0))
        assert body is not None
        fields, data = forge(true.model_dump(), bytearray(body), code)
        if data is not None:
            run.create(payload(round_, 2), bytes(data))
        for alien in (f"rounds/{round_:08d}/h/README.md", f"rounds/{round_:08d}/p/x", "commits/latest.json"):
            run.create(alien, code)
        for alien in ("members/00000/backup.json", "checkpoints/00000009/notes", "beats/x.json", "replicas/y"):
            run.create(alien, code)
        forged = fields | {"rank": 2, "nonce": new_nonce()}
        run.create(header(round_, 2), code if not fields else Header.model_validate(forged).to_json())
        reasons.append(run.left_out(round_)[2])
        assert [member.rank for member in run.participants(round_)] == [0, 1]
    assert run.end(*processes) == [0, 0]
    for reason, part in zip(
        reasons,
        (
            "other names, shapes or dtypes",
            "its payload is bf16, the run's codec is fp32",
            "payload",
            "chunk 0 of its payload is not what its header says",
            "its payload holds NaN or Inf",
            "diverged: started from 0000",
            "is not a valid Header",
            "asked for bytes 0-2112, got 1056 bytes",
            "its payload is not there",
        ),
        strict=True,
    ):
        assert part in reason, reasons
    assert not pwned.exists()
    run.check(reported={0: 1, 1: 1}, differences=["rank 2 (attempt 1) before round 5"])


def _other_shape(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    return fields | {"payload": fields["payload"] | {"layout": "0" * 64}}, data


def _other_codec(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    return fields | {"payload": fields["payload"] | {"codec": "bf16"}}, data


def _garbage(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    """Code in place of the safetensors file, with the digests that it has."""
    body = (code * (len(data) // len(code) + 1))[: len(data)]
    return _with_digest(fields, body), body


def _flipped_bit(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    data[-1] ^= 1
    return fields, data


def _nan(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    data[-4:] = b"\xff\xff\xff\xff"
    return _with_digest(fields, data), data


def _other_base(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    return fields | {"base_digest": "0" * 64}, data


def _no_json(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    return {}, data


def _too_short(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], bytes | bytearray]:
    return fields, data[: len(data) // 2]


def _nothing(fields: dict[str, Any], data: bytearray, code: bytes) -> tuple[dict[str, Any], None]:
    return fields, None


def _with_digest(fields: dict[str, Any], data: bytes | bytearray) -> dict[str, Any]:
    values = memoryview(data)[fields["payload"]["data_offset"] :]
    return fields | {"payload": fields["payload"] | {"chunks": [codec.digest(values)]}}


def test_code_in_a_checkpoint_is_not_run(new_run: NewRun, tmp_path: Path) -> None:
    pwned = tmp_path / "pwned"
    run = new_run(replicas=2, exchange={"policy": "strict"})
    first = run.start(0)
    manifest = Manifest.from_json(run.wait_for(layout.manifest(0)), "manifest")
    run.wait_for(header(0, 0))  # it has read the checkpoint
    [part] = manifest.parts
    code = pickle.dumps(_Malicious(str(pwned)))
    run.write(part.key, (code * (part.size // len(code) + 1))[: part.size])
    late = run.start(1)
    assert late.end() == ExitCode.FAILED
    assert f"{part.key}: no safetensors file" in run.error(1).error
    assert not pwned.exists()
    first.process.kill()
    assert first.end() == KILLED


@pytest.mark.parametrize("how", ["a flipped bit", "another round's"])
def test_a_payload_that_changes_after_the_commit_is_never_averaged(new_run: NewRun, how: str) -> None:
    """Rank 2 is stopped before it can read what the others commit; then the object changes. It goes on from a later
    checkpoint, in whose round it has no part."""
    run = new_run(rounds=8, exchange={"grace": 1.5})
    others = [run.start(rank, acts=[held(7, header(7, 2))]) for rank in (0, 1)]
    victim = run.start(2, points=[stopped("after", "create", header(2, 2))])
    victim.wait_until_stopped()
    assert run.commit(2).participants
    true = run.read(payload(2, 0))
    assert true is not None
    if how == "a flipped bit":
        changed = bytes([*true[:-1], true[-1] ^ 1])
    else:
        changed = until(lambda: run.read(payload(1, 0)), "the payload of round 1")
    run.write(payload(2, 0), changed)
    victim.signal(signal.SIGCONT)
    assert run.end(*others, victim) == [0, 0, 0]
    assert "is corrupt now" in victim.text()
    assert "round 2 is not applied" in victim.text()
    run.write(payload(2, 0), true)  # or there would be nothing to verify round 2 by
    run.check(reported={0: 1, 1: 1, 2: 1})


# ---- divergence


def test_a_replica_that_diverges_is_left_out_and_named_and_its_checkpoint_refuted(new_run: NewRun) -> None:
    """Rank 2 flips a bit in round 3, and writes checkpoint 4: participant 4 / 2 mod 3."""
    run = new_run(rounds=8)
    # In round 4 the others wait for that checkpoint, so that rank 2 meets it; in round 6 until rank 2 is back.
    waits = [held(4, layout.manifest(4)), held(6, header(6, 2))]
    others = [run.start(rank, acts=waits) for rank in (0, 1)]
    diverged = run.start(2, acts=[{"round": 3} | FLIP])
    assert run.end(*others, diverged) == [0, 0, 0]
    assert Member(2, 1) in run.participants(3)  # it still started from the same bits
    assert "diverged: started from" in run.left_out(4)[2]
    manifest = Manifest.from_json(run.wait_for(layout.manifest(4)), "manifest")
    assert manifest.rank == 2
    assert manifest.parts[0].digest != run.commit(4).base_digest
    assert "checkpoint 4 of rank 2 is not used: round 4 was committed on other bits" in diverged.text()
    assert Member(2, 1) in run.participants(7)
    run.check(reported={0: 1, 1: 1, 2: 1}, differences=["rank 2 (attempt 1) before round 4"])


def test_a_replica_that_diverges_in_the_last_round_does_not_turn_the_result(new_run: NewRun) -> None:
    run = new_run(rounds=4)
    others = [run.start(rank) for rank in (0, 1)]
    diverged = run.start(2, acts=[{"round": 3} | FLIP])
    assert run.end(*others, diverged) == [0, 0, ExitCode.FAILED]
    said = run.error(2).error
    assert said.startswith("DivergedError: rank 2 (attempt 1): its final parameters")
    assert "are not those of the result" in said
    run.check(reported={0: 1, 1: 1}, differences=["rank 2 (attempt 1) after round 3"])


def test_a_replica_that_diverges_ends_a_strict_run_and_both_sides_are_named(new_run: NewRun) -> None:
    run = new_run(exchange={"policy": "strict"})
    # It comes last to round 2, so that all see both sides at once.
    diverged = run.start(2, acts=[{"round": 1} | FLIP, held(2, header(2, 0)), held(2, header(2, 1))])
    assert run.end(run.start(0), run.start(1), diverged) == [ExitCode.FAILED] * 3
    for rank in range(3):
        said = run.error(rank).error
        assert "round 2 can't be completed: replicas hold different parameters: ranks 0, 1 hold" in said
        assert "; ranks 2 hold" in said
