from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from diloco.errors import ConfigurationError
from diloco.training.config import TrainConfig
from diloco.training.models import build_model, byte_tokenizer, load_tokenizer, save_model, split_into_fragments

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PreTrainedModel


def gpt2(layers: int = 5) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=8, n_head=2, n_positions=64, vocab_size=256))


def untied_llama() -> PreTrainedModel:
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=False, **shape))  # type: ignore[arg-type]


def sizes(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_presets_have_the_promised_size_and_type() -> None:
    tiny = build_model(TrainConfig(), seed=0)
    assert 350_000 < sizes(tiny) < 450_000
    assert 20e6 < sizes(build_model(TrainConfig(model="small"), seed=0)) < 40e6
    assert tiny.training
    assert {parameter.dtype for parameter in tiny.parameters()} == {torch.float32}
    assert load_tokenizer(TrainConfig(), vocab_size=256) is None


def test_new_parameters_come_from_the_seed() -> None:
    first, again, other = (build_model(TrainConfig(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_saved_preset_loads_and_its_tokenizer_is_bytes(tmp_path: Path) -> None:
    model = build_model(TrainConfig(), seed=0)
    save_model(model, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(256)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(1, 700))) + " a  b\n\tĀ€😀 don't <s></s>"
    assert bytes(tokenizer(text)["input_ids"]) == text.encode()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert load_tokenizer(TrainConfig(model=str(tmp_path)), vocab_size=256) is None
    assert sizes(build_model(TrainConfig(model=str(tmp_path)), seed=9)) == sizes(model)


def test_folder_with_weights_keeps_them_in_float32(tmp_path: Path) -> None:
    model = gpt2().bfloat16()
    model.save_pretrained(tmp_path)
    loaded = build_model(TrainConfig(model=str(tmp_path), sequence_length=64), seed=3)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(
        loaded.state_dict()["transformer.wte.weight"], model.state_dict()["transformer.wte.weight"].float()
    )


def test_folder_with_only_a_config_is_a_new_float32_model(tmp_path: Path) -> None:
    GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=64, vocab_size=300, dtype="bfloat16").save_pretrained(
        tmp_path
    )
    config = TrainConfig(model=str(tmp_path), sequence_length=64)
    assert {parameter.dtype for parameter in build_model(config, seed=0).parameters()} == {torch.float32}
    assert load_tokenizer(config, vocab_size=300) is None
    with pytest.raises(ConfigurationError, match="too small for bytes"):
        load_tokenizer(config, vocab_size=255)


def test_unusable_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="is neither a preset"):
        build_model(TrainConfig(model=str(tmp_path)), seed=0)
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="sequence_length 65 > the 64 positions"):
        build_model(TrainConfig(model=str(tmp_path), sequence_length=65), seed=0)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="its tokenizer has 256 tokens, the model 200"):
        load_tokenizer(TrainConfig(model=str(tmp_path)), vocab_size=200)


@pytest.mark.parametrize("make", [gpt2, untied_llama])
@pytest.mark.parametrize("n", [2, 3])
def test_fragments_hold_every_parameter_once_under_its_full_name(make: type[PreTrainedModel], n: int) -> None:
    model = make()  # type: ignore[call-arg]
    fragments = split_into_fragments(model, n)
    held = [(name, id(parameter)) for fragment in fragments for name, parameter in fragment.named_parameters()]
    assert sorted(held) == sorted((name, id(parameter)) for name, parameter in model.named_parameters())
    assert all(list(fragment.parameters()) for fragment in fragments)


def test_fragments_are_contiguous_blocks_with_ends() -> None:
    fragments = split_into_fragments(gpt2(5), 2)
    names = [[name for name, _ in fragment.named_parameters()] for fragment in fragments]
    blocks = [sorted({int(name.split(".")[2]) for name in group if ".h." in name}) for group in names]
    assert blocks == [[0, 1, 2], [3, 4]]
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= set(names[0])
    assert "transformer.ln_f.weight" in names[1]
    assert not any("lm_head" in name for group in names for name in group)  # tied: it is wte
    assert "lm_head.weight" in dict(split_into_fragments(untied_llama(), 3)[2].named_parameters())


def test_one_fragment_is_the_model_and_too_many_are_refused() -> None:
    model = gpt2(3)
    assert split_into_fragments(model, 1) == [model]
    assert len(split_into_fragments(model, 3)) == 3
    with pytest.raises(ConfigurationError, match="4 fragments > the 3 layers of GPT2LMHeadModel; use 3"):
        split_into_fragments(model, 4)


def test_fragments_hold_persistent_buffers() -> None:
    model = gpt2(2)
    buffer = torch.ones(2)
    model.get_submodule("transformer.h.1").register_buffer("scale", buffer)
    first, second = split_into_fragments(model, 2)
    assert dict(second.named_buffers()) == {"transformer.h.1.scale": buffer}
    assert not dict(first.named_buffers())
