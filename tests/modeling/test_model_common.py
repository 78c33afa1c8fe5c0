# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What every Transformers model is expected to do, over all configuration variants.

Two ways to compute the same numbers are compared in float64, where they agree to 1e-13 of the largest logit, so that
no fault hides behind rounding; grouped products exist in float32 only.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from deltalatent import (
    SIZES,
    KimiK3ForCausalLM,
    KimiK3TextConfig,
    KimiK3TextModel,
    count_parameters,
    size_config,
)
from deltalatent.modeling.latent_attention import KimiK3LatentAttention
from deltalatent.modeling.latent_moe import KimiK3TopKRouter
from tests.equivalence import EXACT, ROUNDED, exact_model
from tests.testing_common import (
    SPARSE_VARIANTS,
    VARIANTS,
    assert_close,
    assert_gradients_close,
    follow_routing_,
    gradients,
    left_padded,
    linear_attn_config,
    max_error,
    random_ids,
    round_to_bf16_,
    tiny_config,
    tiny_model,
    typical_error,
)

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_sparse_variant = pytest.mark.parametrize("variant", SPARSE_VARIANTS)

# Names of tensors that are float32 whatever the model is cast to, as `endswith` understands them.
FLOAT32_NAMES = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def loss_and_gradients(model: nn.Module, ids: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(ids, labels=ids, **kwargs).loss
    return loss.detach(), gradients(model, loss)


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    actual_state, expected_state = actual.state_dict(), expected.state_dict()
    assert actual_state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert actual_state[name].dtype == tensor.dtype, name
        assert torch.equal(actual_state[name], tensor), name


# ---- saving and loading ---------------------------------------------------------------------------------------------


@every_variant
def test_save_and_load(variant: str, tmp_path: Path) -> None:
    model = tiny_model(variant)
    model.save_pretrained(tmp_path)
    loaded, info = KimiK3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(loaded, model)
    assert not loaded.training
    ids = random_ids(model.config)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def tensors_on_disk(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Data type and shape of every tensor in the safetensors files of a folder."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def released_layout_of_tiny(a_log_length: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What readers of the release expect of the `tiny` size: width 32, 2 heads of 16, latents 20 and 24."""
    kda = {
        **{f"{x}_proj.weight": ("BF16", (32, 32)) for x in "qkvgo"},
        **{f"{x}_conv1d.weight": ("F32", (32, 1, 4)) for x in "qkv"},
        "f_a_proj.weight": ("BF16", (16, 32)),
        "f_b_proj.weight": ("BF16", (32, 16)),
        "b_proj.weight": ("BF16", (2, 32)),
        "A_log": ("F32", (a_log_length,)),
        "dt_bias": ("F32", (32,)),
        "o_norm.weight": ("F32", (16,)),
    }
    mla = {
        "q_a_proj.weight": ("BF16", (20, 32)),
        "q_a_layernorm.weight": ("BF16", (20,)),
        "q_b_proj.weight": ("BF16", (48, 20)),
        "kv_a_proj_with_mqa.weight": ("BF16", (32, 32)),
        "kv_a_layernorm.weight": ("BF16", (24,)),
        "kv_b_proj.weight": ("BF16", (64, 24)),
        "g_proj.weight": ("BF16", (32, 32)),
        "o_proj.weight": ("BF16", (32, 32)),
    }
    dense = {
        "mlp.gate_proj.weight": ("BF16", (64, 32)),
        "mlp.up_proj.weight": ("BF16", (64, 32)),
        "mlp.down_proj.weight": ("BF16", (32, 64)),
    }
    sparse = {
        "gate.weight": ("BF16", (8, 32)),
        "gate.e_score_correction_bias": ("F32", (8,)),
        "shared_experts.gate_proj.weight": ("BF16", (16, 32)),
        "shared_experts.up_proj.weight": ("BF16", (16, 32)),
        "shared_experts.down_proj.weight": ("BF16", (32, 16)),
        "routed_expert_down_proj.weight": ("BF16", (24, 32)),
        "routed_expert_norm.weight": ("BF16", (24,)),
        "routed_expert_up_proj.weight": ("BF16", (32, 24)),
    }
    for expert in range(8):
        sparse |= {f"experts.{expert}.{name}.weight": ("BF16", (16, 24)) for name in ("w1", "w3")}
        sparse |= {f"experts.{expert}.w2.weight": ("BF16", (24, 16))}

    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (256, 32)),
        "model.output_attn_res_norm.weight": ("BF16", (32,)),
        "model.output_attn_res_proj.weight": ("BF16", (1, 32)),
        "model.norm.weight": ("BF16", (32,)),
        "lm_head.weight": ("BF16", (256, 32)),
    }
    for layer in range(5):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            layout[f"{prefix}{name}.weight"] = ("BF16", (32,))
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            layout[f"{prefix}{name}.weight"] = ("BF16", (1, 32))
        layout |= {f"{prefix}self_attn.{name}": value for name, value in (kda if layer < 3 else mla).items()}
        if layer == 0:
            layout |= {prefix + name: value for name, value in dense.items()}
        else:
            layout |= {f"{prefix}block_sparse_moe.{name}": value for name, value in sparse.items()}
    return layout


