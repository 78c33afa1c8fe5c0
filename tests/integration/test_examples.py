# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Every example runs at tiny size on what the quickstart leaves, learns, and is as short as promised.

The quickstart itself is tested in test_quickstart.py, what TRL computes in test_trl.py.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import compare_balancing
import continue_training
import dpo_trl
import generate
import instructions
import lora_experts
import lora_instructions
import sft_trl
import train_quickstart
from deltalatent.training import balanced_routers, load_selection_bias
from tests.integration.quickstart_run import MAX_BYTES, TEXTS, run_quickstart
from tests.testing_common import assert_close, random_ids

EXAMPLES = Path(train_quickstart.__file__).parent
WITH_COMMANDS = (
    train_quickstart, continue_training, lora_instructions, lora_experts, sft_trl, dpo_trl, compare_balancing, generate
)  # fmt: skip
STEPS = "--max_steps 6 --warmup_steps 1 --disable_tqdm true --report_to none --use_cpu true".split()
TEXT = f"--data {TEXTS} --max_bytes {MAX_BYTES // 2} --held_out_fraction 0.2".split()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the quickstart leaves it, but for a tiny model that has seen little."""
    output = tmp_path_factory.mktemp("quickstart")
    run_quickstart(output, "--max_steps", "2", "--save_strategy", "no")
    return output


def run(example: ModuleType, base: Path, output: Path, *flags: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(False)
    return example.main(["--model", str(base), "--output_dir", str(output), *STEPS, *flags])


def logits(model: Any, base: Path) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(random_ids(AutoModelForCausalLM.from_pretrained(base).config)).logits


def test_continue_training_learns_and_goes_on_from_its_checkpoint(base: Path, tmp_path: Path) -> None:
    flags = [*TEXT, "--max_length", "48", "--learning_rate", "1e-2", "--save_steps", "3"]
    first = run(continue_training, base, tmp_path, *flags)
    assert first["after"] < 0.98 * first["before"]
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert run(continue_training, base, tmp_path, *flags) == first  # from step 3
    assert run(continue_training, base, tmp_path, *flags) == first  # all steps are done
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 0


def test_pieces_hold_every_token_of_one_document(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    documents = datasets.Dataset.from_dict({"text": ["return x " * 9, "y"]})
    rows = continue_training.pieces(documents, tokenizer, max_length=4)["input_ids"][:]
    assert max(map(len, rows)) == 4
    ends = [i for i, row in enumerate(rows) if row[-1] == tokenizer.eos_token_id]
    assert len(ends) == 2 and ends[1] == len(rows) - 1
    joined = [token for row in rows[: ends[0] + 1] for token in row]
    assert tokenizer.decode(joined, skip_special_tokens=True) == documents[0]["text"]


def test_lora_on_instructions_learns_saves_and_merges(base: Path, tmp_path: Path) -> None:
    flags = ["--limit", "60", "--max_length", "64", "--learning_rate", "2e-2"]
    found = run(lora_instructions, base, tmp_path, *flags)
    assert found["after"] < found["before"]
    assert found["answer"].startswith("Question: What does `")
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert not any(".experts." in name for name in adapter)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(logits(merged, base), logits(adapted, base), 1e-4)
    for (_, router), (_, old) in zip(
        balanced_routers(merged), balanced_routers(AutoModelForCausalLM.from_pretrained(base)), strict=True
    ):
        assert torch.equal(router.e_score_correction_bias, old.e_score_correction_bias)


def test_lora_on_experts_learns_balances_and_merges(base: Path, tmp_path: Path) -> None:
    found = run(lora_experts, base, tmp_path, *TEXT, "--block_size", "32", "--logging_steps", "3",
                "--learning_rate", "2e-2")  # fmt: skip
    assert found["after"] < found["before"]
    assert found["merged"] == pytest.approx(found["after"], rel=1e-4)
    assert found["max_violation"] > 0
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert adapter and all(".experts." in name for name in adapter)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    load_selection_bias(adapted, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(logits(adapted, base), logits(merged, base), 1e-4)


def test_sft_learns_and_answers(base: Path, tmp_path: Path) -> None:
    found = run(sft_trl, base, tmp_path, "--limit", "60", "--max_length", "128", "--learning_rate", "1e-2")
    assert found["after"] < found["before"]
    assert found["answer"].startswith("Question: What does `")
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == instructions.CHAT_TEMPLATE
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_dpo_prefers_what_was_chosen(base: Path, tmp_path: Path) -> None:
    """On the same few preferences that it learns from (`--limit 12` holds one out)."""
    found = run(dpo_trl, base, tmp_path, "--limit", "12", "--max_length", "64", "--learning_rate", "1e-2")
    assert set(found) == {"accuracies", "margins"}
    assert abs(found["margins"]) > 0
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)


def test_compare_balancing_runs_all_rules_from_the_same_start(tmp_path: Path) -> None:
    flags = "--size tiny --vocab_size 320 --block_size 32 --batch_size 16 --steps 8 --max_bytes 60000"
    result = compare_balancing.main([*flags.split(), "--data", TEXTS, "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "balancing.json").read_text()) == result
    assert (tmp_path / "balancing.png").read_bytes().startswith(b"\x89PNG")
    violations = {rule: curves["max_violation"] for rule, curves in result["runs"].items()}
    assert set(violations) == {"quantile", "sign", "none"}
    assert len(violations["none"]) == 8
    # The same weights and tokens, and no bias yet.
    assert violations["quantile"][0] == violations["sign"][0] == violations["none"][0]
    assert len({curve[-1] for curve in violations.values()}) == 3


def test_answers_are_documentation_and_preferences_have_two_sides() -> None:
    pairs = instructions.standard_library_questions()
    assert len(pairs) > 1000
    answers = dict(pairs)
    assert answers["What does `json.dumps` do?"] == "Serialize ``obj`` to a JSON formatted ``str``."
    preferences = instructions.load_preferences(limit=50)
    assert len(preferences) == 50
    for row in preferences:
        assert row["chosen"] != row["rejected"]
        assert row["chosen"][0]["content"] == answers[row["prompt"][0]["content"]]


def test_labels_are_the_answers_alone(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = instructions.CHAT_TEMPLATE
    conversations = instructions.load_instructions(limit=3)
    for conversation, row in zip(
        conversations, instructions.tokenize(conversations, tokenizer, max_length=1000), strict=True
    ):
        question, answer = (message["content"] for message in conversation["messages"])
        spoken = [token for token in row["labels"] if token != -100]
        assert tokenizer.decode(spoken) == f"{answer}{tokenizer.eos_token}"
        assert tokenizer.decode(row["input_ids"]) == f"Question: {question}\nAnswer:\n{answer}{tokenizer.eos_token}"


def test_other_data_needs_its_columns(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).to_json(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"must have a column `messages`, got \['text'\]"):
        instructions.load_instructions(str(tmp_path))
    with pytest.raises(ValueError, match=r"lacks the columns \['chosen', 'prompt', 'rejected'\], got \['text'\]"):
        instructions.load_preferences(str(tmp_path))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.parametrize("example", WITH_COMMANDS, ids=lambda module: module.__name__)
def test_commands_in_docstrings_use_flags_that_exist(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--help"])
    known = set(re.findall(r"--[a-z_0-9]+", capsys.readouterr().out)) | {"--nproc_per_node"}
    commands = [line for line in (example.__doc__ or "").splitlines() if f"{example.__name__}.py" in line]
    assert commands
    assert set(re.findall(r"--[a-z_0-9]+", "\n".join(commands))) <= known
