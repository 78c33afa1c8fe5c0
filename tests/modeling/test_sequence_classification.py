# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward models and classifiers: loaded from language models, and as deaf to padding as these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from deltalatent import KimiK3ForCausalLM, KimiK3ForSequenceClassification, KimiK3TextModel
from tests.equivalence import EXACT
from tests.testing_common import assert_close, left_padded, random_ids, tiny_model
from tests.vision.vision_testing import tiny_multimodal_model


def exact_classifier(num_labels: int = 3) -> KimiK3ForSequenceClassification:
    model = tiny_model(model_class=KimiK3ForSequenceClassification, num_labels=num_labels).double()
    model.set_experts_implementation("batched_mm")
    return model


@torch.no_grad()
def test_scores_are_those_of_the_last_token_wherever_the_padding_is() -> None:
    model = exact_classifier()
    rows = [random_ids(model.config, 1, length, seed=length)[0] for length in (9, 5, 1)]
    expected = torch.cat([model.score(model.model(row[None]).last_hidden_state[:, -1]) for row in rows])
    mirrored = left_padded([row.flip(0) for row in rows])
    for ids, mask in (left_padded(rows), tuple(x.flip(1) for x in mirrored)):
        assert_close(model(ids, attention_mask=mask).logits, expected, EXACT)


@pytest.mark.parametrize("variant", ["default", "tied_embeddings"])
def test_starts_as_a_language_model(variant: str, tmp_path: Path) -> None:
    """Only the head is new."""
    language_model = tiny_model(variant)
    language_model.save_pretrained(tmp_path / "language")
    model, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "language", num_labels=1, output_loading_info=True
    )
    assert type(model) is KimiK3ForSequenceClassification
    assert info["missing_keys"] == {"score.weight"} and not info["unexpected_keys"]
    assert model.score.weight.shape == (1, 32)
    assert 0 < model.score.weight.std() < 2 * model.config.initializer_range
    ids = random_ids(model.config)
    hidden = language_model.model(ids).last_hidden_state
    assert_close(model.model(ids).last_hidden_state, hidden)

    model.save_pretrained(tmp_path / "reward")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert again.config.num_labels == 1
    assert torch.equal(again.score.weight, model.score.weight)
    assert_close(again(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path / "reward")
    assert type(base) is KimiK3TextModel
    assert_close(base(ids).last_hidden_state, hidden)


def test_nothing_but_the_head_may_be_missing(tmp_path: Path) -> None:
    language_model = tiny_model()
    tensors = {name: x for name, x in language_model.state_dict().items() if name != "model.norm.weight"}
    language_model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(ValueError, match=r"must hold every tensor of KimiK3ForSequenceClassification.*model\.norm"):
        KimiK3ForSequenceClassification.from_pretrained(tmp_path)
    tiny_model(model_class=KimiK3ForSequenceClassification).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must hold every tensor of KimiK3ForCausalLM, got none for lm_head"):
        KimiK3ForCausalLM.from_pretrained(tmp_path)


def test_text_part_of_a_composite_checkpoint(tmp_path: Path) -> None:
    multimodal = tiny_multimodal_model()
    multimodal.save_pretrained(tmp_path)
    model = KimiK3ForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    ids = random_ids(model.config)
    assert model(ids).logits.shape == (2, 1)
    expected = multimodal.model.language_model(ids).last_hidden_state
    assert_close(model.model(ids).last_hidden_state, expected)


def test_a_training_step_as_a_reward_model() -> None:
    """Numbers as labels, every parameter gets a gradient, and balancing counts."""
    model = tiny_model(model_class=KimiK3ForSequenceClassification, num_labels=1).train()
    model.activation_checkpointing_enable()
    labels = torch.tensor([0.5, -1.0])
    output = model(random_ids(model.config), labels=labels)
    assert_close(output.loss, (output.logits[:, 0] - labels).square().mean())
    output.loss.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert model.model.layers[1].mlp.gate.balance.counts.sum() > 0


def test_a_batch_needs_a_padding_token() -> None:
    model = tiny_model(model_class=KimiK3ForSequenceClassification, pad_token_id=None)
    ids = random_ids(model.config)
    assert model(ids[:1]).logits.shape == (1, 2)
    with pytest.raises(ValueError, match="no padding token is defined"):
        model(ids)