@pytest.mark.parametrize("a_log_length", [None, 128], ids=["A_log_per_head", "A_log_padded"])
def test_files_have_the_released_layout(a_log_length: int | None, tmp_path: Path) -> None:
    model = tiny_model(kda_a_log_length=a_log_length).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert tensors_on_disk(tmp_path) == released_layout_of_tiny(a_log_length or 2)
    assert_same_state(KimiK3ForCausalLM.from_pretrained(tmp_path), model)


@every_variant
def test_released_names_of_the_variants(variant: str, tmp_path: Path) -> None:
    """Which tensors a mechanism adds, by name; the full list of the default is above."""
    tiny_model(variant).save_pretrained(tmp_path)
    names = tensors_on_disk(tmp_path).keys()
    config = tiny_config(variant)

    def has(part: str) -> bool:
        return any(part in name for name in names)

    assert has("block_sparse_moe.experts.0.w1") == bool(config.num_experts)
    assert has("shared_experts") == bool(config.num_experts and config.num_shared_experts)
    assert has("routed_expert_down_proj") == bool(config.num_experts and config.routed_expert_hidden_size)
    assert has("routed_expert_norm") == bool(
        config.num_experts and config.routed_expert_hidden_size and config.latent_moe_use_norm
    )
    assert has("attn_res") == has("mlp_res") == has("attention_res") == (config.attn_res_block_size is not None)
    assert has("layers.0.self_attn.g_proj") == config.use_full_rank_gate
    assert has("self_attn.g_a_proj") == has("self_attn.g_b_proj") == (not config.use_full_rank_gate)
    mla = config.layer_types.index("full_attention")
    assert has(f"layers.{mla}.self_attn.g_proj") == config.mla_use_output_gate
    assert has("q_a_proj") == has("q_a_layernorm") == has("q_b_proj") == (config.q_lora_rank is not None)
    assert has("lm_head") == (not config.tie_word_embeddings)
    assert not has("gate_up_proj"), "a fused tensor is on disk"


