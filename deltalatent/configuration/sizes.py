# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Ready-made sizes, and how many parameters a configuration has.

`python -m deltalatent sizes` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig, default_linear_attn_config


def _config(
    num_hidden_layers: int, heads: int, head_dim: int, overrides: dict[str, Any], **fields
) -> KimiK3TextConfig:
    """One head geometry for both kinds of attention (readers of the released layout need equal head counts)."""
    fields = {
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": heads,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "v_head_dim": head_dim,
    } | fields
    fields |= overrides
    fields.setdefault(
        "linear_attn_config",
        default_linear_attn_config(fields["num_hidden_layers"], fields["num_attention_heads"], head_dim),
    )
    return KimiK3TextConfig(**fields)


def tiny(**overrides) -> KimiK3TextConfig:
    """Five layers of toy width, for tests: every mechanism is on, nothing takes time."""
    return _config(
        5, 2, 16, overrides,
        vocab_size=256, hidden_size=32, intermediate_size=64, q_lora_rank=20, kv_lora_rank=24,
        attn_res_block_size=2, num_experts=8, num_experts_per_token=2, num_shared_experts=1,
        moe_intermediate_size=16, routed_expert_hidden_size=24, max_position_embeddings=4096,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def nano(**overrides) -> KimiK3TextConfig:
    """4.5 M parameters: learns to write from a few megabytes of text in minutes on a laptop's CPU."""
    return _config(
        8, 4, 32, overrides,
        vocab_size=2048, hidden_size=128, intermediate_size=384, q_lora_rank=64, kv_lora_rank=64,
        attn_res_block_size=4, num_experts=32, num_experts_per_token=4, num_shared_experts=1,
        moe_intermediate_size=64, routed_expert_hidden_size=64, max_position_embeddings=8192,
        initializer_range=0.06, embedding_initializer_range=1.0,
    )  # fmt: skip


def small(**overrides) -> KimiK3TextConfig:
    """160 M parameters: one GPU, hours."""
    return _config(
        12, 8, 64, overrides,
        vocab_size=32000, hidden_size=512, intermediate_size=1536, q_lora_rank=256, kv_lora_rank=192,
        attn_res_block_size=4, num_experts=96, num_experts_per_token=8, num_shared_experts=1,
        moe_intermediate_size=128, routed_expert_hidden_size=256, max_position_embeddings=65536,
        embedding_initializer_range=1.0,
    )  # fmt: skip


def base(**overrides) -> KimiK3TextConfig:
    """1.0 B parameters: one GPU, days."""
    return _config(
        16, 8, 128, overrides,
        vocab_size=64000, hidden_size=1024, intermediate_size=4096, q_lora_rank=384, kv_lora_rank=256,
        attn_res_block_size=4, num_experts=128, num_experts_per_token=8, num_shared_experts=2,
        moe_intermediate_size=256, routed_expert_hidden_size=512, max_position_embeddings=262144,
        embedding_initializer_range=1.0,
    )  # fmt: skip


def release(**overrides) -> KimiK3TextConfig:
    """The released size: 2.8 T parameters, 104 B active (without the input embedding). Build it on the meta device."""
    return _config(93, 96, 128, overrides)  # everything else is the default


SIZES: dict[str, Callable[..., KimiK3TextConfig]] = {
    function.__name__: function for function in (tiny, nano, small, base, release)
}


def size_config(size: str, **overrides) -> KimiK3TextConfig:
    """A ready-made configuration.

    Args:
        size: `"tiny"`, `"nano"`, `"small"`, `"base"` or `"release"`.
        **overrides: Fields of `KimiK3TextConfig` to set differently, e.g. `vocab_size=len(tokenizer)`.

    Raises:
        ValueError: Unknown size.
    """
    if size not in SIZES:
        raise ValueError(f"`size` must be one of {list(SIZES)}, got {size!r}: choose one of these.")
    return SIZES[size](**overrides)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model.

    Attributes:
        total: All of them, embedding and head included.
        active: Those that one token uses: `num_experts_per_token` of the routed experts, and everything else. The
            whole input embedding is included (the release's 104 B leave it out).
    """

    total: int
    active: int

    def __str__(self) -> str:
        return f"{_readable(self.total)} parameters, {_readable(self.active)} active per token"


def count_parameters(config: KimiK3TextConfig) -> ParameterCount:
    """Parameters of `KimiK3ForCausalLM(config)`, counted from the equations (no model is built).

    The selection bias of the routers is a buffer and not counted.
    """
    width = config.hidden_size
    latent = config.routed_expert_hidden_size or width
    heads, head_dim = config.linear_num_heads, config.linear_head_dim
    inner = heads * head_dim

    kda = 3 * width * inner + 3 * inner * config.linear_conv_kernel_dim  # q, k, v and their convolutions
    kda += width * head_dim + head_dim * inner + heads + inner  # decay: two projections, A_log, dt_bias
    kda += width * heads  # write strength
    kda += width * inner if config.use_full_rank_gate else width * head_dim + head_dim * inner
    kda += head_dim + inner * width  # norm of the read-out, output

    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    queries, values = config.num_attention_heads * key_dim, config.num_attention_heads * config.v_head_dim
    rank = config.q_lora_rank
    mla = width * queries if rank is None else width * rank + rank + rank * queries
    mla += width * (config.kv_lora_rank + config.qk_rope_head_dim) + config.kv_lora_rank
    mla += config.kv_lora_rank * config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    mla += width * values * (2 if config.mla_use_output_gate else 1)  # output, and its gate

    dense = 3 * width * config.intermediate_size
    expert = 3 * latent * config.moe_intermediate_size
    around_experts = 0
    if config.num_experts:
        around_experts = width * config.num_experts  # router
        around_experts += 3 * width * config.num_shared_experts * config.moe_intermediate_size
        if config.routed_expert_hidden_size is not None:
            around_experts += 2 * width * latent + (latent if config.latent_moe_use_norm else 0)

    residuals = 4 * width if config.attn_res_block_size is not None else 0  # two queries, two norms
    fixed = config.vocab_size * width * (1 if config.tie_word_embeddings else 2) + width + residuals // 2
    experts_total = experts_active = 0
    for token_mixer, channel_mixer in zip(config.layer_types, config.mlp_layer_types, strict=True):
        fixed += (kda if token_mixer == "linear_attention" else mla) + 2 * width + residuals
        if channel_mixer == "dense":
            fixed += dense
        else:
            fixed += around_experts
            experts_total += (config.num_experts or 0) * expert
            experts_active += config.num_experts_per_token * expert
    return ParameterCount(total=fixed + experts_total, active=fixed + experts_active)


def _readable(count: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def sizes_table() -> str:
    """The ready-made sizes, one line each, with their exact numbers of parameters."""
    lines = [f"{'size':<8} {'layers':>6} {'width':>6} {'experts':>9} {'parameters':>17} {'active per token':>17}"]
    for name in SIZES:
        config = size_config(name)
        count = count_parameters(config)
        experts = f"{config.num_experts_per_token} of {config.num_experts}"
        lines.append(
            f"{name:<8} {config.num_hidden_layers:>6} {config.hidden_size:>6} {experts:>9} "
            f"{count.total:>17,} {count.active:>17,}"
        )
    return "\n".join(lines)
