# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""From pictures to batches with labels, and from a model to answers, for `train_vision.py`."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from deltalatent import KimiK3Processor
from vision_data import NAME, PHOTOGRAPHS, READ, Example, words

PROMPT = "<|kimi_image_placeholder|>{task}:"


def collate(examples: list[Example], processor: KimiK3Processor) -> dict[str, torch.Tensor]:
    """Prompts with their answers; only the answers, which stand at the end of their rows, are labels."""
    answers = [example.answer + processor.tokenizer.eos_token for example in examples]
    texts = [PROMPT.format(task=example.task) + answer for example, answer in zip(examples, answers, strict=True)]
    batch = processor(images=[example.image for example in examples], text=texts, padding=True, return_tensors="pt")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, example in enumerate(examples):
        labels[row, -len(example.answer) - 1 :] = batch["input_ids"][row, -len(example.answer) - 1 :]
    return {**batch, "labels": labels}


@torch.no_grad()
def predict(model: Any, processor: KimiK3Processor, examples: list[Example], batch_size: int = 96) -> list[str]:
    """What the model writes under each picture."""
    answers: list[str] = []
    for start in range(0, len(examples), batch_size):
        part = examples[start : start + batch_size]
        texts = [PROMPT.format(task=example.task) for example in part]
        inputs = processor(images=[e.image for e in part], text=texts, padding=True, return_tensors="pt")
        written = model.generate(**inputs.to(model.device), max_new_tokens=18, do_sample=False)
        answers += processor.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def accuracy(examples: list[Example], answers: list[str], task: str) -> float:
    """The fraction of a task's pictures whose answer is exactly right."""
    right = [given == example.answer for example, given in zip(examples, answers, strict=True) if example.task == task]
    return sum(right) / len(right)


def letter_accuracy(examples: list[Example], answers: list[str]) -> float:
    """The fraction of the letters to read that stand in the answers at their own place."""
    read = [(e.answer, given) for e, given in zip(examples, answers, strict=True) if e.task == READ]
    right = [given[i : i + 1] == letter for answer, given in read for i, letter in enumerate(answer)]
    return sum(right) / len(right)


def figures(examples: list[Example], answers: list[str]) -> dict[str, float]:
    """What fraction is right, and what would be without a look at the pictures.

    By chance is: a guess among the held-out words, their commonest letter, a guess among the photographs.
    """
    letters = "".join(words()[1])
    return {
        "held_out_words_read": accuracy(examples, answers, READ),
        "words_by_chance": 1 / len(words()[1]),
        "held_out_letters_read": letter_accuracy(examples, answers),
        "letters_by_chance": max(letters.count(letter) for letter in letters) / len(letters),
        "held_out_photographs_named": accuracy(examples, answers, NAME),
        "photographs_by_chance": 1 / len(PHOTOGRAPHS),
    }


def draw(examples: list[Example], answers: list[str], path: Path) -> None:
    """Pictures with what the model wrote, and behind a cross what would have been right."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, example, given in zip(figure.subplots(4, 6).flat, examples, answers, strict=False):
        axes.imshow(example.image)
        is_right = given == example.answer
        given = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in given)
        title = given if is_right else f"{given} \u2717 {example.answer}"
        axes.set_title(title, color="darkgreen" if is_right else "firebrick", fontsize=10)
        axes.set_axis_off()
    figure.savefig(path, dpi=110)