def test_names_in_memory_on_request(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, save_original_format=False)
    assert tensors_on_disk(tmp_path).keys() == model.state_dict().keys()
    assert_same_state(KimiK3ForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("variant", ["default", "predecessor", "no_latent_moe"])
def test_load_state_dict_with_released_names(variant: str, tmp_path: Path) -> None:
    """`Trainer` and `load_file` users hand over what is on disk: whole and strictly, or one shard after the other."""
    model = tiny_model(variant)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 2

    strict = tiny_model(variant, seed=1)
    strict.load_state_dict(load_file(tmp_path / "whole" / "model.safetensors"))
    assert_same_state(strict, model)

    sharded = tiny_model(variant, seed=1)
    for shard in reversed(shards):
        sharded.load_state_dict(load_file(shard), strict=False)
    assert_same_state(sharded, model)
    assert_same_state(KimiK3ForCausalLM.from_pretrained(tmp_path / "shards"), model)


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("model.layers.2.block_sparse_moe.experts.5.w3.weight", "model.layers.2.mlp.experts.gate_up_proj"),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", "gate.e_score_correction_bias"),
        ("model.layers.0.self_attn.A_log", "model.layers.0.self_attn.A_log"),
    ],
    ids=["one_matrix_of_one_expert", "selection_bias", "A_log"],
)
def test_a_strict_load_names_what_is_missing(left_out: str, named: str, tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state[left_out]
    with pytest.raises(RuntimeError, match=named):
        model.load_state_dict(state)


# ---- initialisation -------------------------------------------------------------------------------------------------


@every_variant
def test_initial_values(variant: str) -> None:
    model = KimiK3ForCausalLM(tiny_config(variant))
    config = model.config
    for name, tensor in model.state_dict().items():
        if name.endswith("A_log"):
            if config.gate_lower_bound is not None:
                assert not tensor.any(), name
            else:
                assert tensor.min() >= 0 and tensor.max() <= math.log(16), name
        elif name.endswith("dt_bias"):
            # The decay of a token whose gate logit is zero; with the softplus gate for A = 0.
            bound = config.gate_lower_bound
            decay = nn.functional.softplus(tensor) if bound is None else -bound * torch.sigmoid(tensor)
            assert decay.min() >= 0.999e-3 and decay.max() <= 1.001e-1, name
            assert decay.log().std() > 0.5, f"{name} is not spread over the range"
        elif name.endswith(("res_proj.weight", "e_score_correction_bias")):
            assert not tensor.any(), name
        elif name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif "conv1d" in name:
            assert tensor.abs().max() <= 0.5, name
            # Uniform over [-1/2, 1/2]: standard deviation 1/sqrt(12); five standard errors of the estimate.
            assert abs(tensor.std().item() * 12**0.5 - 1) < 5 * (0.4 / tensor.numel()) ** 0.5, name
        else:
            drawn = tensor
            if name.endswith("embed_tokens.weight"):
                assert not tensor[config.pad_token_id].any()
                drawn = torch.cat([tensor[: config.pad_token_id], tensor[config.pad_token_id + 1 :]])
            n = drawn.numel()
            std = config.initializer_range
            assert abs(drawn.mean().item()) < 5 * std / n**0.5, name
            assert abs(drawn.std().item() / std - 1) < 5 / (2 * n) ** 0.5, name


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_have_a_scale_of_their_own(tied: bool) -> None:
    config = tiny_config(embedding_initializer_range=1.0, tie_word_embeddings=tied)
    weight = KimiK3ForCausalLM(config).get_input_embeddings().weight.detach()
    assert not weight[config.pad_token_id].any()
    drawn = torch.cat([weight[: config.pad_token_id], weight[config.pad_token_id + 1 :]])
    expected = config.initializer_range if tied else 1.0
    assert abs(drawn.std().item() / expected - 1) < 5 / (2 * drawn.numel()) ** 0.5


def built_directly(variant: str, folder: Path) -> nn.Module:
    return KimiK3ForCausalLM(tiny_config(variant))


def built_on_meta(variant: str, folder: Path) -> nn.Module:
    with torch.device("meta"):
        model = KimiK3ForCausalLM(tiny_config(variant))
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    assert model.model.norm.weight.isnan().all(), "memory is not filled, the test would prove nothing"
    model.init_weights()
    return model


def loaded_without_small_tensors(variant: str, folder: Path) -> nn.Module:
    """From a checkpoint that lacks the tensors whose initial value is prescribed."""
    model = KimiK3ForCausalLM(tiny_config(variant))
    left_out = ("A_log", "dt_bias", "res_proj.weight", "e_score_correction_bias", "norm.weight", "conv1d.weight")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(left_out)}
    model.save_pretrained(folder, state_dict=state)
    assert not any(name.endswith(left_out) for name in tensors_on_disk(folder))
    return KimiK3ForCausalLM.from_pretrained(folder, allow_missing_keys=True)


@pytest.mark.parametrize("build", [built_directly, built_on_meta, loaded_without_small_tensors])
@pytest.mark.parametrize("variant", ["default", "predecessor"])
def test_nothing_is_left_uninitialised(build: Callable[..., nn.Module], variant: str, tmp_path: Path) -> None:
    """Uninitialised memory is NaN in these tests (S38); pseudo-queries are exactly zero on every way (S43)."""
    model = build(variant, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        if name.endswith(("res_proj.weight", "e_score_correction_bias")):
            assert not tensor.any(), name
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
    decays = [tensor for name, tensor in model.state_dict().items() if name.endswith("dt_bias")]
    assert decays and all(tensor.std() > 0.1 for tensor in decays)
    assert torch.isfinite(model(random_ids(model.config)).logits).all()


def test_the_same_seed_gives_the_same_model() -> None:
    torch.manual_seed(3)
    first = KimiK3ForCausalLM(tiny_config())
    torch.manual_seed(3)
    assert_same_state(KimiK3ForCausalLM(tiny_config()), first)


# ---- parameter counts -----------------------------------------------------------------------------------------------


@every_variant
def test_counted_parameters_are_those_of_the_model(variant: str) -> None:
    config = tiny_config(variant)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_counted_parameters_of_the_sizes(size: str) -> None:
    config = size_config(size)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())


