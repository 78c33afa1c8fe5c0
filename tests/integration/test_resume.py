# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at any moment goes on as if nothing had happened; broken checkpoints are recognised.

The runs are processes that get SIGKILL, in the middle of a step or of a file, see resume_run.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from deltalatent.training import check_checkpoint, last_complete_checkpoint
from tests.integration.resume_run import FILES, KILLED_CHECKPOINT, KILLS, MOMENTS, SAVE_STEPS, STEPS

ROOT = Path(__file__).parents[2]
SIGKILL = -9


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folders of all runs, and the exit statuses of their processes."""
    folder = tmp_path_factory.mktemp("runs")
    script = ROOT / "tests" / "integration" / "resume_run.py"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, folder], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "statuses.json").read_text())


def finished(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "finished.pt", weights_only=False)


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Equal to the last bit, whatever containers the tensors and numbers are in."""
    assert type(actual) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(actual[i], value, f"{where}/{i}")
    else:
        assert actual == expected, where


def test_the_straight_run_is_worth_comparing_with(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, statuses = runs
    assert statuses["straight"] == 0
    straight = finished(folder / "straight")
    assert [entry["step"] for entry in straight["log"]] == list(range(1, STEPS + 1))
    biases = [tensor for name, tensor in straight["model"].items() if name.endswith("e_score_correction_bias")]
    assert all(bias.any() for bias in biases) and biases
    assert all(not histogram.any() for histogram in straight["histograms"])


@pytest.mark.parametrize("kill", KILLS)
def test_killed_and_resumed_run_is_the_straight_run(runs: tuple[Path, dict[str, Any]], kill: str) -> None:
    """Losses, expert loads, weights, selection bias, histograms, optimizer and schedule, to the last bit."""
    folder, statuses = runs
    assert statuses[kill] == [SIGKILL, 0]
    assert_same(finished(folder / kill), finished(folder / "straight"))


def test_run_killed_at_arbitrary_moments_is_the_straight_run(runs: tuple[Path, dict[str, Any]]) -> None:
    """The moments are times, so they differ from machine to machine; a run may even finish before one."""
    folder, statuses = runs
    assert statuses["outside"][-1] == 0
    assert_same(finished(folder / "outside"), finished(folder / "straight"))


@pytest.mark.parametrize("kill", FILES)
def test_half_written_checkpoint_is_named_and_passed_over(runs: tuple[Path, dict[str, Any]], kill: str) -> None:
    """The Trainer itself would take it; the fault named is the file that was being written."""
    left = runs[0] / "left behind" / kill
    broken = left / KILLED_CHECKPOINT
    assert get_last_checkpoint(str(left)) == str(broken)
    assert last_complete_checkpoint(left) == str(left / f"checkpoint-{SAVE_STEPS}")
    with pytest.raises(ValueError, match=rf"must be whole .* got: .*{kill} is cut short"):
        check_checkpoint(broken)


@pytest.mark.parametrize("kill", [*MOMENTS, "deleting the old one"])
def test_whole_checkpoint_is_taken(runs: tuple[Path, dict[str, Any]], kill: str) -> None:
    left = runs[0] / "left behind" / kill
    expected = left / (KILLED_CHECKPOINT if kill == "deleting the old one" else f"checkpoint-{SAVE_STEPS}")
    assert last_complete_checkpoint(str(left)) == str(expected)
    check_checkpoint(expected)


@pytest.fixture
def whole(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of a whole checkpoint."""
    return Path(shutil.copytree(runs[0] / "straight" / f"checkpoint-{STEPS}", tmp_path / f"checkpoint-{STEPS}"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", r"no weights \(model.safetensors, "),
        ("optimizer.pt", r"no optimizer \(optimizer.pt\)"),
        ("scheduler.pt", r"no scheduler \(scheduler.pt\)"),
        ("rng_state.pth", r"no random states \(rng_state\*.pth\)"),
        ("trainer_state.json", "trainer_state.json, which is written last, is missing"),
    ],
)
def test_checkpoint_without_one_of_its_files_is_refused(whole: Path, name: str, message: str) -> None:
    (whole / name).unlink()
    with pytest.raises(ValueError, match=message):
        check_checkpoint(whole)
    assert last_complete_checkpoint(whole.parent) is None


@pytest.mark.parametrize("size", [0, 7, 100])
def test_weights_cut_within_their_header_are_recognised(whole: Path, size: int) -> None:
    os.truncate(whole / "model.safetensors", size)
    with pytest.raises(ValueError, match=r"model\.safetensors is cut short"):
        check_checkpoint(whole)


def test_files_of_two_saves_are_not_taken_for_one(whole: Path) -> None:
    """Interrupted over an earlier save of the same step, each file is whole."""
    (whole / "save_in_progress").touch()
    with pytest.raises(ValueError, match="saving the model was interrupted"):
        check_checkpoint(whole)


def test_every_shard_is_looked_at(whole: Path) -> None:
    shard = whole / "model-00001-of-00002.safetensors"
    (whole / "model.safetensors").rename(shard)
    index = {"weight_map": {"a": shard.name, "b": "model-00002-of-00002.safetensors"}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"got: model-00002-of-00002\.safetensors is missing: "):
        check_checkpoint(whole)
    shutil.copy(shard, whole / "model-00002-of-00002.safetensors")
    check_checkpoint(whole)
    (whole / "model.safetensors.index.json").write_text(json.dumps(index)[:40])
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is cut short"):
        check_checkpoint(whole)


def test_sharded_fsdp_folders_need_their_metadata(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    (whole / "optimizer.pt").unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (whole / name).mkdir()
        with pytest.raises(ValueError, match=f"{name} is cut short"):
            check_checkpoint(whole)
        (whole / name / ".metadata").touch()
    check_checkpoint(whole)


def test_renamed_or_absent_folders(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"trainer_state.json is of step {STEPS}"):
        check_checkpoint(whole.rename(tmp_path / "checkpoint-9"))
    check_checkpoint((tmp_path / "checkpoint-9").rename(tmp_path / "kept"))
    with pytest.raises(ValueError, match="nowhere is no folder"):
        check_checkpoint(tmp_path / "nowhere")
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
