# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The example that learns to read and to name: its pictures are honest, and the whole job runs at tiny scale."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import train_vision
import vision_data
from deltalatent import KimiK3ForConditionalGeneration, KimiK3Processor
from vision_data import (
    HELD_OUT_PART,
    NAME,
    PHOTOGRAPHS,
    PITCH,
    READ,
    TRAINED_PART,
    Example,
    Pictures,
    photographs,
    words,
)
from vision_prompts import collate, figures


def test_held_out_words_are_never_drawn_in_training() -> None:
    """Nor parts of them that are whole words: what is held out is not the answer of any picture."""
    trained, held_out = words()
    assert len(trained) > 300 and len(held_out) > 40
    assert not set(trained) & set(held_out)
    drawn = {
        example.answer for example in (Pictures(600, held_out=False)[i] for i in range(600)) if example.task == READ
    }
    asked = {
        example.answer for example in (Pictures(300, held_out=True)[i] for i in range(300)) if example.task == READ
    }
    assert asked <= set(held_out) and len(asked) > 30
    assert not drawn & set(held_out)


def test_each_letter_stands_at_its_own_place() -> None:
    """Another third letter changes the picture there and nowhere else, in every font and size."""
    for seed in range(30):
        first, second = (
            np.asarray(vision_data.drawn(word, TRAINED_PART, vision_data.random.Random(seed)))
            for word in ("main", "malt")
        )
        changed = np.flatnonzero((first != second).any(axis=(0, 2)))
        assert changed.min() >= 1.8 * PITCH and len(changed) > 10


def test_held_out_parts_of_photographs_are_never_seen_in_training() -> None:
    assert len(photographs()) == len(PHOTOGRAPHS) == 16
    assert TRAINED_PART[1] < HELD_OUT_PART[0]
    for image in photographs().values():
        ramp = np.broadcast_to(np.linspace(0, 255, image.width).astype(np.uint8)[None, :, None], (300, image.width, 3))
        flat = vision_data.Image.fromarray(ramp.copy())
        for part in (TRAINED_PART, HELD_OUT_PART):
            for size in ((48, 48), (96, 32)):
                pieces = [vision_data.piece(flat, part, size, vision_data.random.Random(i)) for i in range(20)]
                values = np.concatenate([np.asarray(piece).ravel() for piece in pieces]) / 255
                assert part[0] - 0.01 <= values.min() <= values.max() <= part[1] + 0.01


def test_examples_are_the_same_in_every_run() -> None:
    first, second, other = (Pictures(9, held_out=False, seed=seed) for seed in (0, 0, 1))
    for i in range(9):
        assert first[i].image.tobytes() == second[i].image.tobytes() and first[i][1:] == second[i][1:]
        assert first[i].task == (NAME if i % 3 == 2 else READ)
    assert [first[i].answer for i in range(9)] != [other[i].answer for i in range(9)]


def test_missing_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    photographs.cache_clear()
    monkeypatch.setattr(vision_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Expected skimage for its photographs, found none: pip install"):
        photographs()


def test_labels_are_the_answers() -> None:
    processor = train_vision.make_processor()
    examples = [Pictures(6, held_out=False)[i] for i in range(6)]
    batch = collate(examples, processor)
    for row, example in enumerate(examples):
        labels = batch["labels"][row]
        assert processor.decode(labels[labels != -100]) == example.answer + "<|end|>"
        assert torch.equal(labels[labels != -100], batch["input_ids"][row][labels != -100])


def test_figures() -> None:
    """A word counts if all of it is right, a letter if it stands at its place."""
    image = vision_data.Image.new("RGB", (64, 32))
    right = [("for", READ), ("work", READ), ("coins", NAME), ("grass", NAME)]
    examples = [Example(image, task, answer) for answer, task in right]
    got = figures(examples, ["for", "worn again", "coins", "bricks"])
    assert (got["held_out_words_read"], got["held_out_letters_read"], got["held_out_photographs_named"]) == (
        1 / 2,
        6 / 7,
        1 / 2,
    )
    assert figures(examples, ["", "ork", "", "grass "])["held_out_letters_read"] == 0
    assert figures(examples, ["", "ork", "", "grass "])["held_out_photographs_named"] == 0
    held_out = words()[1]
    assert got["words_by_chance"] == 1 / len(held_out) and got["photographs_by_chance"] == 1 / 16
    assert got["letters_by_chance"] == max(
        "".join(held_out).count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"
    ) / sum(map(len, held_out))


def test_muon_steps_every_linear_map_of_the_layers() -> None:
    """Those of the tower and of the projector too; each parameter once."""
    model = train_vision.make_model(train_vision.make_processor())
    groups = train_vision.make_optimizer(model, train_vision.VisionArguments()).param_groups
    by_muon = {id(weight) for group in groups if group["algorithm"] == "muon" for weight in group["params"]}
    of_all = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(of_all) == sorted(id(weight) for weight in model.parameters())
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert (id(module.weight) in by_muon) == (name != "lm_head"), name


@pytest.mark.parametrize("logging_steps", [1, 4], ids=["logged", "shorter than the log's step"])
def test_whole_job_at_tiny_scale(logging_steps: int, tmp_path: Path) -> None:
    flags = (
        "--max_steps 3 --per_device_train_batch_size 4 --held_out_pictures 12 --disable_tqdm true "
        f"--logging_steps {logging_steps}"
    )
    summary = train_vision.main([*flags.split(), "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["pictures_seen"] == 12
    assert (summary["training_loss"] is None) == (logging_steps > 3)
    for key in ("held_out_words_read", "held_out_letters_read", "held_out_photographs_named"):
        assert 0 <= summary[key] <= 1
    assert (tmp_path / "predictions.png").stat().st_size > 10_000
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path)) is KimiK3ForConditionalGeneration
    assert type(AutoProcessor.from_pretrained(tmp_path)) is KimiK3Processor


def test_one_batch_is_learnt() -> None:
    """Gradients of the whole model are of use: four pictures are half known after twelve steps."""
    torch.manual_seed(0)
    processor = train_vision.make_processor()
    model = train_vision.make_model(processor).train()
    batch = collate([Pictures(4, held_out=False)[i] for i in range(4)], processor)
    optimizer = train_vision.make_optimizer(model, train_vision.VisionArguments())
    losses = []
    for _ in range(12):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
