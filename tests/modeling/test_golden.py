# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The text model against the golden numbers: an independent float64 evaluation of the published equations.

Tolerances in float32 are those of the fixtures' README. Nothing is compared at padding.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from deltalatent.kernels.attn_res import attention_residual_mix
from deltalatent.modeling.latent_moe import KimiK3TopKRouter
from deltalatent.modeling.modeling_kimi_k3 import KimiK3DecoderLayer
from tests.testing_common import (
    TEXT_FIXTURES,
    Golden,
    follow_routing_,
    golden,
    load_golden_model,
    max_error,
    round_to_bf16_,
    typical_error,
)

LOGITS, HIDDEN, LOSS, GRADIENT, CACHE = 1e-4, 2e-4, 1e-5, 1e-3, 1e-4

# The other attention function and the other experts are each tried once; nothing of the two depends on the other. The
# default of the experts is `grouped_mm` in `text_bf16layout`, `eager` where their width of 20 rules that out.
BACKENDS = [
    pytest.param("sdpa", None, id="sdpa-default_experts"),
    pytest.param("eager", None, id="eager-default_experts"),
    pytest.param("sdpa", "eager", id="sdpa-eager_experts"),
    pytest.param("sdpa", "batched_mm", id="sdpa-batched_mm"),
]


@pytest.fixture(params=TEXT_FIXTURES)
def case(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


def load(case: Golden, **kwargs: Any) -> Any:
    return load_golden_model(case.folder.name, **kwargs)


class Recorder:
    """What the modules of a model return, by forward hooks and so by no mechanism of the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.prefix_sums: list[Tensor] = []
        self.pre_norm_hidden: list[Tensor] = []
        self.routing: dict[int, tuple[Tensor, Tensor]] = {}
        for i, layer in enumerate(model.model.layers):
            assert isinstance(layer, KimiK3DecoderLayer)
            layer.register_forward_hook(lambda module, args, output: self.prefix_sums.append(output[0]))
            router = getattr(layer.mlp, "gate", None)
            if isinstance(router, KimiK3TopKRouter):
                router.register_forward_hook(lambda module, args, output, i=i: self._routed(i, output))
        model.model.norm.register_forward_pre_hook(self._before_norm, with_kwargs=True)

    def _before_norm(self, norm: nn.Module, streams: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        """The last mix, which the model makes and normalises in one operation."""
        eps, key_weight = kwargs["key_norm"].variance_epsilon, kwargs["key_norm"].weight
        self.pre_norm_hidden.append(
            attention_residual_mix(streams, kwargs["query"].weight[0], eps, key_weight=key_weight)
        )

    def _routed(self, layer: int, output: Any) -> None:
        ids, order = output.top_k_index.sort(dim=-1)
        self.routing[layer] = (ids, output.top_k_weights.gather(-1, order))


def at_real(case: Golden, actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return max_error(actual[case.real], expected[case.real])


@pytest.mark.parametrize(("attention", "experts"), BACKENDS)
def test_forward(case: Golden, attention: str, experts: str | None) -> None:
    model = load(case, attn_implementation=attention, experts_implementation=experts)
    recorded = Recorder(model)
    with torch.no_grad():
        output = model(**case.inputs, labels=case["labels"], output_hidden_states=True)

    expected_sums = case.per_layer("layer", "prefix_sum")
    assert sorted(expected_sums) == list(range(len(recorded.prefix_sums)))
    for i, expected in expected_sums.items():
        assert at_real(case, recorded.prefix_sums[i], expected) < HIDDEN, f"layer {i}"
    assert at_real(case, recorded.pre_norm_hidden[0], case["pre_norm_hidden"]) < HIDDEN
    assert at_real(case, output.hidden_states[-1], case["final_hidden"]) < HIDDEN
    assert at_real(case, output.logits, case["logits"]) < LOGITS
    assert abs(output.loss.item() - case["loss"].item()) < LOSS

    expected_ids = case.per_layer("router", "topk_ids")
    expected_weights = case.per_layer("router", "topk_weights")
    assert expected_ids.keys() == recorded.routing.keys()
    for i, (ids, weights) in recorded.routing.items():
        real = case.real.flatten()
        assert torch.equal(ids[real], expected_ids[i].flatten(0, 1)[real]), f"experts of layer {i}"
        # No tolerance is stated for them: a weight is at most 1 and depends smoothly on a layer's input.
        assert max_error(weights[real], expected_weights[i].flatten(0, 1)[real]) < HIDDEN, f"weights of layer {i}"


def released_gradient(model: nn.Module, name: str) -> Tensor:
    """The gradient that belongs to a tensor of the released layout."""
    if expert := re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight", name):
        experts = model.get_submodule(f"{expert[1]}.mlp.experts")
        index = int(expert[2])
        if expert[3] == "w2":
            return experts.down_proj.grad[index]
        gate, up = experts.gate_up_proj.grad[index].chunk(2)
        return gate if expert[3] == "w1" else up
    return model.get_parameter(name.replace("block_sparse_moe", "mlp")).grad


def check_loss_and_gradients(case: Golden, model: nn.Module) -> None:
    loss = model(**case.inputs, labels=case["labels"]).loss
    loss.backward()
    assert abs(loss.item() - case["loss"].item()) < LOSS
    names = [name.removeprefix("grad.") for name in case.expected if name.startswith("grad.")]
    assert len(names) >= 50
    for name in names:
        actual, expected = released_gradient(model, name), case["grad." + name]
        if name.endswith("A_log"):
            heads = actual.shape[0]
            assert not expected[heads:].any(), "stored padding has no gradient"
            expected = expected[:heads]
        assert actual.shape == expected.shape, name
        assert max_error(actual, expected) < GRADIENT * expected.abs().max().item(), name


@pytest.mark.parametrize(("attention", "experts"), BACKENDS)
def test_gradients(case: Golden, attention: str, experts: str | None) -> None:
    check_loss_and_gradients(case, load(case, attn_implementation=attention, experts_implementation=experts))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_gradients_with_checkpointing(case: Golden, use_reentrant: bool) -> None:
    model = load(case).train()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    check_loss_and_gradients(case, model)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "recomputed"])
def test_greedy_continuation(case: Golden, use_cache: bool) -> None:
    model = load(case)
    expected = case["greedy_tokens"]
    model.generation_config = GenerationConfig(pad_token_id=0)  # the stored continuation does not stop at any token
    output = model.generate(**case.inputs, max_new_tokens=expected.shape[1], do_sample=False, use_cache=use_cache)
    assert torch.equal(output[:, case["input_ids"].shape[1] :], expected)


@pytest.mark.parametrize("chunk", [None, 7], ids=["one_pass", "chunks_of_7"])
def test_cache_after_the_prompt(case: Golden, chunk: int | None) -> None:
    model = load(case)
    ids, mask = case["input_ids"], case["attention_mask"]
    length = ids.shape[1]
    cache = None
    with torch.no_grad():
        for start in range(0, length, chunk or length):
            end = min(start + (chunk or length), length)
            cache = model(
                ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True, logits_to_keep=1
            ).cache

    kernel = model.config.linear_conv_kernel_dim
    for layer, kind in enumerate(model.config.layer_types):
        prefix = f"cache.{layer}."
        if kind == "linear_attention":
            for i, name in enumerate(("conv_q", "conv_k", "conv_v")):
                window, expected = cache.get_conv_state(layer, i), case[prefix + name]
                assert window.shape[-1] == kernel - 1, "a cache that grows"
                assert max_error(window, expected[..., 1 - kernel :]) < CACHE, prefix + name
            state = cache.get_recurrent_state(layer)
            assert state.dtype == torch.float32
            assert max_error(state, case[prefix + "recurrent_state"]) < CACHE, prefix + "recurrent_state"
        else:
            latent, shared_key = cache.layers[layer].keys, cache.layers[layer].values  # [B, 1, T, .]
            assert at_real(case, latent[:, 0], case[prefix + "latent_normed"]) < CACHE, prefix
            assert at_real(case, shared_key[:, 0], case[prefix + "k_shared"]) < CACHE, prefix


def test_bf16_is_as_good_as_rounding_allows(case: Golden) -> None:
    """No more than twice the error of the float32 model in which linear maps, norms and layers round."""
    exact, half, rounded = load(case), load(case, dtype=torch.bfloat16), round_to_bf16_(load(case))
    follow_routing_(exact, half, rounded)
    with torch.no_grad():
        exact(**case.inputs)
        output, reference = half(**case.inputs, labels=case["labels"]), rounded(**case.inputs).logits
    assert output.logits.dtype == torch.bfloat16
    assert torch.isfinite(output.loss)

    expected = case["logits"][case.real]
    allowed = typical_error(reference[case.real], expected)
    assert 0 < typical_error(output.logits[case.real], expected) < 2 * allowed
    # The band means something: at most 16 roundings per layer, each of 2^-9 and adding up like a random walk.
    assert allowed < (16 * exact.config.num_hidden_layers) ** 0.5 * 2**-9 * expected.std().item()


def test_bf16_default_experts_run_at_any_width() -> None:
    """Grouped matrix products want rows of 16 bytes; a width of 20 must not end in an error of the operator."""
    default = "auto" if torch.cuda.is_available() else None
    assert load(golden("text_bf16layout")).config._experts_implementation == (default or "grouped_mm")
    case = golden("text_leftpad")
    assert case.config["moe_intermediate_size"] == 20
    model = load(case, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config._experts_implementation == (default or "eager")
    assert torch.isfinite(model(**case.inputs).logits[case.real]).all()
    with pytest.raises(ValueError, match=r"multiples of 8, got moe_intermediate_size=20"):
        load(case, experts_implementation="grouped_mm")
