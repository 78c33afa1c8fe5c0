# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The main job end to end at tiny scale: it learns, repeats exactly, resumes exactly, and reports what it did."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import corpus
import generate
import train_quickstart
from tests.integration.quickstart_run import (
    BATCH,
    BLOCK,
    HELD_OUT,
    MAX_BYTES,
    STEPS,
    TEXTS,
    VOCABULARY,
    run_quickstart,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict]:
    output = tmp_path_factory.mktemp("quickstart")
    return output, run_quickstart(output)


def test_run_leaves_model_tokenizer_summary_and_plot(finished):
    output, summary = finished
    assert json.loads((output / "summary.json").read_text()) == summary
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert summary["steps"] == STEPS
    assert summary["tokens_seen"] == STEPS * BATCH * BLOCK
    assert summary["tokens_per_second"] > 0
    assert summary["weights_sha256"] == summary["weights_sha256_reloaded"]
    for key in ("training_loss", "held_out_loss", "held_out_loss_unigram"):
        assert 0 < summary[key] < 2 * math.log(VOCABULARY)
    for key in ("max_violation", "cv", "dead"):
        assert math.isfinite(summary[f"expert_load/{key}"])
    for prompt, text in zip(train_quickstart.PROMPTS, summary["continuations"], strict=True):
        assert text.startswith(prompt) and len(text) > len(prompt)


