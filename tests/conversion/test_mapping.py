# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The released tensor layout: names, shapes and dtypes that every class writes, and that `load_state_dict` reads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from deltalatent import KimiK3ForCausalLM, KimiK3TextModel, count_parameters, size_config
from deltalatent.conversion.layouts import stored_in_float32, text_inventory
from deltalatent.conversion.mapping import ExpertsConverter, NarrowDecay, PadDecay
from tests.testing_common import (
    GOLDEN,
    TEXT_FIXTURES,
    VARIANTS,
    assert_close,
    linear_attn_config,
    load_golden_model,
    random_ids,
    tiny_config,
    tiny_model,
)

FLOAT32_TENSORS = re.compile(r"\.(A_log|dt_bias|[qkv]_conv1d\.weight|o_norm\.weight|e_score_correction_bias)$")


def written(model: PreTrainedModel, folder: Path, **kwargs: Any) -> dict[str, Tensor]:
    model.save_pretrained(folder, **kwargs)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@dataclass
class Widths:
    """Every width of a model, spelled out; the defaults are those of the release."""

    vocabulary: int = 163840
    d: int = 7168
    kda_heads: int = 96
    kda_head: int = 128
    heads: int = 96
    nope: int = 128
    rope: int = 64
    value: int = 128
    query_rank: int = 1536
    kv_rank: int = 512
    dense: int = 33792
    experts: int = 896
    latent: int = 3584
    expert: int = 3072
    shared: int = 2 * 3072


