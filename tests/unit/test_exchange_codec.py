"""Payloads: exact round trips, a frame that any safetensors reader opens, and refusal of any other frame."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from blake3 import blake3

from diloco.errors import ConfigurationError, CorruptObjectError
from diloco.exchange import codec
from diloco.exchange.codec import CODECS, DATA_OFFSET, Codec, Encoded

FP32, BF16 = CODECS["fp32"], CODECS["bf16"]
both = pytest.mark.parametrize("wire", [FP32, BF16], ids=["fp32", "bf16"])


def tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (), (7,), (2, 2, 2))]


def encode(values: list[torch.Tensor], wire: Codec, chunk_bytes: int = 32) -> Encoded:
    return codec.encode(values, wire, chunk_bytes=chunk_bytes, layout="layout", metadata={"rank": "1"})


def flat(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in values])


@both
def test_decoding_gives_the_encoded_values_exactly(wire: Codec) -> None:
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
def test_the_safetensors_library_opens_it(wire: Codec) -> None:
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
    assert len(body) == 31 * wire.itemsize
    assert encoded.info.chunks == [
        blake3(body[at : at + chunk_bytes]).hexdigest() for at in range(0, len(body), chunk_bytes)
    ]
    assert (encoded.info.numel, encoded.info.size) == (31, len(encoded.data))


@both
def test_encoding_is_deterministic(wire: Codec) -> None:
    assert encode(tensors(), wire).data == encode(tensors(), wire).data
    assert encode(tensors(), wire).data != encode(tensors(1), wire).data


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
@both
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


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"codec 'int4' does not exist: use one of fp32, bf16"):
        codec.codec("int4")


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
