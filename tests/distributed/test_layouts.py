# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Several processes do what one does: losses, gradients, their norm, and the balancing, for every declared plan.

The ranks see rows of different length, one of them nothing but padding (with four ranks).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deltalatent import KimiK3ForCausalLM
from deltalatent.modeling.latent_moe import KimiK3SparseMoE
from tests.distributed import jobs
from tests.distributed.launch import run_ranks

TWO = ("ddp", "fsdp", "ep", "tp", "tp_ep")
FOUR = ("ep4", "fsdp_ep", "hsdp", "fsdp_tp_ep")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    # A padded `A_log`, as released: a rank's share of the heads is not its share of what is stored.
    jobs.make_model(kda_a_log_length=128).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def one_process(checkpoint: Path) -> dict[str, Any]:
    model = jobs.load(checkpoint)
    return jobs.train(model, jobs.sgd(model))


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Path) -> list[dict[str, Any]]:
    return run_ranks(2, jobs.train_layouts, checkpoint, TWO)


@pytest.fixture(scope="module")
def four_ranks(checkpoint: Path) -> list[dict[str, Any]]:
    return run_ranks(4, jobs.train_layouts, checkpoint, FOUR)


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_ranks_do_what_one_process_does(layout: str, one_process: dict[str, Any], request) -> None:
    ranks = request.getfixturevalue("two_ranks" if layout in TWO else "four_ranks")
    found = ranks[0][layout]
    for step in range(jobs.STEPS):
        assert found["losses"][step] == pytest.approx(one_process["losses"][step], rel=1e-5)
        expected = one_process["gradients"][step]
        assert found["gradients"][step].keys() == expected.keys()
        for name, gradient in expected.items():  # all of them together have norm 1
            torch.testing.assert_close(
                found["gradients"][step][name], gradient, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        for rank in ranks:
            assert rank[layout]["norms"][step] == pytest.approx(one_process["norms"][step], rel=1e-4)
            # Whole counts make the bias; one that moves by rounding over the edge of a bin moves the bias by a bin.
            assert torch.equal(rank[layout]["biases"][step], ranks[0][layout]["biases"][step])
            assert jobs.max_difference(rank[layout]["biases"][step], one_process["biases"][step]) < 2.5e-3


def test_one_process_moves_everything_that_is_compared(one_process: dict[str, Any]) -> None:
    assert one_process["losses"][-1] < one_process["losses"][0]
    still = [name for name, gradient in one_process["gradients"][0].items() if not gradient.any()]
    assert all("layers.0.self_attention_res_" in name for name in still)  # it chooses among one source
    assert (one_process["biases"][0] != one_process["biases"][-1]).any()


def test_a_rank_reads_its_own_experts_only(checkpoint: Path) -> None:
    """Of each expert tensor a rank of two gets half of the bytes, whatever the order in the file."""
    model = jobs.load(checkpoint)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    others = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name)
    for read in run_ranks(2, jobs.count_what_is_read, checkpoint):
        assert read["experts"] == experts // 2
        assert read["largest_expert"] == model.config.moe_intermediate_size * model.config.routed_expert_hidden_size
        assert read["held"] == experts // 2 + read["held_others"]
        assert read["held_others"] == pytest.approx(others / 2, rel=0.01)  # a row does not split


def test_no_more_groups_than_dtypes_and_meshes_ask_for(checkpoint: Path) -> None:
    """Each group is a collective in forward, two in backward and half a dozen hooks: of MLA layers there is one."""
    groups, _ = run_ranks(2, jobs.groups_of_fsdp, checkpoint)
    expected = {"", "model.embed_tokens", "model.norm"}  # the head goes with the norm before it
    for number, layer in enumerate(jobs.load(checkpoint).model.layers):
        expected.add(name := f"model.layers.{number}")
        if layer.layer_type == "linear_attention":
            expected |= {f"{name}.self_attn", f"{name}.self_attn.q_proj"}  # float32, and the linear maps
        if isinstance(layer.mlp, KimiK3SparseMoE):
            expected |= {f"{name}.mlp.gate", f"{name}.mlp.experts"}
    assert {names[0] for names in groups} == expected
    assert len(groups) == len(expected)


def test_pipeline_stages_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"`pp_size` must be 1, got 2: .* use `fsdp_size` and `ep_size`"):
        KimiK3ForCausalLM.from_pretrained(checkpoint, distributed_config={"pp_size": 2})