def released_shapes(layers: list[tuple[str, str]], w: Widths) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model whose layers are pairs of token mixer and channel mixer, written out."""
    inner, keys = w.kda_heads * w.kda_head, w.nope + w.rope
    parts: dict[str, dict[str, tuple[int, ...]]] = {
        "every layer": {
            "self_attention_res_norm.weight": (w.d,),
            "self_attention_res_proj.weight": (1, w.d),
            "mlp_res_norm.weight": (w.d,),
            "mlp_res_proj.weight": (1, w.d),
            "input_layernorm.weight": (w.d,),
            "post_attention_layernorm.weight": (w.d,),
        },
        "KDA": {
            "self_attn.q_proj.weight": (inner, w.d),
            "self_attn.k_proj.weight": (inner, w.d),
            "self_attn.v_proj.weight": (inner, w.d),
            "self_attn.q_conv1d.weight": (inner, 1, 4),
            "self_attn.k_conv1d.weight": (inner, 1, 4),
            "self_attn.v_conv1d.weight": (inner, 1, 4),
            "self_attn.f_a_proj.weight": (w.kda_head, w.d),
            "self_attn.f_b_proj.weight": (inner, w.kda_head),
            "self_attn.A_log": (w.kda_heads,),
            "self_attn.dt_bias": (inner,),
            "self_attn.b_proj.weight": (w.kda_heads, w.d),
            "self_attn.g_proj.weight": (inner, w.d),
            "self_attn.o_norm.weight": (w.kda_head,),
            "self_attn.o_proj.weight": (w.d, inner),
        },
        "MLA": {
            "self_attn.q_a_proj.weight": (w.query_rank, w.d),
            "self_attn.q_a_layernorm.weight": (w.query_rank,),
            "self_attn.q_b_proj.weight": (w.heads * keys, w.query_rank),
            "self_attn.kv_a_proj_with_mqa.weight": (w.kv_rank + w.rope, w.d),
            "self_attn.kv_a_layernorm.weight": (w.kv_rank,),
            "self_attn.kv_b_proj.weight": (w.heads * (w.nope + w.value), w.kv_rank),
            "self_attn.g_proj.weight": (w.heads * w.value, w.d),
            "self_attn.o_proj.weight": (w.d, w.heads * w.value),
        },
        "dense": {
            "mlp.gate_proj.weight": (w.dense, w.d),
            "mlp.up_proj.weight": (w.dense, w.d),
            "mlp.down_proj.weight": (w.d, w.dense),
        },
        "sparse": {
            "block_sparse_moe.gate.weight": (w.experts, w.d),
            "block_sparse_moe.gate.e_score_correction_bias": (w.experts,),
            "block_sparse_moe.routed_expert_down_proj.weight": (w.latent, w.d),
            "block_sparse_moe.routed_expert_norm.weight": (w.latent,),
            "block_sparse_moe.routed_expert_up_proj.weight": (w.d, w.latent),
            "block_sparse_moe.shared_experts.gate_proj.weight": (w.shared, w.d),
            "block_sparse_moe.shared_experts.up_proj.weight": (w.shared, w.d),
            "block_sparse_moe.shared_experts.down_proj.weight": (w.d, w.shared),
        },
    }
    for expert in range(w.experts):
        parts["sparse"] |= {
            f"block_sparse_moe.experts.{expert}.w1.weight": (w.expert, w.latent),
            f"block_sparse_moe.experts.{expert}.w3.weight": (w.expert, w.latent),
            f"block_sparse_moe.experts.{expert}.w2.weight": (w.latent, w.expert),
        }
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (w.vocabulary, w.d),
        "model.output_attn_res_norm.weight": (w.d,),
        "model.output_attn_res_proj.weight": (1, w.d),
        "model.norm.weight": (w.d,),
        "lm_head.weight": (w.vocabulary, w.d),
    }
    for number, mixers in enumerate(layers):
        for part in ("every layer", *mixers):
            expected |= {f"model.layers.{number}.{name}": shape for name, shape in parts[part].items()}
    return expected


def test_names_and_shapes_are_the_released_ones(tmp_path: Path) -> None:
    """The whole list, so that no bias, rename or extra tensor slips in; taps stay [channels, 1, W]."""
    linear = linear_attn_config(kda_layers=[1], full_attn_layers=[2], num_heads=3, head_dim=8)
    fields = {"num_hidden_layers": 2, "num_experts": 2, "num_shared_experts": 2, "v_head_dim": 12}
    model = tiny_model(linear_attn_config=linear, **fields)
    widths = Widths(
        256, d=32, kda_heads=3, kda_head=8, heads=2, nope=16, rope=8, value=12, query_rank=20, kv_rank=24,
        dense=64, experts=2, latent=24, expert=16, shared=2 * 16,
    )  # fmt: skip
    assert shapes(written(model, tmp_path)) == released_shapes([("KDA", "dense"), ("MLA", "sparse")], widths)


def test_inventory_of_the_release() -> None:
    """All 249 756 tensors of the released size, from a model without memory: names, shapes, and which are float32."""
    mixers = ["MLA" if number % 4 == 0 or number == 93 else "KDA" for number in range(1, 94)]
    expected = released_shapes(list(zip(mixers, ["dense", *["sparse"] * 92], strict=True)), Widths())
    config = size_config("release")
    inventory = text_inventory(config)
    assert inventory == expected
    assert len(inventory) == 249_756
    biases = 92 * 896  # are no parameters
    assert sum(math.prod(shape) for shape in inventory.values()) - biases == count_parameters(config).total
    in_float32 = {name for name in inventory if stored_in_float32(name)}
    assert in_float32 == {name for name in inventory if FLOAT32_TENSORS.search(name)}
    assert len(in_float32) == 69 * 6 + 92  # per KDA layer A, bias, three taps, gated norm; per router the bias


@pytest.mark.parametrize("name", TEXT_FIXTURES)
def test_fixture_is_written_back_as_it_was(name: str, tmp_path: Path) -> None:
    """Same names, shapes, dtypes and bits; `A_log` at the length that the config asks for."""
    file = load_file(GOLDEN / name / "model.safetensors")
    length = file["model.layers.0.self_attn.A_log"].numel()
    model = load_golden_model(name, dtype="auto", kda_a_log_length=length)
    back = written(model, tmp_path)
    assert back.keys() == file.keys()
    for key, tensor in file.items():
        assert back[key].dtype == tensor.dtype, key
        assert torch.equal(back[key], tensor), key


@pytest.mark.parametrize("loaded", [False, True], ids=["from config", "from a checkpoint"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_writes_released_names_and_comes_back(variant: str, loaded: bool, tmp_path: Path) -> None:
    model = tiny_model(variant)
    if loaded:
        model.save_pretrained(tmp_path / "first")
        model = KimiK3ForCausalLM.from_pretrained(tmp_path / "first").eval()
    back = written(model, tmp_path / "second")
    for key in back:
        assert not re.search(r"gate_up_proj|\.experts\.down_proj|\.mlp\.(gate\.|experts|shared|routed)", key), key
        assert not re.search(r"block_sparse_moe\.(gate|up|down)_proj", key), f"{key}: dense layers are called mlp"
    again = KimiK3ForCausalLM.from_pretrained(tmp_path / "second").eval()
    for (name, expected), (_, actual) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(actual, expected), name


def test_base_model_writes_the_same_names_without_prefix_and_head(tmp_path: Path) -> None:
    """As base models of Transformers do; each class reads what the other wrote."""
    with_head = tiny_model()
    full = written(with_head, tmp_path / "head")
    base = written(with_head.model, tmp_path / "base")
    assert base.keys() == {key.removeprefix("model.") for key in full if key != "lm_head.weight"}

    ids = random_ids(with_head.config)
    expected = with_head.model(ids).last_hidden_state
    for folder in ("head", "base"):
        model, info = KimiK3TextModel.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        assert torch.equal(model.eval()(ids).last_hidden_state, expected)
    with pytest.raises(ValueError, match=r"got none for lm_head.weight: .* pass `allow_missing_keys=True`"):
        KimiK3ForCausalLM.from_pretrained(tmp_path / "base")
    model, info = KimiK3ForCausalLM.from_pretrained(
        tmp_path / "base", output_loading_info=True, allow_missing_keys=True
    )
    assert info["missing_keys"] == {"lm_head.weight"}
    assert torch.equal(model.eval().model(ids).last_hidden_state, expected)


def test_internal_format_loads_too(tmp_path: Path) -> None:
    model = tiny_model()
    fused = written(model, tmp_path, save_original_format=False)
    assert tuple(fused["model.layers.1.mlp.experts.gate_up_proj"].shape) == (8, 32, 24)
    again, info = KimiK3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_dtypes_on_disk(tmp_path: Path) -> None:
    for name, tensor in written(tiny_model().to(torch.bfloat16), tmp_path).items():
        expected = torch.float32 if FLOAT32_TENSORS.search(name) else torch.bfloat16
        assert tensor.dtype == expected, name


def test_experts_are_the_slices_of_the_fused_parameters(tmp_path: Path) -> None:
    model = tiny_model()
    back = written(model, tmp_path)
    experts = model.model.layers[2].mlp.experts
    for i in range(8):
        gate, up = experts.gate_up_proj[i].chunk(2)
        prefix = f"model.layers.2.block_sparse_moe.experts.{i}"
        assert torch.equal(back[f"{prefix}.w1.weight"], gate)
        assert torch.equal(back[f"{prefix}.w3.weight"], up)
        assert torch.equal(back[f"{prefix}.w2.weight"], experts.down_proj[i])


def test_more_than_ten_experts_keep_their_order(tmp_path: Path) -> None:
    """Names sort as text into 0, 1, 10, 11, 2, ...; experts must not."""
    model = tiny_model(num_experts=13)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            numbers = torch.arange(13.0)[:, None, None]
            layer.mlp.experts.gate_up_proj.copy_(numbers.expand_as(layer.mlp.experts.gate_up_proj))
            layer.mlp.experts.down_proj.copy_(numbers.expand_as(layer.mlp.experts.down_proj))
    model.save_pretrained(tmp_path)
    again = KimiK3ForCausalLM.from_pretrained(tmp_path)
    for parameter in (again.model.layers[1].mlp.experts.gate_up_proj, again.model.layers[4].mlp.experts.down_proj):
        assert parameter[:, 0, 0].tolist() == list(range(13))


# ---- A_log ----------------------------------------------------------------------------------------------------------


def convert(operation: Any, tensor: Tensor, **fields: Any) -> Tensor:
    config = tiny_config(**fields)
    result = operation.convert(
        {"self_attn.A_log": [tensor]}, ["a"], ["self_attn.A_log"], config=config, full_layer_name="x"
    )
    return result["self_attn.A_log"]


@pytest.mark.parametrize("stored", [(2,), (3,), (128,), (1, 1, 2, 1)], ids=str)
def test_decay_is_narrowed_to_the_heads(stored: tuple[int, ...]) -> None:
    tensor = torch.arange(1.0, 1 + torch.Size(stored).numel()).view(stored)
    assert convert(NarrowDecay(), tensor).tolist() == [1.0, 2.0]


def test_decay_that_is_too_short_raises() -> None:
    with pytest.raises(
        ValueError, match=r"`x` must have at least 2 entries \(one per head\), got 1: the file is truncated"
    ):
        convert(NarrowDecay(), torch.zeros(1))


@pytest.mark.parametrize(("length", "expected"), [(None, [5.0, 6.0]), (2, [5.0, 6.0]), (4, [5.0, 6.0, 0.0, 0.0])])
def test_decay_is_padded_to_the_configured_length(length: int | None, expected: list[float]) -> None:
    assert convert(PadDecay(), torch.tensor([5.0, 6.0]), kda_a_log_length=length).tolist() == expected


def test_decay_operations_are_each_others_reverse() -> None:
    assert isinstance(NarrowDecay().reverse_op, PadDecay)
    assert isinstance(PadDecay().reverse_op, NarrowDecay)


@pytest.mark.parametrize("length", [None, 2, 16, 128])
def test_configured_decay_length_survives_save_and_load(length: int | None, tmp_path: Path) -> None:
    model = tiny_model(kda_a_log_length=length)
    first = written(model, tmp_path / "first")
    assert first["model.layers.0.self_attn.A_log"].numel() == (length or 2)
    again = KimiK3ForCausalLM.from_pretrained(tmp_path / "first")
    assert again.config.kda_a_log_length == length
    second = written(again, tmp_path / "second")
    assert torch.equal(second["model.layers.0.self_attn.A_log"], first["model.layers.0.self_attn.A_log"])


# ---- load_state_dict with released names ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[KimiK3ForCausalLM, dict[str, Tensor]]:
    """A model, and its tensors under released names with padded `A_log`."""
    model = tiny_model(kda_a_log_length=16, seed=3)
    return model, written(model, tmp_path_factory.mktemp("released"))


def other_model() -> KimiK3ForCausalLM:
    return tiny_model(seed=4)


def assert_same_weights(model: Any, expected: Any) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_load_state_dict_takes_released_names(released: tuple[KimiK3ForCausalLM, dict[str, Tensor]]) -> None:
    expected, tensors = released
    model = other_model()
    given = dict(tensors)
    result = model.load_state_dict(given)
    assert not result.missing_keys and not result.unexpected_keys
    assert_same_weights(model, expected)
    assert given.keys() == tensors.keys()  # the caller's dictionary is untouched


def test_load_state_dict_takes_its_own_names() -> None:
    expected, model = tiny_model(seed=3), other_model()
    model.load_state_dict(expected.state_dict())
    assert_same_weights(model, expected)


def test_load_state_dict_shard_by_shard(tmp_path: Path) -> None:
    """As `Trainer` resumes: the experts of one layer are spread over files."""
    expected = tiny_model(seed=3)
    expected.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 10
    model = other_model()
    for file in files:
        result = model.load_state_dict(load_file(file), strict=False)
        assert not result.unexpected_keys
    assert_same_weights(model, expected)


def test_load_state_dict_of_the_base_model(released: tuple[KimiK3ForCausalLM, dict[str, Tensor]]) -> None:
    expected, tensors = released
    model = other_model().model
    model.load_state_dict(
        {key.removeprefix("model."): value for key, value in tensors.items() if "lm_head" not in key}
    )
    assert_same_weights(model, expected.model)


def drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def reshape(name: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


MOE = "model.layers.1.block_sparse_moe"
DAMAGE = {
    "tensor missing": (drop("model.layers.0.self_attn.q_proj.weight"), r"Missing key.*0.self_attn.q_proj.weight"),
    "expert missing": (drop(f"{MOE}.experts.3.w1.weight"), r"Missing key.*layers.1.mlp.experts.gate_up_proj"),
    "expert shape": (
        reshape(f"{MOE}.experts.3.w1.weight", 15, 24),
        r"3.w1.weight` must have shape \(16, 24\), got \(15, 24\)",
    ),
    "expert beyond": (
        reshape(f"{MOE}.experts.8.w2.weight", 24, 16),
        r"8.w2.weight` must belong to one of the 8 experts",
    ),
    "A_log too short": (reshape("model.layers.0.self_attn.A_log", 1), r"size mismatch for .*layers.0.self_attn.A_log"),
    "unknown tensor": (reshape("model.layers.9.extra", 1), r"Unexpected key.*model.layers.9.extra"),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda name: name.replace(" ", "_"))
def test_load_state_dict_names_the_damage(damage: str, released: tuple[KimiK3ForCausalLM, dict[str, Tensor]]) -> None:
    tensors = dict(released[1])
    change, pattern = DAMAGE[damage]
    change(tensors)
    with pytest.raises((RuntimeError, ValueError), match=f"(?s){pattern}"):
        other_model().load_state_dict(tensors)


def test_load_state_dict_takes_the_predecessors_shape_of_decay(
    released: tuple[KimiK3ForCausalLM, dict[str, Tensor]],
) -> None:
    """[1, 1, heads, 1], with as many entries as heads."""
    expected, tensors = released
    tensors = {k: v[:2].view(1, 1, 2, 1) if k.endswith("A_log") else v for k, v in tensors.items()}
    model = other_model()
    model.load_state_dict(tensors)
    assert_same_weights(model, expected)


# ---- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", [KimiK3ForCausalLM, KimiK3TextModel])
def test_both_classes_have_the_mapping_once(model_class: type[PreTrainedModel]) -> None:
    conversions = get_model_conversion_mapping(model_class(tiny_config()), add_legacy=False)
    assert sum(isinstance(conversion, ExpertsConverter) for conversion in conversions) == 2
    assert len(conversions) == 5


def test_sharded_and_whole_folders_hold_the_same(tmp_path: Path) -> None:
    model = tiny_model()
    whole, sharded = written(model, tmp_path / "a"), written(model, tmp_path / "b", max_shard_size="50KB")
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[key], sharded[key]) for key in whole)


def test_conversion_does_not_change_the_model(tmp_path: Path) -> None:
    """Saving reverses the fusion on copies or views; the live parameters stay."""
    model = tiny_model()
    ids = random_ids(model.config)
    before = model(ids).logits
    model.save_pretrained(tmp_path)
    assert_close(model(ids).logits, before, rel=0)


def test_files_say_that_they_hold_pytorch_tensors(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
