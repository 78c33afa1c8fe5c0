# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""How released tensors become parameters, for Transformers' conversion engine.

Experts are fused into 3-D parameters, the MoE block is renamed, `A_log` loses its padding; nothing else differs. The
engine applies the reverse when it saves, so every class writes the released names.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.modeling.released_layout import MOE_NAME, RELEASED_MOE_NAME


class NarrowDecay(ConversionOps):
    """`A_log` as stored (any length from the number of heads up, the rest is padding) -> one entry per head."""

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, config=None, full_layer_name=None, **kwargs):
        """Raises ValueError if the stored tensor is shorter than the number of heads."""
        stored = _only_tensor(input_dict)
        num_heads = config.get_text_config().linear_num_heads
        if stored.numel() < num_heads:
            raise ValueError(
                f"`{full_layer_name}` must have at least {num_heads} entries (one per head), got {stored.numel()}: "
                "the file is truncated or belongs to another config."
            )
        return {target_patterns[0]: stored.flatten()[:num_heads].clone()}

    @property
    def reverse_op(self) -> ConversionOps:
        return PadDecay()


class PadDecay(ConversionOps):
    """One entry per head -> zero-padded to `kda_a_log_length`, if the config says so."""

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        decay = _only_tensor(input_dict)
        length = config.get_text_config().kda_a_log_length or decay.numel()
        return {target_patterns[0]: F.pad(decay, (0, length - decay.numel()))}

    @property
    def reverse_op(self) -> ConversionOps:
        return NarrowDecay()


def _only_tensor(input_dict: dict[str, Tensor | list[Tensor]]) -> Tensor:
    (value,) = input_dict.values()
    return value[0] if isinstance(value, list) else value


def released_to_ours() -> list[WeightTransform]:
    """A fresh list of transforms (the engine keeps state in them)."""
    return [
        WeightRenaming(source_patterns=rf"\.{RELEASED_MOE_NAME}\.", target_patterns=rf"\.{MOE_NAME}\."),
        WeightConverter(
            source_patterns=[r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
            target_patterns=r"\.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns=r"\.experts.*.w2.weight",
            target_patterns=r"\.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
        WeightConverter(
            source_patterns="self_attn.A_log", target_patterns="self_attn.A_log", operations=[NarrowDecay()]
        ),
    ]


def register() -> None:
    """Tell Transformers about the layout; calling it again changes nothing."""
    register_checkpoint_conversion_mapping(KimiK3TextConfig.model_type, released_to_ours(), overwrite=True)