# ---- attention and experts backends ---------------------------------------------------------------------------------


@every_variant
def test_eager_attention_equals_sdpa(variant: str) -> None:
    model = exact_model(variant)
    ids = random_ids(model.config)
    assert model.config._attn_implementation == "sdpa"
    loss, grads = loss_and_gradients(model, ids)
    model.set_attn_implementation("eager")
    other_loss, other_grads = loss_and_gradients(model, ids)
    assert_close(other_loss, loss, EXACT)
    assert_gradients_close(other_grads, grads, EXACT)


@every_sparse_variant
def test_experts_backends_agree(variant: str) -> None:
    model = tiny_model(variant)
    ids = random_ids(model.config)
    assert model.config._experts_implementation == ("auto" if torch.cuda.is_available() else "grouped_mm")
    model.set_experts_implementation("grouped_mm")
    grouped_loss, grouped = loss_and_gradients(model, ids)
    model.set_experts_implementation("eager")
    eager_loss, eager = loss_and_gradients(model, ids)
    assert_close(grouped_loss, eager_loss, ROUNDED)
    assert_gradients_close(grouped, eager, 1e-3)

    exact = exact_model(variant)
    assert exact.config._experts_implementation == "batched_mm"
    batched_loss, batched = loss_and_gradients(exact, ids)
    exact.set_experts_implementation("eager")
    eager_loss, eager = loss_and_gradients(exact, ids)
    assert_close(batched_loss, eager_loss, EXACT)
    assert_gradients_close(batched, eager, EXACT)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_experts_backend_asked_for_is_the_one_that_runs(
    implementation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = KimiK3ForCausalLM.from_pretrained(tmp_path, experts_implementation=implementation)
    experts = model.model.layers[1].mlp.experts
    calls: list[Any] = []
    if implementation == "eager":
        linear = nn.functional.linear
        of_experts = {experts.gate_up_proj[i].data_ptr() for i in range(8)}

        def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            calls.extend([weight] if weight.data_ptr() in of_experts else [])
            return linear(x, weight, bias)

        monkeypatch.setattr(nn.functional, "linear", spy)
    else:
        function = ALL_EXPERTS_FUNCTIONS[implementation]

        def spy(*args: Any) -> Tensor:
            calls.append(args)
            return function(*args)

        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, implementation, spy)
    model(random_ids(model.config))
    assert calls


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["default", "uneven_heads", "full_rank_query"])
def test_absorbed_equals_expanded(variant: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of latent attention, forced: whole and padded rows, a chunk on a cache, one token; gradients."""
    model = exact_model(variant, attn_implementation=attention)
    config = model.config
    padded, mask = left_padded([row[: 11 + 4 * i] for i, row in enumerate(random_ids(config, 3, 19))])
    ids = random_ids(config)

    def run(absorb: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        monkeypatch.setattr(KimiK3LatentAttention, "_absorbing_is_cheaper", lambda *args: absorb)
        with torch.no_grad():
            outputs = [model(padded, attention_mask=mask).logits[mask.bool()]]
            cache = model(ids[:, :9]).cache
            outputs.append(model(ids[:, 9:14], cache=cache).logits)
            outputs.append(model(ids[:, 14:15], cache=cache).logits)
        loss, grads = loss_and_gradients(model, ids)
        return [*outputs, loss], grads

    (absorbed, absorbed_grads), (expanded, expanded_grads) = run(True), run(False)
    for i, (actual, expected) in enumerate(zip(absorbed, expanded, strict=True)):
        assert_close(actual, expected, EXACT, f"result {i}")
    assert_gradients_close(absorbed_grads, expanded_grads, EXACT)


# ---- one sequence, presented in different ways ----------------------------------------------------------------------


@every_variant
def test_padding_does_not_matter(variant: str) -> None:
    """A short row alone, padded on the left and on the right of a longer one."""
    model = exact_model(variant)
    short, long = random_ids(model.config, 1, 9)[0], random_ids(model.config, 1, 16, seed=1)[0]
    with torch.no_grad():
        expected = model(short[None]).logits[0]
        ids, mask = left_padded([long, short])
        assert_close(model(ids, attention_mask=mask).logits[1, 7:], expected, EXACT, "left padding")
        ids, mask = ids.clone(), mask.clone()
        ids[1], mask[1] = ids[1].roll(9), mask[1].roll(9)
        assert_close(model(ids, attention_mask=mask).logits[1, :9], expected, EXACT, "right padding")


@every_variant
def test_packed_documents_are_as_if_each_were_alone(variant: str) -> None:
    model = exact_model(variant)
    lengths = [5, 1, 9, 4]
    ids = random_ids(model.config, 1, sum(lengths))
    with torch.no_grad():
        separate = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        assert_close(model(ids, position_ids=positions).logits, separate, EXACT, "position_ids")
        assert_close(model(ids, cu_seq_lens_q=offsets).logits, separate, EXACT, "cu_seq_lens_q")
        assert max_error(model(ids).logits, separate) > 1e-3, "documents that do not see each other anyway"


def test_gradients_of_packed_documents_are_the_sum_of_the_separate_ones() -> None:
    model = exact_model()
    lengths = [5, 1, 9]
    ids = random_ids(model.config, 1, sum(lengths))
    labels = ids.clone()
    labels[0, [0, 5, 6]] = -100  # the first token of a document has no predecessor
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = gradients(model, model(ids, labels=labels, position_ids=positions, num_items_in_batch=12).loss)
    separate: dict[str, Tensor] = {}
    for part in ids.split(lengths, dim=1):
        if part.shape[1] > 1:
            grads = gradients(model, model(part, labels=part, num_items_in_batch=12).loss)
            separate = {name: separate.get(name, 0) + grad for name, grad in grads.items()}
    assert_gradients_close(packed, separate, EXACT)


@every_variant
def test_cached_equals_uncached(variant: str) -> None:
    """A prompt, a chunk on top, then token by token."""
    model = exact_model(variant)
    ids = random_ids(model.config, 2, 18)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache, parts = None, []
        for start, end in [(0, 6), (6, 13), *((i, i + 1) for i in range(13, 18))]:
            output = model(ids[:, start:end], cache=cache, use_cache=True)
            cache = output.cache
            parts.append(output.logits)
            assert cache.get_seq_length() == end
    assert_close(torch.cat(parts, dim=1), expected, EXACT)


@every_variant
def test_generate_equals_recomputation(variant: str) -> None:
    model = exact_model(variant)
    model.generation_config = GenerationConfig(pad_token_id=0)
    prompt = random_ids(model.config, 2, 7)
    cached = model.generate(prompt, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(prompt))
    ids = prompt
    with torch.no_grad():
        for _ in range(5):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(cached, ids)


# ---- activation checkpointing ---------------------------------------------------------------------------------------


class RoutingRecorder:
    """Chosen experts of every call of every router, by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.chosen: dict[str, list[Tensor]] = {}
        self.routers = {name: m for name, m in model.named_modules() if isinstance(m, KimiK3TopKRouter)}
        for name, router in self.routers.items():
            router.register_forward_hook(
                lambda module, args, output, name=name: self.chosen.setdefault(name, []).append(output.top_k_index)
            )


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@every_variant
def test_activation_checkpointing_changes_nothing(variant: str, use_reentrant: bool) -> None:
    """Gradients of every parameter; the same experts in both passes (S35); tokens counted once (S34).

    In float64: the order in which gradients of a stream that many layers read are added up does differ.
    """
    results = []
    for checkpointing in (False, True):
        model = exact_model(variant).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        recorder = RoutingRecorder(model)
        for seed in (0, 1):  # two micro-batches of one step
            ids = random_ids(model.config, seed=seed)
            model(ids, labels=ids).loss.backward()
        for name, calls in recorder.chosen.items():
            assert len(calls) == (4 if checkpointing else 2), name
            if checkpointing:
                assert torch.equal(calls[0], calls[1]) and torch.equal(calls[2], calls[3]), name
        results.append(
            (
                {name: parameter.grad for name, parameter in model.named_parameters()},
                {name: router.balance.counts for name, router in recorder.routers.items()},
                {name: router.balance.loads for name, router in recorder.routers.items()},
                [int(router.balance.tokens) for router in recorder.routers.values()],
            )
        )
    plain, checkpointed = results
    assert all(grad is not None for grad in plain[0].values()), "`DistributedDataParallel` would wait for it"
    assert_gradients_close(checkpointed[0], plain[0], EXACT)
    for kind in (1, 2):
        for name, counts in plain[kind].items():
            assert torch.equal(checkpointed[kind][name], counts), name
    tokens = 0 if variant == "all_experts" else 2 * 2 * 19  # there is nothing to balance if every expert is chosen
    assert plain[3] == checkpointed[3] == [tokens] * len(plain[3])


def test_activation_checkpointing_with_frozen_embeddings() -> None:
    """Adapters train on frozen embeddings: re-entrant checkpointing then needs inputs that require gradients."""
    expected = None
    for use_reentrant in (None, False, True):
        model = exact_model().train()
        model.model.embed_tokens.weight.requires_grad_(False)
        if use_reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        ids = random_ids(model.config)
        model(ids, labels=ids).loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        expected = expected or grads
        assert_gradients_close(grads, expected, EXACT)


# ---- outputs --------------------------------------------------------------------------------------------------------


@every_variant
def test_optional_outputs(variant: str) -> None:
    model = tiny_model(variant, attn_implementation="eager")
    config = model.config
    ids = random_ids(config, 2, 11)
    sums: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: sums.append(output[0]))
    recorder = RoutingRecorder(model)
    with torch.no_grad():
        plain = model(ids)
        sums.clear()
        recorder.chosen.clear()
        output = model(ids, output_hidden_states=True, output_router_logits=True, output_attentions=True)
    assert plain.hidden_states is None and plain.attentions is None and plain.router_logits is None
    assert torch.equal(plain.logits, output.logits)

    # Embeddings, the running sum after every layer but the last, and what the head reads.
    assert len(output.hidden_states) == config.num_hidden_layers + 1
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    for i, running_sum in enumerate(sums[:-1]):
        assert torch.equal(output.hidden_states[i + 1], running_sum)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)

    # Of the latent-attention layers, in order: weights that sum to one over the past.
    assert len(output.attentions) == config.layer_types.count("full_attention")
    for weights in output.attentions:
        assert weights.shape == (2, config.num_attention_heads, 11, 11)
        assert_close(weights.sum(-1), torch.ones(2, config.num_attention_heads, 11))
        assert not weights.triu(1).any()

    # Of the sparse layers, in order: what the router chooses from.
    logits = output.router_logits or ()
    assert len(logits) == config.mlp_layer_types.count("sparse")
    for router_logits, (name, chosen) in zip(logits, recorder.chosen.items(), strict=True):
        assert router_logits.shape == (22, config.num_experts) and router_logits.dtype == torch.float32
        if config.num_expert_group == 1:
            bias = model.get_submodule(name).e_score_correction_bias
            best = (router_logits.sigmoid() + bias).topk(config.num_experts_per_token).indices
            assert torch.equal(best.sort().values, chosen[0].sort().values)


