# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`examples/train_distributed.py`: both ways of spreading a model train alike and leave a whole model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_distributed
from corpus import load_documents, train_tokenizer
from tests.distributed import jobs
from tests.distributed.launch import run_ranks

TEXT = ["--data", str(Path(asyncio.__file__).parent), "--max_bytes", "50000", "--max_length", "48"]
FLAGS = [
    *TEXT,
    *"--max_steps 6 --warmup_steps 1 --logging_steps 1 --learning_rate 2e-3 --save_steps 3".split(),
    *"--disable_tqdm true --report_to none --use_cpu true".split(),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    documents = load_documents(TEXT[1], max_bytes=50_000)
    tokenizer = train_tokenizer(documents, 256)
    tokenizer.save_pretrained(path)
    jobs.make_model(vocab_size=len(tokenizer)).save_pretrained(path)
    return path


def test_both_ways_train_alike(base: Path, tmp_path: Path) -> None:
    losses, size = {}, jobs.load(base).num_parameters()
    for name, flags in {"experts": ["--fsdp_size", "2", "--ep_size", "2"], "copies": []}.items():
        output = tmp_path / name
        ranks = run_ranks(2, jobs.run_example, ["--model", str(base), "--output_dir", str(output), *FLAGS, *flags])
        assert ranks[0] == ranks[1]
        losses[name] = ranks[0]
        assert AutoModelForCausalLM.from_pretrained(output).num_parameters() == size
        assert AutoTokenizer.from_pretrained(output).eos_token_id == 0
        # What it says of resuming: the Trainer keeps an optimizer only if it has not been spread by Transformers.
        assert (output / "checkpoint-3" / "optimizer.pt").exists() == (name == "copies")
    # Later a token or two goes to another expert, which moves the loss of so small a batch by a fraction of a percent;
    # that the layouts compute the same is tested with weights and gradients elsewhere.
    assert losses["experts"][:3] == pytest.approx(losses["copies"][:3], rel=1e-3)
    assert losses["experts"] == pytest.approx(losses["copies"], rel=1e-2)
    assert losses["experts"][-1] < losses["experts"][0] - 0.05


def test_the_example_is_short_and_names_its_commands() -> None:
    text = Path(train_distributed.__file__).read_text()
    assert len(text.splitlines()) <= 150
    assert "torchrun --nproc-per-node 2 examples/train_distributed.py" in text
    assert "accelerate launch --config_file examples/fsdp2.yaml examples/train_distributed.py" in text
