# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/scaling.py`: what fails does not take what was found with it, and skewed routing is skewed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import scaling
from deltalatent import KimiK3ForCausalLM, size_config
from tests.distributed import jobs
from tests.distributed.launch import run_ranks


def test_measurements_stand_for_themselves(tmp_path: Path) -> None:
    KimiK3ForCausalLM(size_config("tiny")).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    results, _ = run_ranks(2, jobs.scaling_benchmark, tmp_path)

    failed = results["first"]["failing"]
    assert failed["found"] == 1
    assert "ValueError: for the test" in failed["error"]

    speed = results["first"]["speed"]
    assert "error" not in speed
    batch = speed["128 tokens per GPU"]
    assert batch["tokens_per_s"] == 2 * 128  # of both ranks, in the second that the test says a step takes
    assert batch["tokens_of_first_rank"] == pytest.approx(0.5, abs=0.05)
    assert batch["skewed"]["tokens_of_first_rank"] == 1.0
    assert (
        sum(speed["parameter_bytes"]) == 2 * KimiK3ForCausalLM(size_config("tiny")).num_parameters() + float32_bytes()
    )

    assert results["second"]["failing"] == {"found": 2}
    assert results["second"]["speed"] == speed
    assert results["second"]["late"] == {"error": "not started: out of time"}
    assert json.loads((tmp_path / "scaling-many.json").read_text())["results"]["speed"] == speed


def float32_bytes() -> int:
    """What tensors that stay float32 take beyond two bytes per value."""
    model = KimiK3ForCausalLM(size_config("tiny")).to(torch.bfloat16)
    return sum(2 * p.numel() for p in model.parameters() if p.dtype == torch.float32)


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0.0), ([(0, 1), (3, 5)], 3.0), ([(2, 4), (0, 3)], 4.0), ([(0, 10), (1, 2), (9, 11)], 11.0)],
)
def test_time_that_kernels_share_counts_once(spans: list[tuple[float, float]], length: float) -> None:
    assert scaling._union(spans) == length
