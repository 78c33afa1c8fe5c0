# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Released tokenizer files without their code: ids as tiktoken gives them, by `AutoTokenizer`, and saved again."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deltalatent.processing.tokenization_kimi_k3 import NUM_SPECIAL_TOKENS, SPLIT_PATTERN, KimiK3Tokenizer

tiktoken = pytest.importorskip("tiktoken", reason="reading tiktoken.model needs tiktoken")

SPECIAL_TOKENS = ["[BOS]", "[EOS]", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[UNK]", "[PAD]"]
TEXTS = {
    "english": "The delta rule writes what the state did not predict. Don't, DON'T, we'll; it's 3.14159 or 20261130!",
    "han": "我想在apple工作1314151天 汉字abc漢字ABC 你好,世界",
    "scripts": "Привет мир, нещо на Български, こんにちは, 한국어, ñandú İstanbul ǅ កាន់តែពិសេស العربية",
    "code": "def f(x):\n    return {'a': x ** 2}  # comment\n\n\n\tif x:\r\n        pass\n",
    "spaces": "  two   three    \n \n\n \t \t\t end   ",
    "emoji": "🚀 (normal) 😶\u200d🌫️ (joined) ✅ 🦙🦙",
    "empty": "",
    "special": '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>[EOS]',
    "not quite special": "<|open|> <|open | [BOS ]",
}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A vocabulary trained with the released pattern on this file's texts and its own source."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([*TEXTS.values(), Path(__file__).read_text(encoding="utf-8")] * 2, trainer)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    return {bytes(byte_of[c] for c in token): rank for token, rank in trained.get_vocab().items()}


def write_released_files(folder: Path, ranks: dict[bytes, int], **config) -> None:
    lines = [
        base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    named = {str(len(ranks) + i): {"content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)}
    content = {
        "added_tokens_decoder": named,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "additional_special_tokens": ["<|open|>", "<|close|>"],
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content | config))
    (folder / "config.json").write_text('{"model_type": "kimi_k3_text"}')


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("released")
    write_released_files(path, ranks)
    return path


@pytest.fixture(scope="module")
def reference(ranks):
    """What the released code builds."""
    first = len(ranks)
    names = SPECIAL_TOKENS + [f"<|reserved_token_{first + i}|>" for i in range(8, NUM_SPECIAL_TOKENS)]
    special = {name: first + i for i, name in enumerate(names)}
    return tiktoken.Encoding("test", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize("model_type", ["kimi_k3_text", "kimi_k3", "kimi_linear"])
def test_auto_tokenizer_reads_released_files(ranks, tmp_path, model_type):
    write_released_files(tmp_path, ranks)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is KimiK3Tokenizer
    assert len(tokenizer) == len(ranks) + NUM_SPECIAL_TOKENS
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(len(ranks), len(ranks) + 8))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("[BOS]", "[EOS]", "[PAD]")
    assert tokenizer.convert_ids_to_tokens(len(ranks) + 100) == f"<|reserved_token_{len(ranks) + 100}|>"


@pytest.mark.parametrize("name", TEXTS)
def test_ids_are_those_of_tiktoken(folder, reference, name):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TEXTS[name])
    assert ids == reference.encode(TEXTS[name], allowed_special="all")
    assert tokenizer.decode(ids) == TEXTS[name]


def test_saved_as_fast_tokenizer_it_needs_no_tiktoken(folder, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    assert not (tmp_path / "tiktoken.model").exists()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k3_text"}')
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is KimiK3Tokenizer
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.special_tokens_map == tokenizer.special_tokens_map
    for text in TEXTS.values():
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == text


def test_without_tiktoken_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "tiktoken.load", None)
    with pytest.raises(ImportError, match="pip install tiktoken"):
        AutoTokenizer.from_pretrained(folder)


def test_a_tokenizer_with_other_code_is_not_taken_for_ours(ranks, tmp_path):
    write_released_files(tmp_path, ranks, auto_map={"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]})
    with pytest.raises(ValueError, match="tokenization_other"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_special_ids_outside_the_vocabulary_are_refused(ranks, tmp_path):
    write_released_files(tmp_path, ranks, added_tokens_decoder={"5": {"content": "[BOS]", "special": True}})
    with pytest.raises(ValueError, match=r"got \[5\]: tiktoken.model and tokenizer_config.json belong to different"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_a_gap_in_the_ranks_is_refused(ranks, tmp_path):
    write_released_files(tmp_path, {token: rank for token, rank in ranks.items() if rank != 300})
    with pytest.raises(ValueError, match="each once, got others: download the file again"):
        AutoTokenizer.from_pretrained(tmp_path)
