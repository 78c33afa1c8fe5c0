# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The card says what the files say, and its metadata is what the Hub reads."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub import ModelCard

from deltalatent import KimiK3ForSequenceClassification, count_parameters
from deltalatent.training import write_model_card
from tests.testing_common import GOLDEN, tiny_config, tiny_model

STATE = {
    "global_step": 400,
    "epoch": 0.5,
    "num_input_tokens_seen": 409600,
    "train_batch_size": 4,
    "log_history": [
        {"step": 390, "loss": 4.0, "learning_rate": 1e-4, "expert_load/max_violation": 0.9},
        {"step": 400, "loss": 3.8, "learning_rate": 1e-5, "expert_load/max_violation": 0.5, "expert_load/dead": 0.0},
        {"step": 400, "eval_loss": 3.78},
    ],
}


@pytest.fixture
def folder(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    return tmp_path


def test_architecture_and_metadata(folder):
    card = ModelCard.load(write_model_card(folder, name="Tiny hybrid", license="mit", language="en", base_model="a/b"))
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["deltalatent", "kimi_k3_text"]
    assert (card.data.license, card.data.language, card.data.base_model) == ("mit", ["en"], "a/b")
    count = count_parameters(tiny_config())
    assert card.text.startswith("\n# Tiny hybrid\n")
    assert f"| parameters | {count.total:,} (text model) |" in card.text
    assert f"| active per token | {count.active:,} |" in card.text
    assert "| layers | 5: 3 delta attention (KDA), 2 latent attention (MLA) |" in card.text
    assert "| experts | 2 of 8, 1 shared |" in card.text
    for absent in ("## Training", "## Evaluation", "## Expert balance"):
        assert absent not in card.text


def test_training_balance_and_evaluation(folder):
    (folder / "trainer_state.json").write_text(json.dumps(STATE))
    card = ModelCard.load(write_model_card(folder, name="Run", datasets=["owner/texts"]))
    assert "| optimizer steps | 400 |" in card.text
    assert "| tokens seen | 409,600 |" in card.text
    assert "| last training loss | 3.8 |" in card.text
    assert "| busiest expert / mean - 1, mean over layers | 0.5 |" in card.text
    assert "| experts that no token of the step chose | 0 |" in card.text
    assert "| held-out loss (nats per token) | 3.78 |" in card.text
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_name) == (3.78, "owner/texts")
    # What the Hub requires of results: a named model, and for each a task, a data set and a metric with a value.
    (index,) = card.data.to_dict()["model-index"]
    assert index["name"] == "Run"
    assert index["results"][0]["metrics"][0]["value"] == 3.78


def test_composite(tmp_path):
    shutil.copyfile(GOLDEN / "multimodal" / "config.json", tmp_path / "config.json")
    card = ModelCard.load(write_model_card(tmp_path))
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "AutoModelForImageTextToText" in card.text


def test_reward_model(tmp_path):
    tiny_model(model_class=KimiK3ForSequenceClassification, num_labels=1).save_pretrained(tmp_path)
    card = ModelCard.load(write_model_card(tmp_path))
    assert card.data.pipeline_tag == "text-classification"
    assert "AutoModelForSequenceClassification.from_pretrained" in card.text


def test_card_is_replaced_whole(folder):
    first = write_model_card(folder).read_bytes()
    assert write_model_card(folder).read_bytes() == first
    assert {file.name for file in folder.iterdir()} == {"config.json", "README.md", ".gitattributes"}


def test_refuses_a_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"must hold a `config\.json`, got none"):
        write_model_card(tmp_path)