def test_held_out_loss_is_that_of_the_saved_model(finished):
    """Recomputes the loss from the saved files alone, token by token of the same held-out documents."""
    output, summary = finished
    documents = corpus.load_documents(TEXTS, max_bytes=MAX_BYTES)
    held_out = documents.train_test_split(test_size=HELD_OUT, shuffle=False)["test"]
    held_out = corpus.pack(held_out, AutoTokenizer.from_pretrained(output), BLOCK)
    model = AutoModelForCausalLM.from_pretrained(output).eval()
    ids = torch.tensor(held_out["input_ids"][:])
    with torch.no_grad():
        log_probabilities = model(input_ids=ids).logits.double().log_softmax(-1)
    loss = -log_probabilities[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    # Means of about a thousand float32 terms: 1e-5 is some twenty roundings.
    assert summary["held_out_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_same_seed_repeats_bit_for_bit(finished, tmp_path):
    _, first = finished
    second = run_quickstart(tmp_path)
    for key in ("weights_sha256", "training_loss", "held_out_loss", "expert_load/cv", "continuations"):
        assert second[key] == first[key], key


def test_other_seed_gives_another_model(finished, tmp_path):
    assert run_quickstart(tmp_path, "--seed", "1")["weights_sha256"] != finished[1]["weights_sha256"]


def test_resumed_run_equals_uninterrupted_run(finished, tmp_path):
    output, whole = finished
    resumed = run_quickstart(tmp_path, "--resume_from_checkpoint", str(output / f"checkpoint-{STEPS // 2}"))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["held_out_loss"] == whole["held_out_loss"]


def test_resume_true_takes_the_newest_checkpoint(tmp_path):
    run_quickstart(tmp_path, "--max_steps", str(STEPS // 2))
    assert run_quickstart(tmp_path, "--resume_from_checkpoint", "true")["steps"] == STEPS


def test_any_trainer_argument_is_accepted(tmp_path):
    summary = run_quickstart(
        tmp_path, "--max_steps", "2", "--gradient_accumulation_steps", "3", "--lr_scheduler_type", "linear",
        "--activation_checkpointing", "true", "--warmup_steps", "1", "--save_strategy", "no",
    )  # fmt: skip
    assert summary["steps"] == 2
    assert summary["tokens_seen"] == 2 * 3 * BATCH * BLOCK


def test_learns_more_than_token_frequencies(tmp_path):
    """Documents of counting words: a model that reads its context predicts them, a unigram model cannot."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(" ".join(words[(number * 7 + i) % 10] for i in range(60 + number)))
    summary = run_quickstart(
        tmp_path / "out", "--data", str(texts), "--max_steps", "60", "--warmup_steps", "5", "--learning_rate", "1e-2",
        "--save_strategy", "no",
    )  # fmt: skip
    # log(10) = 2.3 nats is the unigram model's loss if every word is one token.
    assert summary["held_out_loss"] < 0.5 * summary["held_out_loss_unigram"]


def test_missing_device_is_refused():
    with pytest.raises(ValueError, match=r"`--device xpu` is not available: pass `--device (cpu|cuda|mps)`"):
        train_quickstart.main(["--device", "xpu"])


def test_every_flag_has_a_help_text():
    own = {f.name: f for f in dataclasses.fields(train_quickstart.QuickstartArguments)}
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert len(own.keys() - inherited) >= 11
    assert [name for name, f in own.items() if not f.metadata.get("help")] == []


def test_generate_example_continues_prompts_of_different_length_as_if_alone(finished, capsys):
    folder = str(finished[0])
    flags = ["--temperature", "0", "--max_new_tokens", "8"]
    prompts = ["import", "def close(self):\n    return self", "The"]
    together = generate.main([folder, *prompts, *flags])
    assert all(text in capsys.readouterr().out for text in together[:1])
    assert together == [generate.main([folder, prompt, *flags])[0] for prompt in prompts]


def test_generate_example_streams_the_same_text(finished, capsys):
    folder = str(finished[0])
    (text,) = generate.main([folder, "import", "--stream", "--max_new_tokens", "8"])
    assert text in capsys.readouterr().out
    with pytest.raises(SystemExit):
        generate.main([folder, "a", "b", "--stream"])
    assert "--stream takes one prompt, got 2" in capsys.readouterr().err


@pytest.fixture
def text_folder(tmp_path) -> Path:
    for name in ("c.txt", "a.py", "b/d.md", "b/e.rst"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text of {name}\n" * 20)
    (tmp_path / "copy.txt").write_text((tmp_path / "a.py").read_text())
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_documents_do_not_depend_on_file_names_and_drop_copies(text_folder):
    before = corpus.load_documents(str(text_folder))["text"][:]
    (text_folder / "c.txt").rename(text_folder / "0.txt")
    assert corpus.load_documents(str(text_folder))["text"][:] == before
    assert len(before) == 4


def test_documents_stay_below_max_bytes(text_folder):
    whole = corpus.load_documents(str(text_folder))["text"][:]
    budget = sum(map(len, whole[:3]))
    assert corpus.load_documents(str(text_folder), max_bytes=budget)["text"][:] == whole[:3]
    with pytest.raises(ValueError, match=r"at least two documents .* got 1"):
        corpus.load_documents(str(text_folder), max_bytes=budget - len(whole[1]) - len(whole[2]))


def test_documents_from_a_data_set(tmp_path):
    rows = [f"row {i}" for i in range(20)]
    datasets.Dataset.from_dict({"content": rows, "id": list(range(20))}).to_json(tmp_path / "train.jsonl")
    documents = corpus.load_documents(str(tmp_path), column="content")
    assert documents.column_names == ["text"]
    assert sorted(documents["text"]) == sorted(rows)
    with pytest.raises(ValueError, match=r"`--text_column` must be one of \['content', 'id'\], got 'text'"):
        corpus.load_documents(str(tmp_path))


def test_standard_library_text_is_code_and_prose_and_stable():
    documents = corpus.load_documents(None)["text"][:]
    assert documents == corpus.load_documents(None)["text"][:]
    assert len(documents) == len(set(documents)) > 400
    assert any("class JSONDecoder" in text for text in documents)
    assert any('The "with" statement' in text and "import " not in text[:200] for text in documents)
    assert not any("build_time_vars" in text for text in documents if text.startswith("# system configuration"))


@pytest.fixture(scope="module")
def small_tokenizer():
    text = "def f(x):\n    return x + 1\n" * 50
    return corpus.train_tokenizer(datasets.Dataset.from_dict({"text": [text]}), vocab_size=300)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_tokenizer_round_trips_any_text(small_tokenizer, text):
    ids = small_tokenizer(text)["input_ids"]
    assert small_tokenizer.decode(ids) == text
    assert max(ids, default=0) < len(small_tokenizer)


def test_tokenizer_training_is_repeatable_and_saved(small_tokenizer, tmp_path):
    small_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def g(y):\n    return y"
    assert loaded(text)["input_ids"] == small_tokenizer(text)["input_ids"]
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (0, 1, "left")


def test_pack_joins_documents_with_end_of_text(small_tokenizer):
    documents = datasets.Dataset.from_dict({"text": ["return", "x + 1", "def"]})
    stream = [i for text in documents["text"] for i in (*small_tokenizer(text)["input_ids"], 0)]
    packed = corpus.pack(documents, small_tokenizer, block_size=3)
    assert list(itertools.chain(*packed["input_ids"])) == stream[: len(stream) // 3 * 3]
    assert packed["labels"][:] == packed["input_ids"][:]
    with pytest.raises(ValueError, match=r"fills no block of 100 tokens: lower `--block_size`"):
        corpus.pack(documents, small_tokenizer, block_size=100)


def test_unigram_loss_by_hand():
    train = datasets.Dataset.from_dict({"input_ids": [[0, 0, 1], [0, 2, 0]]})
    held_out = datasets.Dataset.from_dict({"input_ids": [[3, 0, 1], [1, 2, 3]]})
    # Counts with one added: 0 -> 5, 1 -> 2, 2 -> 2, 3 -> 1, of 10; the first token of each block is not predicted.
    expected = -np.mean(np.log([0.5, 0.2, 0.2, 0.1]))
    assert corpus.unigram_loss(train, held_out, vocab_size=4) == pytest.approx(expected, abs=1e-12)
