# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate` against the models as Transformers ships them, and against runs of each document by itself."""

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.models.glm5_next import (
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    Glm5NextTextConfig,
    Glm5NextVisionConfig,
)
from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM

from deltalatent.kernels import accelerate, restore
from tests.equivalence import ROUNDED
from tests.testing_common import assert_close, assert_gradients_close, gradients, randomize_, tiny_model

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 12,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def kimi_linear(**fields) -> KimiLinearForCausalLM:
    config = KimiLinearConfig(
        **COMMON,
        num_local_experts=4,
        qk_rope_head_dim=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        **fields,
    )
    return randomize_(KimiLinearForCausalLM(config)).eval()


def glm5_next(**fields) -> Glm5NextForConditionalGeneration:
    """A selection of 8 of the earlier tokens, shared by two layers, in a model whose vision part stands idle."""
    text = Glm5NextTextConfig(
        **COMMON,
        n_routed_experts=4,
        q_lora_rank=16,
        layer_types=["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        indexer_types=["full", "full", "shared", "full"],
        index_topk=8,
        index_kpool=4,
        index_head_dim=8,
        index_n_heads=4,
        hc_mult=2,
        **fields,
    )
    vision = Glm5NextVisionConfig(
        depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=16, projection_intermediate_size=16
    )
    tokens = {name: 50 + i for i, name in enumerate(("image_token_id", "image_start_token_id", "image_end_token_id",
              "video_token_id", "video_start_token_id", "video_end_token_id"))}  # fmt: skip
    return randomize_(Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision, **tokens))).eval()


MODELS = {
    "kimi_linear": kimi_linear,
    "kimi_linear_eager": lambda: kimi_linear(attn_implementation="eager"),
    "glm5_next": glm5_next,
    "glm5_next_softplus": lambda: glm5_next(linear_lower_bound=None),
}


@pytest.fixture(params=MODELS)
def shipped(request):
    return MODELS[request.param]()


@pytest.fixture
def ours(shipped):
    return accelerate(copy.deepcopy(shipped), impl="torch")


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(2, 50, shape)


def left_padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[0, :9] = mask[2, :1] = 0
    return {"input_ids": ids(3, 21) * mask, "attention_mask": mask}


def logits(model: nn.Module, **inputs) -> torch.Tensor:
    return model(**{"use_cache": False} | inputs).logits


@pytest.mark.parametrize("batch", ["plain", "left_padded"])
def test_outputs_and_gradients_are_those_of_the_model_as_shipped(shipped, ours, batch):
    inputs = {"input_ids": ids(2, 70)} if batch == "plain" else left_padded()
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    expected, actual = logits(shipped, **inputs)[real], logits(ours, **inputs)[real]
    assert_close(actual, expected, ROUNDED)
    direction = torch.randn_like(expected)
    assert_gradients_close(gradients(ours, (actual * direction).sum()), gradients(shipped, (expected * direction).sum()))


@torch.no_grad()
def test_cached_prefill_chunks_and_steps_are_those_of_the_model_as_shipped(shipped, ours):
    inputs = left_padded()
    text_config = shipped.config.get_text_config()
    results = []
    for model in (shipped, ours):
        cache, parts = DynamicCache(config=text_config), []
        for start, end in [(0, 12), (12, 14), (14, 15), (15, 20), (20, 21)]:
            mask = inputs["attention_mask"][:, :end]
            part = model(input_ids=inputs["input_ids"][:, start:end], attention_mask=mask, cache=cache, use_cache=True)
            parts.append(part.logits)
        results.append(torch.cat(parts, 1)[inputs["attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDED)
