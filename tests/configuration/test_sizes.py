# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Ready-made sizes: counts against built models and a hand count, and what readers of the released layout need."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from deltalatent import SIZES, KimiK3ForCausalLM, KimiK3TextConfig, count_parameters, size_config
from deltalatent.__main__ import main
from deltalatent.configuration.sizes import sizes_table
from tests.testing_common import VARIANTS, tiny_config

# Parameters in all, to what the name promises.
TOTALS = {
    "tiny": (0, 200_000),
    "nano": (3e6, 5e6),
    "small": (130e6, 170e6),
    "base": (0.9e9, 1.1e9),
    "release": (2.75e12, 2.85e12),
}


def on_meta_device(config: KimiK3TextConfig) -> KimiK3ForCausalLM:
    with torch.device("meta"):
        return KimiK3ForCausalLM(config)


def built_counts(model: KimiK3ForCausalLM) -> tuple[int, int]:
    """Total and active parameters of a built model; shared (tied) ones once."""
    config = model.config
    total = active = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        share = config.num_experts_per_token / config.num_experts if ".experts." in name else 1
        active += round(parameter.numel() * share)
    return total, active


@pytest.mark.parametrize("size", SIZES)
def test_count_equals_the_built_model(size: str) -> None:
    config = size_config(size)
    count = count_parameters(config)
    assert (count.total, count.active) == built_counts(on_meta_device(config))
    low, high = TOTALS[size]
    assert low <= count.total <= high


@pytest.mark.parametrize("variant", VARIANTS)
def test_count_equals_the_built_variant(variant: str) -> None:
    config = tiny_config(variant)
    count = count_parameters(config)
    assert (count.total, count.active) == built_counts(on_meta_device(config))


def test_release_by_hand() -> None:
    """Written out from the report's table of sizes, with no help from the config's own properties."""
    d = 7168
    kda_inner, kda_heads, kda_width = 12288, 96, 128
    kda = (
        3 * d * kda_inner  # q, k, v
        + 3 * kda_inner * 4  # their taps
        + d * kda_width + kda_width * kda_inner  # decay, low rank
        + kda_heads + kda_inner  # A_log, dt_bias
        + d * kda_heads  # write strength
        + d * kda_inner  # output gate
        + kda_width  # norm of the read-out
        + kda_inner * d  # output
    )  # fmt: skip
    mla = (
        d * 1536 + 1536 + 1536 * 96 * (128 + 64)  # queries
        + d * (512 + 64) + 512 + 512 * 96 * (128 + 128)  # keys and values
        + d * 12288  # output gate
        + 12288 * d  # output
    )  # fmt: skip
    expert = 3 * 3584 * 3072
    around_experts = (
        d * 896  # router
        + d * 3584 + 3584 + 3584 * d  # to the latent width, norm, and back
        + 3 * d * 2 * 3072  # two shared experts
    )  # fmt: skip
    dense = 3 * d * 33792
    per_layer = 2 * d + 4 * d  # two norms; two pseudo-queries and their norms
    ends = 2 * 163840 * d + d + 2 * d  # embedding and head; final norm; final mix
    fixed = 69 * kda + 24 * mla + dense + 92 * around_experts + 93 * per_layer + ends

    count = count_parameters(size_config("release"))
    assert count.total == fixed + 92 * 896 * expert == 2_779_484_393_568
    assert count.active == fixed + 92 * 16 * expert == 105_363_935_328
    assert round((count.active - 163840 * d) / 1e9) == 104  # the published figure, which leaves the embedding out
    assert str(count) == "2.78 T parameters, 105 B active per token"


def test_selection_bias_is_not_a_parameter() -> None:
    model = on_meta_device(size_config("tiny"))
    assert not any("e_score_correction_bias" in name for name, _ in model.named_parameters())
    assert sum("e_score_correction_bias" in name for name, _ in model.named_buffers()) == 4


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_what_readers_of_the_released_layout_take(size: str) -> None:
    config = size_config(size)
    assert config.linear_num_heads == config.num_attention_heads
    assert config.mla_use_nope and config.mla_use_output_gate
    assert config.hidden_act == "situ"
    assert config.activation_situ_beta > 0 and config.activation_situ_linear_beta > 0
    assert config.moe_router_activation_func == "sigmoid" and config.topk_method == "noaux_tc"
    assert config.attn_res_block_size is not None
    assert config.gate_lower_bound == -5.0 and config.use_full_rank_gate
    assert config.q_lora_rank is not None and config.routed_expert_hidden_size is not None
    assert config.layer_types[0] == "linear_attention" and config.layer_types[-1] == "full_attention"


@pytest.mark.parametrize("size", SIZES)
def test_sizes_alternate_three_to_one(size: str) -> None:
    config = size_config(size)
    full = [i + 1 for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == sorted({*range(4, config.num_hidden_layers + 1, 4), config.num_hidden_layers})
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)


def test_overrides_reach_the_config() -> None:
    config = size_config("nano", vocab_size=999, num_experts=16, hidden_act="silu")
    assert (config.vocab_size, config.num_experts, config.hidden_act) == (999, 16, "silu")
    assert size_config("nano").vocab_size == 2048  # the table itself is untouched


def test_overriding_layers_and_heads_keeps_the_pattern() -> None:
    config = size_config("small", num_hidden_layers=6, num_attention_heads=4)
    assert config.linear_attn_config["full_attn_layers"] == [4, 6]
    assert config.linear_num_heads == config.num_attention_heads == config.num_key_value_heads == 4
    count = count_parameters(config)
    assert (count.total, count.active) == built_counts(on_meta_device(config))


def test_release_is_the_default_and_follows_overrides_too() -> None:
    assert size_config("release").to_dict() == KimiK3TextConfig().to_dict()
    config = size_config("release", num_hidden_layers=5, num_attention_heads=48)
    assert config.linear_attn_config["full_attn_layers"] == [4, 5]
    assert config.linear_num_heads == 48


def test_every_call_gives_a_fresh_config() -> None:
    first = size_config("tiny")
    first.linear_attn_config["kda_layers"].clear()
    assert size_config("tiny").linear_attn_config["kda_layers"] == [1, 2, 3]


def test_unknown_size_raises() -> None:
    with pytest.raises(ValueError, match=r"`size` must be one of \['tiny', .*\], got 'huge': choose"):
        size_config("huge")


def test_wrong_override_raises() -> None:
    with pytest.raises(Exception, match="`num_experts_per_token` must be at most `num_experts`=8, got 9"):
        size_config("tiny", num_experts_per_token=9)


def test_table_has_every_size_and_its_exact_count() -> None:
    header, *rows = sizes_table().splitlines()
    assert header.split() == "size layers width experts parameters active per token".split()
    for size, row in zip(SIZES, rows, strict=True):
        count = count_parameters(size_config(size))
        assert row.startswith(size)
        assert row.split()[-2:] == [f"{count.total:,}", f"{count.active:,}"]


def test_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["sizes"])
    assert capsys.readouterr().out == sizes_table() + "\n"


def test_command_in_a_process_says_nothing_else() -> None:
    """Running a module that the package itself imports would make Python warn."""
    done = subprocess.run([sys.executable, "-m", "deltalatent", "sizes"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout == sizes_table() + "\n"
    assert "Warning" not in done.stderr


def test_unknown_command_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
