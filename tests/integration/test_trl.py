# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""TRL computes on our model what it says: packed conversations are separate ones, references are the base model.

Public report behind the second half: S48.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from corpus import train_tokenizer
from deltalatent import KimiK3ForCausalLM, lora_targets
from deltalatent.training import QuantileBalancingCallback, balanced_routers, freeze_selection_bias
from instructions import CHAT_TEMPLATE, load_instructions, load_preferences
from tests.testing_common import tiny_model

trl = pytest.importorskip("trl")

VOCABULARY = 320
QUIET = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    texts = [message["content"] for row in load_instructions(limit=100) for message in row["messages"]]
    tokenizer = train_tokenizer(datasets.Dataset.from_dict({"text": texts}), VOCABULARY)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model() -> KimiK3ForCausalLM:
    return tiny_model(vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=1, bos_token_id=None)


def answer_log_probabilities(model: KimiK3ForCausalLM, tokenizer: Any, messages: list[dict[str, str]]) -> Tensor:
    """Log-probability of every token that the assistant says, from the conversation alone, float64."""
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, spoken = torch.tensor([encoded["input_ids"]]), torch.tensor(encoded["assistant_masks"]).bool()
    with torch.no_grad():
        every = model(ids).logits.double().log_softmax(-1)
    return every[0, :-1].gather(-1, ids[0, 1:, None])[:, 0][spoken[1:]]


def short_conversations(tokenizer: Any) -> datasets.Dataset:
    """A dozen that fill four rows of 256 tokens at most: longer ones would be cut, and differ with Python's texts."""
    every = load_instructions(limit=100)
    lengths = [len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]) for row in every]
    return every.select([i for i, length in enumerate(lengths) if length <= 64][:12])


def sft_trainer(folder: Path, tokenizer: Any, conversations: datasets.Dataset, **fields: Any) -> Any:
    arguments = {"packing": True, "assistant_only_loss": True, "max_length": 256}
    return trl.SFTTrainer(
        model(),
        trl.SFTConfig(output_dir=str(folder), **(QUIET | arguments | fields)),
        train_dataset=conversations,
        eval_dataset=conversations,
        processing_class=tokenizer,
        callbacks=[QuantileBalancingCallback()],
    )


def test_packed_sft_loss_is_that_of_the_separate_answers(tokenizer: Any, tmp_path: Path) -> None:
    conversations = short_conversations(tokenizer)
    run = sft_trainer(tmp_path, tokenizer, conversations)
    lengths = [len(row["input_ids"]) for row in run.eval_dataset]
    assert len(lengths) < len(conversations) / 2  # they are packed
    scores = [answer_log_probabilities(model(), tokenizer, row["messages"]) for row in conversations]
    # Losses of batches are averaged with the weights of their rows: let one batch hold all of them.
    run.args.per_device_eval_batch_size = len(lengths)
    assert run.evaluate()["eval_loss"] == pytest.approx(-torch.cat(scores).mean().item(), rel=1e-5)


def test_sft_step_counts_every_token_and_logs_the_load(tokenizer: Any, tmp_path: Path) -> None:
    """With recomputation, TRL's default, each token is still counted once."""
    conversations = short_conversations(tokenizer)
    run = sft_trainer(
        tmp_path,
        tokenizer,
        conversations,
        gradient_checkpointing=True,
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    tokens = sum(len(row["input_ids"]) for row in run.train_dataset)
    assert len(run.train_dataset) <= 4  # so one step sees them all
    run.train()
    (callback,) = [one for one in run.callback_handler.callbacks if isinstance(one, QuantileBalancingCallback)]
    assert callback.last_report.tokens.tolist() == [tokens] * 4
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert logged[0]["expert_load/max_violation"] > 0


def test_dpo_starts_at_the_reference_and_moves_towards_what_was_chosen(tokenizer: Any, tmp_path: Path) -> None:
    policy = model()
    freeze_selection_bias(policy)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    preferences = load_preferences(limit=4)
    arguments = {"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 4}
    run = trl.DPOTrainer(
        policy,
        args=trl.DPOConfig(output_dir=str(tmp_path), **(QUIET | arguments)),
        train_dataset=preferences,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **lora_targets(policy.config)),
    )
    assert run.ref_model is None  # the adapters are switched off instead
    run.train()
    logged = [entry for entry in run.state.log_history if "rewards/margins" in entry]
    assert logged[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    expected = [answer_log_probabilities(model(), tokenizer, row["prompt"] + row["chosen"]) for row in preferences]
    assert logged[0]["logps/chosen"] == pytest.approx(torch.stack([x.sum() for x in expected]).mean().item(), rel=1e-5)
    assert logged[-1]["rewards/margins"] > logged[1]["rewards/margins"] > 0
    for name, tensor in run.model.named_parameters():
        base = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert "lora_" in name or torch.equal(tensor, before[base]), name
    biases = [router.e_score_correction_bias for _, router in balanced_routers(run.model)]
    expected_biases = [tensor for name, tensor in before.items() if name.endswith("e_score_correction_bias")]
    assert all(map(torch.equal, biases, expected_biases))
