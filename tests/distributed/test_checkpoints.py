# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks: one whole file in the released layout, and parts for another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import jobs
from tests.distributed.launch import run_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    jobs.make_model(kda_a_log_length=128).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("saved")
    run_ranks(2, jobs.save_everything, checkpoint, target)
    return target


@pytest.fixture(scope="module")
def after_three_steps(checkpoint: Path) -> dict[str, torch.Tensor]:
    model = jobs.load(checkpoint)
    jobs.train(model, jobs.muon(model), steps=3)
    return jobs.weights(model)


def test_ranks_write_the_file_that_one_process_writes(checkpoint: Path, saved: Path) -> None:
    expected, found = (load_file(folder / "model.safetensors") for folder in (checkpoint, saved / "untrained"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert (saved / "untrained" / "config.json").read_text() == (checkpoint / "config.json").read_text()


def test_one_process_goes_on_from_a_whole_checkpoint(checkpoint: Path, saved: Path) -> None:
    model = jobs.load(checkpoint)
    jobs.train(model, jobs.muon(model), steps=2)
    restored = jobs.load(saved / "whole")
    jobs.assert_weights_equal(jobs.weights(restored), jobs.weights(model))
    for expected, found in zip(jobs.biases(model), jobs.biases(restored), strict=True):
        assert jobs.max_difference(expected, found) < 2.5e-3  # a bin of the histogram


@pytest.mark.parametrize(("world_size", "layout"), [(4, "fsdp_ep"), (2, "fsdp")])
def test_another_number_of_ranks_goes_on_from_parts(world_size, layout, saved, after_three_steps) -> None:
    """Two ranks with expert parallelism wrote; weights, momenta and selection bias are as in an unbroken run."""
    for found in run_ranks(world_size, jobs.resume, saved, layout):
        jobs.assert_weights_equal(found["weights"], after_three_steps)


def test_one_process_goes_on_from_parts(saved: Path, after_three_steps: dict[str, torch.Tensor]) -> None:
    (found,) = run_ranks(1, jobs.resume, saved, "one")
    jobs.assert_weights_equal(found["weights"], after_three_steps)


@pytest.mark.parametrize(("world_size", "names"), [(2, ("fsdp", "ep", "tp")), (4, ("fsdp_ep", "hsdp"))])
def test_muon_steps_shards_as_it_steps_whole_matrices(world_size, names, checkpoint, after_three_steps) -> None:
    found = run_ranks(world_size, jobs.train_with_muon, checkpoint, names)[0]
    assert found.keys() == set(names)
    for weights in found.values():
        jobs.assert_weights_equal(weights, after_three_steps)


def test_groups_do_not_span_meshes(checkpoint: Path) -> None:
    model = jobs.load(checkpoint)
    jobs.train(model, torch.optim.AdamW(jobs.parameter_groups(model), lr=1e-3), steps=2)
    for found in run_ranks(2, jobs.train_with_adamw, checkpoint):
        jobs.assert_weights_equal(found, jobs.weights(model))