def test_optional_outputs_from_the_config_and_as_a_tuple() -> None:
    model = tiny_model(output_router_logits=True)
    ids = random_ids(model.config)
    output = model(ids)
    assert len(output.router_logits) == 4
    expected = output.logits
    as_tuple = model(ids, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], expected)
    model.config.return_dict = False
    as_tuple = model(ids)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], expected)
    assert torch.equal(model(ids, return_dict=True).logits, expected)


def test_hidden_states_under_activation_checkpointing() -> None:
    model = tiny_model().train()
    ids = random_ids(model.config)
    expected = model(ids, output_hidden_states=True, output_router_logits=True)
    model.activation_checkpointing_enable()
    actual = model(ids, output_hidden_states=True, output_router_logits=True)
    for kind in ("hidden_states", "router_logits"):
        assert len(actual[kind]) == len(expected[kind])
        for a, e in zip(actual[kind], expected[kind], strict=True):
            assert torch.equal(a, e)


@every_variant
def test_embeddings_instead_of_ids(variant: str) -> None:
    model = tiny_model(variant)
    ids = random_ids(model.config)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeddings).logits, model(ids).logits)


def test_logits_to_keep() -> None:
    model = tiny_model()
    ids = random_ids(model.config, 2, 11)
    with torch.no_grad():
        expected = model(ids).logits
        for kept, part in ((0, expected), (1, expected[:, -1:]), (4, expected[:, -4:])):
            actual = model(ids, logits_to_keep=kept).logits
            assert_close(actual, part, what=f"logits_to_keep={kept}")
        positions = torch.tensor([2, 0, 10])
        assert_close(model(ids, logits_to_keep=positions).logits, expected[:, positions])


