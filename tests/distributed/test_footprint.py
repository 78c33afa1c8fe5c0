# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of a rank against what ranks hold and move at small size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deltalatent import count_parameters, size_config
from deltalatent.training import footprint
from tests.distributed import jobs
from tests.distributed.launch import run_ranks

ROWS, LENGTH = 2, 16
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"fsdp": {"fsdp_size": 2}, "ep": {"fsdp_size": 2, "ep_size": 2}},
    4: {"fsdp": {"fsdp_size": 4}, "fsdp_ep": {"fsdp_size": 4, "ep_size": 2}, "ep": {"fsdp_size": 4, "ep_size": 4}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    jobs.make_model().save_pretrained(path)
    return path


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_ranks_hold_and_move_what_was_planned(world_size: int, checkpoint: Path) -> None:
    ranks = run_ranks(world_size, jobs.measure_footprint, checkpoint, LAYOUTS[world_size], ROWS)
    config = jobs.load(checkpoint).config
    for name, layout in LAYOUTS[world_size].items():
        first = ranks[0][name]
        for optimizer in ("adamw", "muon"):
            plan = footprint(config, tokens=ROWS * LENGTH, optimizer=optimizer, **layout)
            assert first["parameters"] == plan.parameters
            assert first["gradients"] == plan.gradients
            assert first["optimizer"][optimizer] == plan.optimizer
            assert all(rank[name]["parameters"] <= plan.parameters for rank in ranks)
        assert first["moved"][:2] == (plan.all_gather, plan.reduce_scatter)
        # Tokens are not spread evenly over ranks, but all of them together send each to its experts and back; a rank
        # also "sends" to itself, which the plan leaves out.
        sent = sum(rank[name]["moved"][2] for rank in ranks)
        ep_size = layout.get("ep_size", 1)
        assert sent * (1 - 1 / ep_size) == pytest.approx(world_size * plan.all_to_all)


def test_one_rank_holds_everything_and_sends_nothing() -> None:
    config = size_config("tiny")
    plan = footprint(config, dtype=torch.float32)
    assert plan.parameters == 4 * count_parameters(config).total
    assert plan.optimizer == 2 * plan.parameters
    assert (plan.gathered, plan.all_gather, plan.reduce_scatter, plan.all_to_all) == (0, 0, 0, 0)
    assert plan.held == 4 * plan.parameters


def test_flops_are_six_per_active_parameter_and_token_without_a_context() -> None:
    config = size_config("release")
    plan = footprint(config, tokens=1000, context=0, fsdp_size=64, ep_size=64)
    active = count_parameters(config).active - config.vocab_size * config.hidden_size
    recurrence = 18 * 1000 * config.layer_types.count("linear_attention") * config.linear_num_heads * 128**2
    assert plan.flops == pytest.approx(6000 * active + recurrence)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_size": 4, "ep_size": 3}, "`ep_size` must divide `fsdp_size`=4 and the 8 experts, got 3"),
        ({"fsdp_size": 16, "ep_size": 16}, "`ep_size` must divide `fsdp_size`=16 and the 8 experts, got 16"),
        ({"optimizer": "sgd"}, "`optimizer` must be one of"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        footprint(size_config("tiny"), **options)
