# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several files of this folder convert or load."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from tests.testing_common import randomize_


@pytest.fixture(scope="session")
def predecessor(tmp_path_factory: pytest.TempPathFactory) -> tuple[KimiLinearForCausalLM, Path]:
    """A tiny random model of Transformers' own class, and its folder in the released layout."""
    config = KimiLinearConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        linear_num_heads=3,
        linear_head_dim=8,
        layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = randomize_(KimiLinearForCausalLM(config)).eval()
    folder = tmp_path_factory.mktemp("predecessor")
    model.save_pretrained(folder)
    return model, folder
