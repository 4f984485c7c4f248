"""Payloads: exact round trips, a frame that any safetensors reader opens, and refusal of any other frame."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from blake3 import blake3

from diloco.errors import CorruptObjectError
from diloco.exchange import codec
from diloco.exchange.codec import DATA_OFFSET, Encoded
from diloco.exchange.formats import CODECS, Codec, Plain

FP32, BF16 = CODECS["fp32"], CODECS["bf16"]
both = pytest.mark.parametrize("wire", [FP32, BF16], ids=["fp32", "bf16"])
every = pytest.mark.parametrize("wire", CODECS.values(), ids=CODECS)


def tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (), (7,), (2, 2, 2))]


def encode(values: list[torch.Tensor], wire: Codec, chunk_bytes: int = 512) -> Encoded:
    return codec.encode(values, wire, chunk_bytes=chunk_bytes, layout="layout", metadata={"rank": "1"})


def flat(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in values])


@both
def test_decoding_gives_the_encoded_values_exactly(wire: Plain) -> None:
    values = tensors()
    encoded = encode(values, wire)
    decoded = codec.Decoder(wire, 4096)(memoryview(encoded.data)[DATA_OFFSET:])
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, flat(values).to(wire.dtype).float())
    assert encoded.finite


def test_fp32_keeps_every_bit() -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4028234e38, 1 / 3])
    encoded = encode([values], FP32)
    assert bytes(encoded.data[DATA_OFFSET:]) == values.numpy().tobytes()


@both
def test_the_safetensors_library_opens_it(wire: Plain) -> None:
    values = tensors()
    loaded = safetensors.torch.load(bytes(encode(values, wire).data))
    assert list(loaded) == [codec.TENSOR]
    assert loaded[codec.TENSOR].dtype == wire.dtype
    assert torch.equal(loaded[codec.TENSOR], flat(values).to(wire.dtype))


@both
@pytest.mark.parametrize("chunk_bytes", [16, 32, 1 << 20])
def test_chunk_digests_cover_the_values_and_nothing_else(wire: Codec, chunk_bytes: int) -> None:
    encoded = encode(tensors(), wire, chunk_bytes)
    body = bytes(encoded.data[DATA_OFFSET:])
    assert len(body) == 31 * wire.block_bytes
    assert encoded.info.chunks == [
        blake3(body[at : at + chunk_bytes]).hexdigest() for at in range(0, len(body), chunk_bytes)
    ]
    assert (encoded.info.numel, encoded.info.size) == (31, len(encoded.data))


@every
def test_encoding_is_deterministic(wire: Codec) -> None:
    assert encode(tensors(), wire).data == encode(tensors(), wire).data
    assert encode(tensors(), wire).data != encode(tensors(1), wire).data


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
@every
def test_one_value_that_is_not_finite_is_noticed(wire: Codec, value: float, where: int) -> None:
    values = tensors()
    values[where].view(-1)[-1] = value
    assert not encode(values, wire).finite


def test_a_value_that_only_bf16_can_not_hold_is_noticed() -> None:
    values = [torch.tensor([1.0, 3.4028e38])]
    assert encode(values, FP32).finite
    assert not encode(values, BF16).finite


def test_tensors_that_are_views_or_need_gradients() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    encoded = encode([weight.t()], FP32)
    decoded = codec.Decoder(FP32, 24)(memoryview(encoded.data)[DATA_OFFSET:])
    assert decoded.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_an_empty_tensor_among_others() -> None:
    encoded = encode([torch.empty(0, 3), torch.ones(2)], FP32)
    codec.check_frame(bytes(encoded.data[:DATA_OFFSET]), encoded.info, "key")
    assert encoded.info.numel == 2


def test_a_decoder_reuses_its_buffer_and_refuses_parts_of_values() -> None:
    decoder = codec.Decoder(BF16, 8)
    first = decoder(b"\x80\x3f\x00\x40")
    assert first.tolist() == [1.0, 2.0]
    decoder(b"\x00\x00\x00\x00")
    assert first.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="3 bytes"):
        decoder(b"\x00\x00\x00")


@pytest.mark.parametrize("wire", [CODECS["int8"], CODECS["int4"]], ids=["int8", "int4"])
def test_chunks_that_would_cut_blocks_are_refused(wire: Codec) -> None:
    with pytest.raises(ValueError, match="chunks of 256 bytes do not hold whole blocks of 512"):
        encode(tensors(), wire, 256)


@every
def test_tensors_of_any_sizes_are_as_one(wire: Codec) -> None:
    """Where one ends has no part in the bytes, also where values are worked on in several steps."""
    values = torch.randn(3 * wire.step_values + 11, generator=torch.Generator().manual_seed(0))
    cuts = [5, wire.step_values - 5, wire.step_values, 1, 0, wire.step_values, 10]
    whole = encode([values], wire, 1 << 20)
    assert encode(list(torch.split(values, cuts)), wire, 1 << 20).data == whole.data
    codec.check_frame(bytes(whole.data[:DATA_OFFSET]), whole.info, "key")


@every
def test_a_value_that_is_not_finite_is_noticed_among_many(wire: Codec) -> None:
    values = torch.zeros(3 * wire.step_values)
    values[wire.step_values + 1] = torch.nan
    assert not encode([values], wire, 1 << 20).finite


@every
def test_a_chunk_alone_decodes_to_its_values(wire: Codec) -> None:
    values = torch.randn(3 * 4096, generator=torch.Generator().manual_seed(1))
    body = memoryview(encode([values], wire, 4096).data)[DATA_OFFSET:]
    decoder = codec.Decoder(wire, len(body))
    whole = decoder(body).clone()
    parts = [decoder(body[start : start + 4096]).clone() for start in range(0, len(body), 4096)]
    assert torch.equal(torch.cat(parts), whole)


@every
def test_memory_that_is_used_again_leaves_no_trace(wire: Codec) -> None:
    fresh = encode(tensors(1), wire)
    used = encode(tensors(0), wire).data
    again = codec.encode(tensors(1), wire, chunk_bytes=512, layout="layout", metadata={"rank": "1"}, into=used)
    assert again.data is used
    assert (again.data, again.info) == (fresh.data, fresh.info)
    other = codec.encode([torch.ones(5000)], wire, chunk_bytes=512, layout="layout", metadata={}, into=used)
    assert other.data is not used


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_residual_is_what_was_not_sent(name: str) -> None:
    wire = CODECS[name]
    values = torch.randn(2 * wire.step_values + 3, generator=torch.Generator().manual_seed(2))
    owed = torch.randn(values.shape, generator=torch.Generator().manual_seed(3)) / 10
    residual = owed.clone()
    encoded = codec.encode([values], wire, chunk_bytes=1 << 20, layout="l", metadata={}, residual=residual)
    assert encoded.data == codec.encode([values + owed], wire, chunk_bytes=1 << 20, layout="l", metadata={}).data
    sent = codec.Decoder(wire, len(encoded.data))(memoryview(encoded.data)[DATA_OFFSET:])[: values.numel()]
    assert torch.equal(residual, values + owed - sent)


def frame(header: object, length: int = DATA_OFFSET - 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (length.to_bytes(8, "little") + text.ljust(DATA_OFFSET - 8))[:DATA_OFFSET]


def tensor(dtype: str = "F32", shape: object = (31,)) -> dict[str, object]:
    return {codec.TENSOR: {"dtype": dtype, "shape": shape, "data_offsets": [0, 124]}}


def test_its_own_frame_is_accepted() -> None:
    encoded = encode(tensors(), FP32)
    codec.check_frame(bytes(encoded.data[:DATA_OFFSET]), encoded.info, "key")
    codec.check_frame(frame(tensor()), encoded.info, "key")


@pytest.mark.parametrize(
    "bad",
    [
        frame(tensor(dtype="BF16")),
        frame(tensor(shape=[30])),
        frame(tensor(shape=[31, 1])),
        frame(tensor(shape="31")),
        frame(tensor(), length=DATA_OFFSET),
        frame(tensor(), length=2**63),
        frame({"another": {}}),
        frame({codec.TENSOR: 5}),
        frame({codec.TENSOR: ["F32"]}),
        frame([codec.TENSOR]),
        frame(b"[" * (DATA_OFFSET - 8)),
        frame(b"\x80\x04 a pickle, say"),
        bytes(DATA_OFFSET),
        b"",
    ],
    ids=[
        "dtype",
        "fewer values",
        "another shape",
        "shape is text",
        "longer header",
        "endless header",
        "another tensor",
        "tensor is a number",
        "tensor is a list",
        "list",
        "deep nesting",
        "pickle",
        "zeros",
        "empty",
    ],
)
def test_another_frame_is_refused_by_key(bad: bytes) -> None:
    info = encode(tensors(), FP32).info
    with pytest.raises(CorruptObjectError, match=r"^rounds/p/1: "):
        codec.check_frame(bad, info, "rounds/p/1")


@pytest.mark.parametrize("change", [{"size": 10}, {"data_offset": 8}, {"numel": 30}])
def test_sizes_that_contradict_each_other_are_refused(change: dict[str, int]) -> None:
    encoded = encode(tensors(), FP32)
    with pytest.raises(CorruptObjectError, match="key"):
        codec.check_frame(bytes(encoded.data[:DATA_OFFSET]), encoded.info.model_copy(update=change), "key")
