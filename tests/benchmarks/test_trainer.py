# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of trainers times the steps after the warm-up together, and needs a GPU."""

import json
import time

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from benchmarks import trainer


def test_what_is_timed_begins_after_the_warm_up(monkeypatch, tmp_path):
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(state.global_step))
    monkeypatch.setattr(time, "perf_counter", lambda: float(state.global_step))
    state = TrainerState(max_steps=trainer.UNTIMED + 4)
    timer = trainer.StepTimer()
    for step in range(1, state.max_steps + 1):
        state.global_step = step
        timer.on_step_end(TrainingArguments(output_dir=str(tmp_path)), state, TrainerControl())
    assert waits == timer.marks == [trainer.UNTIMED, state.max_steps]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="need a CUDA GPU"):
        trainer.main([])


def test_of_several_gpus_one_must_be_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="got 2: set CUDA_VISIBLE_DEVICES"):
        trainer.main([])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs a process that sees one GPU")
def test_both_trainers_on_a_gpu(tmp_path):
    out = tmp_path / "trainer.json"
    trainer.main(["--size", "tiny", "--rows", "1", "--tokens", "64", "--steps", "2", "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert [(result["trainer"], result["variant"]) for result in results] == [
        ("Trainer", "ours"),
        ("CudaGraphTrainer", "ours"),
    ]
    for result in results:
        assert result["tokens_per_s"] == pytest.approx(64e3 / result["step_ms"])
