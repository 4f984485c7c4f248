"""Wire formats: how far off a value may be, the same bytes every time, and what can't be sent."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from diloco import cost
from diloco.errors import ConfigurationError
from diloco.exchange.formats import CODECS, SCALE_BYTES, Codec, codec, finite
from diloco.exchange.settings import CodecName

MOST = {"int8": 127, "int4": 7}
integers = pytest.mark.parametrize("name", MOST)
every = pytest.mark.parametrize("wire", CODECS.values(), ids=CODECS)

some = st_np.arrays(
    np.float32,
    st.integers(1, 2500),
    elements=st.floats(-(2.0**127), 2.0**127, width=32),
    fill=st.sampled_from([0.0, -0.0, 1.0, 2.0**-149, -(2.0**-126), 2.0**127, 1e-3]),
)
"""Odd sizes, several blocks of them, zeros, denormals, huge values."""


def encoded(wire: Codec, values: torch.Tensor) -> tuple[torch.Tensor, bool]:
    out = torch.full((wire.body_bytes(values.numel()),), 255, dtype=torch.uint8)
    return out, wire.encode(values, out)


def decoded(wire: Codec, data: torch.Tensor) -> torch.Tensor:
    out = torch.full((data.numel() // wire.block_bytes * wire.block_values,), torch.nan)
    wire.decode(data, out)
    return out


def by_hand(name: str, data: torch.Tensor) -> np.ndarray:
    """Decode block by block in numpy."""
    values = []
    for block in data.numpy().reshape(-1, 512):
        scale = block[:SCALE_BYTES].view(np.float32)[0]
        packed = block[SCALE_BYTES:]
        if name == "int4":
            packed = np.concatenate([packed & 15, packed >> 4]).astype(np.int16)
            integers = np.where(packed > 7, packed - 16, packed)
        else:
            integers = packed.view(np.int8)
        values.append(integers.astype(np.float32) * scale)
    return np.concatenate(values)


@integers
@given(values=some)
def test_an_error_is_at_most_half_a_step_of_the_block(name: str, values: np.ndarray) -> None:
    wire = CODECS[name]
    data, whole = encoded(wire, torch.from_numpy(values))
    assert whole
    back = decoded(wire, data).numpy()
    padded = np.zeros(back.shape)
    padded[: len(values)] = values
    for block in range(0, len(back), wire.block_values):
        exact, sent = padded[block : block + wire.block_values], back[block : block + wire.block_values]
        step = max(np.abs(exact).max() / MOST[name], 2.0**-126)
        assert np.abs(exact - sent).max() <= step / 2 * (1 + 2.0**-16)


@integers
@given(values=some)
def test_it_decodes_to_the_same_bits_as_by_hand(name: str, values: np.ndarray) -> None:
    data, _ = encoded(CODECS[name], torch.from_numpy(values))
    assert decoded(CODECS[name], data).numpy().tobytes() == (by_hand(name, data) + np.float32(0)).tobytes()


@every
@given(values=some)
def test_the_same_values_give_the_same_bytes(wire: Codec, values: np.ndarray) -> None:
    first, _ = encoded(wire, torch.from_numpy(values))
    second, _ = encoded(wire, torch.from_numpy(values.copy()))
    assert torch.equal(first, second)
    assert (
        first.numel()
        == wire.body_bytes(len(values))
        == np.prod(wire.shape(len(values))) * (1 if wire.tag == "U8" else wire.block_bytes)
    )


@integers
@given(values=some)
def test_what_was_decoded_is_encoded_without_any_further_error(name: str, values: np.ndarray) -> None:
    """A mean of equal contributions does not drift."""
    wire = CODECS[name]
    once = decoded(wire, encoded(wire, torch.from_numpy(values))[0])
    twice = decoded(wire, encoded(wire, once)[0])
    assert torch.allclose(once, twice, rtol=2.0**-22, atol=0)


@integers
def test_a_block_does_not_feel_another(name: str) -> None:
    wire = CODECS[name]
    quiet = torch.linspace(-1e-6, 1e-6, wire.block_values)
    loud = torch.full((wire.block_values,), 1e30)
    data, _ = encoded(wire, torch.cat([loud, quiet, loud]))
    alone, _ = encoded(wire, quiet)
    assert torch.equal(data[wire.block_bytes : 2 * wire.block_bytes], alone)


@integers
def test_every_integer_and_its_sign_survive(name: str) -> None:
    wire, most = CODECS[name], MOST[name]
    values = torch.arange(-most, most + 1).float().repeat(1 + wire.block_values // (2 * most + 1))
    data, _ = encoded(wire, values)
    assert torch.equal(decoded(wire, data)[: values.numel()], values)


@every
@pytest.mark.parametrize("numel", [1, 7, 1017, 4096])
def test_zeros_stay_zeros(wire: Codec, numel: int) -> None:
    data, whole = encoded(wire, torch.zeros(numel))
    assert whole
    assert not decoded(wire, data).any()


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 500, 1016, 2999])
def test_one_value_that_is_not_finite_is_noticed(wire: Codec, bad: float, where: int) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    values[where] = bad
    assert not encoded(wire, values)[1]


@integers
def test_a_scale_that_decodes_to_infinity_is_noticed(name: str) -> None:
    """The largest fp32 value, divided and multiplied again, may round beyond it."""
    largest = torch.finfo(torch.float32).max
    for step in range(64):
        top = torch.tensor(largest).view(torch.int32).sub(step).view(torch.float32)
        data, whole = encoded(CODECS[name], top.reshape(1))
        assert whole == bool(torch.isfinite(decoded(CODECS[name], data)).all())


@integers
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 3e38])
def test_a_forged_scale_does_not_pass_as_finite(name: str, scale: float) -> None:
    data, _ = encoded(CODECS[name], torch.ones(3000))
    data[512 : 512 + SCALE_BYTES] = torch.tensor([scale]).view(torch.uint8)
    assert not finite(decoded(CODECS[name], data))


@given(values=st_np.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_finite_is_isfinite(values: np.ndarray) -> None:
    assert finite(torch.from_numpy(values)) == bool(np.isfinite(values).all())


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"codec 'int2' does not exist: use one of fp32, bf16, int8, int4"):
        codec("int2")


def test_settings_and_costs_know_every_codec() -> None:
    assert get_args(CodecName) == tuple(CODECS)
    numel = 508 * 1016
    assert {name: wire.body_bytes(numel) / numel for name, wire in CODECS.items()} == cost.BYTES_A_VALUE