def test_loss_is_the_mean_over_targets_or_their_sum_over_a_given_number() -> None:
    model = tiny_model()
    ids = random_ids(model.config, 2, 11)
    labels = ids.clone()
    labels[0, :5] = -100
    with torch.no_grad():
        output = model(ids, labels=labels)
        log_probs = output.logits[:, :-1].double().log_softmax(-1)
    targets = labels[:, 1:]
    terms = -log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != -100]
    assert terms.numel() == 10 + 6
    assert_close(output.loss, terms.mean().float(), 1e-6)
    for number in (64, torch.tensor(64)):
        loss = model(ids, labels=labels, num_items_in_batch=number).loss
        assert_close(loss, (terms.sum() / 64).float(), 1e-6, f"num_items_in_batch={number!r}")


def test_no_cache_is_made_in_a_training_step() -> None:
    model = tiny_model()
    ids = random_ids(model.config)
    assert model(ids).cache is not None
    assert model(ids, use_cache=False).cache is None
    assert model.train()(ids).cache is None
    assert model.model(ids).cache is None


# ---- precision of small tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["default", "softplus_gate", "low_rank_gate"])
@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("cpu", torch.float16),
        lambda model: model.bfloat16(),
        lambda model: model.half(),
        lambda model: model.half().float().to(dtype=torch.bfloat16),
    ],
    ids=["to_bf16", "to_device_and_fp16", "bfloat16", "half", "there_and_back"],
)
def test_small_tensors_survive_a_cast(variant: str, cast: Callable[[nn.Module], nn.Module]) -> None:
    """S32. Everything else is cast."""
    model = tiny_model(variant)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cast(model)
    for name, tensor in model.state_dict().items():
        if name.endswith(FLOAT32_NAMES):
            assert tensor.dtype == torch.float32, name
            assert torch.equal(tensor, before[name]), name
        else:
            assert tensor.dtype in (torch.bfloat16, torch.float16), name
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.fill_(7.0).add_(1e-4)
    assert (bias > 7.0).all(), "a small update vanishes"


