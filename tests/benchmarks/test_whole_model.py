# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole models runs with tiny ones, counts FLOPs by rules checked by hand, outlives failing parts."""

import json
import time

import pytest
import torch

from benchmarks import whole_model
from deltalatent.configuration.sizes import count_parameters, size_config

CPU = torch.device("cpu")
TINY = whole_model.Settings(CPU, flops_per_s=1e9, rows=1, tokens=16, steps=1, tiny=True)


def test_parts_run(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_model, "measure_ceilings", lambda device: {"bytes_per_s": 1e9, "flops_per_s": 1e9})
    out = tmp_path / "whole.json"
    wanted = ["train.small.ours", "train.small.fla", "decode.small", "attention_layer"]
    arguments = ["--tiny", "--device", "cpu", "--out", str(out), *(f"--part={name}" for name in wanted)]
    assert whole_model.main(arguments) == 0
    results = json.loads(out.read_text())["results"]
    assert set(results) == {"train.small.ours", "train.small.fla", "decode.small.ours", "attention_layer"}
    training = results["train.small.ours"]
    assert training["tokens_per_s"] == pytest.approx(32 / training["step_ms"] * 1e3)
    assert results["decode.small.ours"]["eager_ms_per_token"]["32"] > 0
    assert results["attention_layer"]["8_uneven_documents.lengths"]["forward_backward_ms"] > 0
    if not torch.cuda.is_available():
        assert "flash-linear-attention" in results["train.small.fla"]["error"]
    with pytest.raises(SystemExit):
        whole_model.main(["--part", "nothing"])


def test_flops_are_two_per_active_parameter_and_the_mixing():
    model = whole_model.build("tiny", TINY)
    config = model.config
    matrices = count_parameters(size_config("tiny")).active - config.vocab_size * config.hidden_size
    latent = 2 * 2 * 2 * (16 + 8 + 16) * 100.0  # layers, product and sum, heads, widths of keys and values, context
    recurrence = 3 * 6 * 2 * 16**2
    assert whole_model.forward_flops_per_token(model, 100.0) == pytest.approx(2 * matrices + latent + recurrence)


def test_memory_needs_the_allocator_of_a_gpu():
    with pytest.raises(ValueError, match="got cpu: use --device cuda"):
        whole_model.parts(TINY)["memory.small"]()


@pytest.mark.gpu
def test_memory_and_graph_on_a_gpu():
    """The bank is that of three closed blocks."""
    settings = whole_model.Settings(torch.device("cuda"), flops_per_s=1e9, rows=1, tokens=4096, steps=1, tiny=True)
    result = whole_model.parts(settings)["memory.small"]()
    assert result["bank_gib"] == 3 * 4096 * 32 * 2 / 2**30
    assert result["ours"]["peak_gib"] >= result["ours"]["kept_gib"] > result["plain_residuals"]["kept_gib"] > 0
    assert whole_model.parts(settings)["train.graph.small.ours"]()["tokens_per_s"] > 0


def test_time_limit():
    with pytest.raises(TimeoutError, match="longer than 1 s"), whole_model.time_limit(1):
        time.sleep(5)
    with whole_model.time_limit(1):
        pass


def test_the_matched_shape_is_that_of_the_peer():
    ours = size_config("base", **whole_model.MATCHED)
    peer = whole_model.KIMI_LINEAR
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "kv_lora_rank", "v_head_dim",
                 "qk_nope_head_dim", "qk_rope_head_dim", "moe_intermediate_size", "linear_num_heads",
                 "linear_head_dim", "layer_types", "mlp_layer_types"):  # fmt: skip
        assert getattr(ours, name) == peer[name], name
    assert ours.num_experts == peer["num_local_experts"]
    assert ours.num_experts_per_tok == peer["num_experts_per_tok"]
