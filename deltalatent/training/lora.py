# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapts: the linear maps of a model by module name, and its routed experts by parameter name.

Sources: LoRA (arXiv 2106.09685); names of modules as in the released checkpoint (Kimi K3 report, arXiv 2607.24653).
"""

from __future__ import annotations

from typing import TypedDict

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig

__all__ = ["LoraTargets", "lora_targets"]

EXPERT_PARAMETERS = ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")


class LoraTargets(TypedDict):
    """Two arguments of `peft.LoraConfig`; lists are sorted.

    Attributes:
        target_modules: Last parts of module names.
        target_parameters: Last parts of the names of 3-D parameters, `None` for none.
    """

    target_modules: list[str]
    target_parameters: list[str] | None


def lora_targets(config: KimiK3TextConfig | KimiK3Config, *, experts: bool = True) -> LoraTargets:
    """Default targets, `LoraConfig(r=16, lora_alpha=32, **lora_targets(model.config))`.

    All linear maps of the KDA and latent-attention layers, of dense and shared channel mixers, and around the routed
    experts. Never: the router, norms, short convolutions, decay parameters, pseudo-queries, embedding and head; an
    adapter on the router would move tokens to experts whose balance was set without it, and the others are vectors or
    are tied to the vocabulary.

    The routed experts are two 3-D parameters, which no module name finds. PEFT adapts them as `target_parameters`: for
    each expert a pair of rank r, so most of the adapter's weights; such a config must have `lora_dropout=0`, no DoRA
    and no bias.

    Args:
        config: Of the model; only names that it has are listed.
        experts: Whether to adapt the routed experts too. Without effect for a dense model.

    Raises:
        TypeError: `config` is of another architecture.
    """
    if not isinstance(config, KimiK3TextConfig | KimiK3Config):
        raise TypeError(
            f"`config` must be a KimiK3TextConfig or KimiK3Config, got {type(config).__name__}: pass `model.config` "
            "of a model of this package."
        )
    text = config if isinstance(config, KimiK3TextConfig) else config.get_text_config()
    names: set[str] = set()
    if "linear_attention" in text.layer_types:
        names |= {"q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "o_proj"}
        names |= {"g_proj"} if text.use_full_rank_gate else {"g_a_proj", "g_b_proj"}
    if "full_attention" in text.layer_types:
        names |= {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
        names |= {"q_proj"} if text.q_lora_rank is None else {"q_a_proj", "q_b_proj"}
        names |= {"g_proj"} if text.mla_use_output_gate else set()
    is_sparse = "sparse" in text.mlp_layer_types
    if "dense" in text.mlp_layer_types or text.num_shared_experts:
        names |= {"gate_proj", "up_proj", "down_proj"}
    if is_sparse and text.routed_expert_hidden_size is not None:
        names |= {"routed_expert_down_proj", "routed_expert_up_proj"}
    return {
        "target_modules": sorted(names),
        "target_parameters": sorted(EXPERT_PARAMETERS) if experts and is_sparse else None,
    }