def test_small_tensors_survive_loading_in_half_precision(tmp_path: Path) -> None:
    """S30, S31, S39: load in bf16, save, load again: float32 on disk and in memory, to the bit."""
    model = tiny_model()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.copy_(6.8 + 1e-3 * torch.arange(8))  # one value in bf16
    model.save_pretrained(tmp_path / "float32")
    half = KimiK3ForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    again = KimiK3ForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    on_disk = tensors_on_disk(tmp_path / "half")
    for name, tensor in model.state_dict().items():
        small = name.endswith(FLOAT32_NAMES)
        for loaded in (half, again):
            actual = loaded.state_dict()[name]
            assert actual.dtype == (torch.float32 if small else torch.bfloat16), name
            assert torch.equal(actual, tensor.to(actual.dtype)), name
    for name, (dtype, _) in on_disk.items():
        assert dtype == ("F32" if name.endswith(FLOAT32_NAMES) else "BF16"), name


@every_variant
def test_half_precision_and_autocast_run(variant: str) -> None:
    """Forward and backward stay finite; under autocast parameters and gradients stay float32."""
    ids = random_ids(tiny_config(variant))
    model = tiny_model(variant)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    for name, grad in gradients(model, loss).items():
        assert grad.dtype == torch.float32 and torch.isfinite(grad).all(), name

    half = tiny_model(variant).to(torch.bfloat16)
    output = half(ids, labels=ids)
    assert output.logits.dtype == torch.bfloat16
    for name, grad in gradients(half, output.loss).items():
        assert torch.isfinite(grad).all(), name
        assert grad.dtype == (torch.float32 if name.endswith(FLOAT32_NAMES) else torch.bfloat16), name

    exact = tiny_model(variant).to(torch.bfloat16).float()
    rounded = round_to_bf16_(copy.deepcopy(exact))
    follow_routing_(exact, half, rounded)
    with torch.no_grad():
        expected = exact(ids).logits
        assert typical_error(half(ids).logits, expected) < 2 * typical_error(rounded(ids).logits, expected)


