# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The predecessor's tower (Kimi K2.5: LayerNorm, biases, bicubic positions, `patchmerger`) against Transformers' own.

A second public implementation of patch order, rotary axes, time vectors and merging, written by others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from deltalatent import KimiK3VisionModel
from deltalatent.modeling.vision_tower import KimiK3Projector
from tests.testing_common import assert_close, randomize_
from tests.vision.vision_testing import random_media, tiny_vision_config

THEIRS = {
    "patch_size": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
}
OURS = {
    "qkv_hidden_size": 24,
    "norm_type": "layernorm",
    "attn_bias": True,
    "linear_bias": True,
    "patch_embed_proj_bias": True,
    "pos_emb_interpolation_mode": "bicubic",
    "mm_projector_type": "patchmerger",
}
TEXT = {
    "model_type": "deepseek_v3",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    "grids", [[(1, 6, 6)], [(1, 4, 8), (1, 2, 2), (1, 2, 2), (3, 8, 4)]], ids=["table", "resampled"]
)
def test_same_visual_tokens_from_the_same_file(grids: list[tuple[int, int, int]], tmp_path: Path) -> None:
    config = Kimi_K25Config(
        text_config=TEXT, vision_config=THEIRS, projection_hidden_size=24, image_token_id=5, video_token_id=6
    )
    theirs = Kimi_K25ForConditionalGeneration(config).eval()
    fixed = {name: buffer.clone() for name, buffer in theirs.named_buffers()}  # frequencies and time vectors
    randomize_(theirs)
    for name, buffer in theirs.named_buffers():
        buffer.copy_(fixed[name])
    theirs.save_pretrained(tmp_path)
    # Transformers does not write all names as the released file has them.
    stored = {
        name.removeprefix("model.").replace("encoder.patch_embed.", "patch_embed."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }

    ours_config = tiny_vision_config(**OURS)
    tower, projector = KimiK3VisionModel(ours_config).eval(), KimiK3Projector(ours_config)
    for module, prefix in ((tower, "vision_tower."), (projector, "mm_projector.")):
        module.load_state_dict({k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)})

    media = random_media(*grids)
    with torch.no_grad():
        expected = theirs.model.get_image_features(media["pixel_values"], media["grid_thws"])
        output = tower(**media)
        assert_close(output.last_hidden_state, expected.last_hidden_state)
        assert_close(projector(output.pooler_output), torch.cat(tuple(expected.pooler_output)))
