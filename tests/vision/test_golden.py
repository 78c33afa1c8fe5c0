# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The multimodal model against the golden numbers: an independent float64 evaluation of the published equations.

Row 0 has two images of different sizes, the left-padded row 1 a clip of two frames. Tolerances in float32 are those of
the fixtures' README.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from deltalatent import KimiK3ForConditionalGeneration
from tests.testing_common import Golden, follow_routing_, golden, load_golden_model, max_error, typical_error
from tests.vision.vision_testing import round_tower_to_bf16_

LOGITS, HIDDEN, LOSS, GRADIENT, CACHE, VISION = 1e-4, 2e-4, 1e-5, 1e-3, 1e-4, 5e-5
ITEMS = 3


@pytest.fixture
def case() -> Golden:
    return golden("multimodal")


def load(**kwargs: Any) -> KimiK3ForConditionalGeneration:
    return load_golden_model("multimodal", KimiK3ForConditionalGeneration, **kwargs)


def media(case: Golden) -> dict[str, Tensor]:
    return {"pixel_values": case["pixel_values"], "grid_thws": case["grid_thws"]}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tower_and_projector(case: Golden, attention: str) -> None:
    model = load(attn_implementation=attention)
    assert model.model.vision_tower.config._attn_implementation == attention
    with torch.no_grad():
        tower = model.model.vision_tower(**media(case), output_hidden_states=True)
        features = model.get_image_features(**media(case))
    blocks = model.config.vision_config.vt_num_hidden_layers
    assert len(tower.hidden_states) == blocks + 1
    for stage, actual in (("tower", tower.last_hidden_state), ("merged", tower.pooler_output)):
        expected = torch.cat([case[f"vision.{i}.{stage}"] for i in range(ITEMS)])
        assert actual.shape == expected.shape
        assert max_error(actual, expected) < VISION, stage
    assert len(features.pooler_output) == ITEMS
    for i, tokens in enumerate(features.pooler_output):
        assert max_error(tokens, case[f"vision.{i}.projected"]) < VISION, i


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_forward(case: Golden, attention: str) -> None:
    model = load(attn_implementation=attention)
    with torch.no_grad():
        output = model(
            **case.inputs, **media(case), labels=case["labels"], output_hidden_states=True, output_router_logits=True
        )
    assert max_error(output.hidden_states[-1][case.real], case["final_hidden"][case.real]) < HIDDEN
    assert max_error(output.logits[case.real], case["logits"][case.real]) < LOGITS
    assert abs(output.loss.item() - case["loss"].item()) < LOSS
    for i, sums in case.per_layer("layer", "prefix_sum").items():
        # `hidden_states[i + 1]` is what layer i returns, but for the last, which is the final norm's.
        if i + 2 < len(output.hidden_states):
            assert max_error(output.hidden_states[i + 1][case.real], sums[case.real]) < HIDDEN, f"layer {i}"
    assert len(output.router_logits) == len(case.per_layer("router", "topk_ids"))


def released_gradient(model: nn.Module, name: str) -> Tensor:
    """The gradient that belongs to a tensor of the released layout."""
    for released, ours in KimiK3ForConditionalGeneration.released_prefixes:
        if name.startswith(released):
            name = ours + name.removeprefix(released)
            break
    if expert := re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight", name):
        experts = model.get_submodule(f"{expert[1]}.mlp.experts")
        if expert[3] == "w2":
            return experts.down_proj.grad[int(expert[2])]
        gate, up = experts.gate_up_proj.grad[int(expert[2])].chunk(2)
        return gate if expert[3] == "w1" else up
    return model.get_parameter(name.replace("block_sparse_moe", "mlp")).grad


@pytest.mark.parametrize(
    "checkpointing",
    [None, {"use_reentrant": False}, {"use_reentrant": True}],
    ids=["plain", "checkpoint", "reentrant"],
)
def test_loss_and_gradients(case: Golden, checkpointing: dict[str, bool] | None) -> None:
    model = load(attn_implementation="sdpa").train()
    if checkpointing is not None:
        model.activation_checkpointing_enable(checkpointing)
        assert model.model.vision_tower.encoder.blocks[0].gradient_checkpointing
    loss = model(**case.inputs, **media(case), labels=case["labels"]).loss
    loss.backward()
    assert abs(loss.item() - case["loss"].item()) < LOSS
    names = [name.removeprefix("grad.") for name in case.expected if name.startswith("grad.")]
    assert sum("vision_tower" in name or "mm_projector" in name for name in names) >= 12
    for name in names:
        actual, expected = released_gradient(model, name), case["grad." + name]
        if name.endswith("A_log"):
            expected = expected[: actual.shape[0]]
        assert actual.shape == expected.shape, name
        assert max_error(actual, expected) < GRADIENT * expected.abs().max().item(), name


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}],
    ids=["dynamic", "recomputed", "static", "chunked_prefill"],
)
def test_greedy_continuation(case: Golden, options: dict[str, Any]) -> None:
    model = load()
    expected = case["greedy_tokens"]
    model.generation_config = GenerationConfig(pad_token_id=0)  # the stored continuation does not stop at any token
    output = model.generate(
        **case.inputs,
        **media(case),
        max_new_tokens=expected.shape[1],
        do_sample=False,
        disable_compile=True,
        **options,
    )
    assert torch.equal(output[:, case["input_ids"].shape[1] :], expected)


def test_cache_after_the_prompt(case: Golden) -> None:
    model = load()
    with torch.no_grad():
        cache = model(**case.inputs, **media(case), use_cache=True, logits_to_keep=1).cache
    for layer, kind in enumerate(model.config.get_text_config().layer_types):
        prefix = f"cache.{layer}."
        if kind == "linear_attention":
            state = cache.get_recurrent_state(layer)
            assert max_error(state, case[prefix + "recurrent_state"]) < CACHE, prefix
        else:
            latent = cache.layers[layer].keys[:, 0]
            assert max_error(latent[case.real], case[prefix + "latent_normed"][case.real]) < CACHE, prefix


def test_bf16_is_as_good_as_rounding_allows(case: Golden) -> None:
    """Tower and projector: no more than twice the error of the float32 model in which the same steps round."""
    half, rounded = load(dtype=torch.bfloat16), round_tower_to_bf16_(load())
    with torch.no_grad():
        actual, reference = (torch.cat(m.get_image_features(**media(case)).pooler_output) for m in (half, rounded))
    expected = torch.cat([case[f"vision.{i}.projected"] for i in range(ITEMS)])
    assert actual.dtype == torch.bfloat16
    allowed = typical_error(reference, expected)
    assert 0 < typical_error(actual, expected) < 2 * allowed
    # The band means something: some ten roundings of 2^-9 per block, adding up like a random walk.
    steps = 10 * (half.config.vision_config.vt_num_hidden_layers + 1)
    assert allowed < steps**0.5 * 2**-9 * expected.std().item()


def test_bf16_logits_are_of_this_model(case: Golden) -> None:
    """With the experts of the float32 model, half precision moves the logits by a small part of their spread."""
    exact, half = load(), load(dtype=torch.bfloat16)
    follow_routing_(exact, half)
    with torch.no_grad():
        exact(**case.inputs, **media(case))
        output = half(**case.inputs, **media(case), labels=case["labels"])
    assert torch.isfinite(output.loss)
    expected = case["logits"][case.real]
    layers = half.config.get_text_config().num_hidden_layers
    band = (16 * layers) ** 0.5 * 2**-9 * expected.std().item()  # as in the text model's test
    assert typical_error(output.logits[case.real], expected) < 2 * band