@every_variant
def test_half_precision_generates(variant: str) -> None:
    half = tiny_model(variant).to(torch.bfloat16)
    ids = random_ids(half.config)
    half.generation_config = GenerationConfig(pad_token_id=0)
    tokens = half.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids))
    assert tokens.shape == (ids.shape[0], ids.shape[1] + 3)


# ---- Python objects -------------------------------------------------------------------------------------------------


@every_variant
def test_config_can_be_pickled(variant: str) -> None:
    config = tiny_config(variant, kda_implementation="torch", attn_implementation="eager")
    loaded = pickle.loads(pickle.dumps(config))
    assert isinstance(loaded, KimiK3TextConfig)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.layer_types == config.layer_types
    assert loaded.kda_implementation == "torch"
    assert loaded._attn_implementation == "eager"


def test_a_deep_copy_is_independent() -> None:
    model = tiny_model().train()
    ids = random_ids(model.config)
    model(ids, labels=ids).loss.backward()
    twin = copy.deepcopy(model)
    assert_same_state(twin, model)
    counts = model.model.layers[1].mlp.gate.balance.counts.clone()
    expected = model.eval()(ids).logits

    twin(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(model.model.layers[1].mlp.gate.balance.counts, counts)
    assert torch.equal(twin.model.layers[1].mlp.gate.balance.counts, 2 * counts)
    assert torch.equal(model(ids).logits, expected)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    model = tiny_model("tied_embeddings")
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in tensors_on_disk(tmp_path)
    for tied in (model, KimiK3ForCausalLM.from_pretrained(tmp_path), tiny_model("tied_embeddings").bfloat16()):
        assert tied.lm_head.weight is tied.model.embed_tokens.weight


@pytest.mark.parametrize("variant", ["default", "tied_embeddings"])
def test_vocabulary_can_be_resized(variant: str) -> None:
    model = tiny_model(variant)
    ids = random_ids(model.config)
    expected = model(ids).logits
    model.resize_token_embeddings(300)
    assert model.config.vocab_size == 300
    output = model(torch.full_like(ids, 299), labels=torch.full_like(ids, 299))
    assert output.logits.shape[-1] == 300 and torch.isfinite(output.loss)
    assert torch.equal(model(ids).logits[..., :256], expected)


def test_a_resized_head_still_gives_the_loss_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers makes another head, of which a training step had the logits of all tokens in memory."""
    model = tiny_model().train()
    model.resize_token_embeddings(300)
    assert model.lm_head.out_features == 300
    ids = random_ids(model.config)
    expected = model(ids, labels=ids, skip_logits=False).loss
    monkeypatch.setattr(torch.nn.Linear, "forward", without_logits(torch.nn.Linear.forward))
    assert_close(model(ids, labels=ids).loss, expected)


def without_logits(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(module: nn.Linear, x: Tensor) -> Tensor:
        assert module.out_features != 300, "logits of all tokens"
        return forward(module, x)

    return checked


def test_base_model_has_no_head() -> None:
    base = tiny_model(model_class=KimiK3TextModel)
    ids = random_ids(base.config)
    output = base(ids)
    assert output.last_hidden_state.shape == (*ids.shape, 32)
    assert base.get_output_embeddings() is None


# ---- compilation ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["default", "predecessor"])
def test_a_compiled_model_equals_the_eager_one(variant: str) -> None:
    """One graph of a layer of each kind, forward and backward; code generation is not what is tested here."""
    linear = VARIANTS[variant].get("linear_attn_config", linear_attn_config())
    model = tiny_model(
        variant,
        num_hidden_layers=2,
        linear_attn_config=linear | {"kda_layers": [1], "full_attn_layers": [2]},
    ).train()
    ids = random_ids(model.config)
    loss, grads = loss_and_gradients(model, ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled_loss = compiled(ids, labels=ids).loss
    assert_close(compiled_loss, loss, ROUNDED)
    assert_gradients_close(gradients(model, compiled_loss), grads, 1e-3)
