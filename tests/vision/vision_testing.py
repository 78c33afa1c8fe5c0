# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the vision tests share: a tiny multimodal model, random media, prompts with placeholders."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from deltalatent import KimiK3Config, KimiK3ForConditionalGeneration, KimiK3VisionConfig
from deltalatent.modeling.norms import KimiK3RMSNorm
from deltalatent.modeling.vision_tower import Grid, KimiK3PatchProjection, KimiK3VisionBlock
from deltalatent.processing.chat_template import STRUCTURE_TOKENS
from deltalatent.processing.processing_kimi_k3 import MEDIA_TOKENS
from tests.testing_common import left_padded, randomize_, tiny_config

PLACEHOLDER = 250
PATCH = 4

TINY_VISION: dict[str, Any] = {
    "patch_size": PATCH,
    "init_pos_emb_height": 6,
    "init_pos_emb_width": 6,
    "vt_hidden_size": 24,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 40,
    "qkv_hidden_size": 32,
    "mm_hidden_size": 24,
    "text_hidden_size": 32,
}


def tiny_vision_config(**overrides: Any) -> KimiK3VisionConfig:
    """A tower of toy size: patches of 4 x 4 pixels, attention wider than the tower."""
    return KimiK3VisionConfig(**(TINY_VISION | overrides))


def tiny_multimodal_config(*, vision: dict[str, Any] | None = None, **text: Any) -> KimiK3Config:
    """`tiny_config(**text)` with a tower of `tiny_vision_config(**vision)`; the placeholder is token 250."""
    text_config = tiny_config(**text)
    return KimiK3Config(
        text_config=text_config,
        vision_config=tiny_vision_config(**(vision or {})),
        media_placeholder_token_id=PLACEHOLDER,
        tie_word_embeddings=text_config.tie_word_embeddings,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def tiny_multimodal_model(*, seed: int = 0, **kwargs: Any) -> KimiK3ForConditionalGeneration:
    """A float32 model of `tiny_multimodal_config(**kwargs)` in eval mode, in which every weight matters."""
    return randomize_(KimiK3ForConditionalGeneration(tiny_multimodal_config(**kwargs)), seed).eval()


def random_media(*grids: Grid, seed: int = 0) -> dict[str, Tensor]:
    """`pixel_values` and `grid_thws` of items with these grids."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(t * h * w for t, h, w in grids)
    return {
        "pixel_values": torch.randn(count, 3, PATCH, PATCH, generator=generator),
        "grid_thws": torch.tensor(grids),
    }


def item(media: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """One item of a batch of media by itself."""
    sizes = media["grid_thws"].prod(dim=1).tolist()
    return {
        "pixel_values": media["pixel_values"].split(sizes)[index],
        "grid_thws": media["grid_thws"][index : index + 1],
    }


def prompt(*rows: list[int | Grid], seed: int = 0) -> dict[str, Tensor]:
    """Left-padded `input_ids` and `attention_mask`; a number n stands for n random text tokens, a grid for its
    placeholders."""
    generator = torch.Generator().manual_seed(seed)

    def part(value: int | Grid) -> Tensor:
        if isinstance(value, int):
            return torch.randint(3, PLACEHOLDER, (value,), generator=generator)
        return torch.full((value[1] * value[2] // 4,), PLACEHOLDER)

    ids, mask = left_padded([torch.cat([part(value) for value in row]) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def round_tower_to_bf16_(model: nn.Module) -> nn.Module:
    """Let the vision part of a float32 model round, to bf16, what its linear maps take and return and what its norms
    and blocks return: the roundings that every bf16 model has."""

    def rounded(value: Any) -> Any:
        return value.to(torch.bfloat16).to(value.dtype) if isinstance(value, Tensor) else value

    for part in (model.model.vision_tower, model.model.mm_projector):
        for module in part.modules():
            if isinstance(module, nn.Linear | KimiK3PatchProjection):
                module.register_forward_pre_hook(lambda module, args: tuple(rounded(arg) for arg in args))
            if isinstance(module, nn.Linear | KimiK3PatchProjection | KimiK3RMSNorm | KimiK3VisionBlock):
                module.register_forward_hook(lambda module, args, output: rounded(output))
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of chats and media: 256 + 10 ids."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[EOS]", *STRUCTURE_TOKENS, *MEDIA_TOKENS]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", padding_side="left"
    )
