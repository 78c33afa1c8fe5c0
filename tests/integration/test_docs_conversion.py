# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The pages on serving, the Hub and the tokenizer: every block runs in a folder with a small model, and prints what is
shown."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from deltalatent.__main__ import main
from tests.documentation import run_blocks
from tests.fake_hub import fake_hub  # noqa: F401 - a fixture
from tests.processing.test_tokenizer import ranks, write_released_files  # noqa: F401 - a fixture
from tests.testing_common import tiny_model

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def workspace(tmp_path, monkeypatch, ranks, fake_hub) -> Path:  # noqa: F811
    """The current folder, with what the pages take for granted."""
    tiny_model().save_pretrained(tmp_path / "model")
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "released").mkdir()
    write_released_files(tmp_path / "released", ranks)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_command(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "deltalatent", line
    main(arguments)


@pytest.mark.parametrize("page", ["serving.md", "hub.md", "tokenizer.md"])
def test_blocks_run_and_print_what_is_shown(page, workspace):
    run_blocks(DOCS / page, run_command)
