# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of released checkpoints: byte-level BPE read from `tiktoken.model`, without their remote code.

Released folders carry a table of ranks (`tiktoken.model`) and the ids of special tokens (`tokenizer_config.json`); the
splitting pattern and the rule for unnamed special tokens are in their Python code. Here they become one
`tokenizers.Tokenizer`, so that everything works that works with a fast tokenizer: offsets, batches, saving as
`tokenizer.json`, assistant masks.

Source of the pattern and of the special ids: `tokenization_kimi.py` of the public Kimi-K2 and Kimi-Linear checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES, AutoTokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from deltalatent.processing.chat_template import CHAT_TEMPLATE

_NO_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN[0]}*{_NO_HAN[1]}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN[0]}+{_NO_HAN[1]}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Text is cut into these pieces before merging: runs of Han characters, words, up to three digits, the rest."""

NUM_SPECIAL_TOKENS = 258
"""Special ids that follow the ranks; those without a name are called `<|reserved_token_{id}|>`."""

RELEASED_CODE = frozenset({"tokenization_kimi", "tokenization_moonshot"})
"""Files beside released vocabularies whose rules these are."""


class KimiK3Tokenizer(TokenizersBackend):
    """Fast tokenizer of the released vocabulary, or of one trained with the same pattern.

    `from_pretrained` reads `tokenizer.json` if there is one, else `tiktoken.model` (needs `tiktoken`);
    `save_pretrained` writes `tokenizer.json`, which every reader of fast tokenizers understands. A tokenizer without a
    chat template of its own gets :data:`~deltalatent.processing.chat_template.CHAT_TEMPLATE`, as in the release.
    """

    vocab_files_names = {"vocab_file": "tiktoken.model", "tokenizer_file": "tokenizer.json"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    # No `__init__`: a class that has one does not get what `tokenizer.json` says of splitting and decoding.
    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs) -> dict[str, Any]:
        """Arguments of the constructor; read from files, as in the base class, with the defaults of this class."""
        auto_map = kwargs.pop("auto_map", None)
        if code := str((auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map) or ""):
            # Of the release this names code that the class replaces; other code may split text in another way.
            if not any(name in code for name in RELEASED_CODE):
                raise ValueError(
                    f"{cls.__name__} replaces the code in {sorted(RELEASED_CODE)}, got a tokenizer with {code}: pass "
                    "`trust_remote_code=True` to run that code."
                )
        kwargs.setdefault("clean_up_tokenization_spaces", False)  # decoding gives what was encoded
        if kwargs.get("chat_template") is None:
            kwargs["chat_template"] = CHAT_TEMPLATE
        return super().convert_to_native_format(trust_remote_code=trust_remote_code, **kwargs)

    @classmethod
    def _convert_from_tiktoken(cls, vocab_file: str, local_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Build the backend from a table of ranks; `added_tokens_decoder` names the special ids that follow it."""
        try:
            ranks = TikTokenConverter.load_tiktoken_bpe(vocab_file)
        except ValueError as error:
            if "pip install" not in str(error):
                raise ValueError(f"{vocab_file} must hold one base64 token and its rank per line: {error}") from error
            raise ImportError(f"reading {Path(vocab_file).name} needs `tiktoken`: pip install tiktoken.") from error
        first = len(ranks)
        if sorted(ranks.values()) != list(range(first)):
            raise ValueError(
                f"the ranks of {vocab_file} must be 0 to {first - 1}, each once, got others: download the file again."
            )
        names = {int(index): str(token) for index, token in (local_kwargs.get("added_tokens_decoder") or {}).items()}
        if misplaced := [index for index in names if not first <= index < first + NUM_SPECIAL_TOKENS]:
            raise ValueError(
                f"`added_tokens_decoder` must name ids from {first} to {first + NUM_SPECIAL_TOKENS - 1}, got "
                f"{misplaced}: tiktoken.model and tokenizer_config.json belong to different vocabularies."
            )
        special = [names.get(first + i, f"<|reserved_token_{first + i}|>") for i in range(NUM_SPECIAL_TOKENS)]
        converter = TikTokenConverter(vocab_file=vocab_file, pattern=SPLIT_PATTERN, extra_special_tokens=special)
        return local_kwargs | {"tokenizer_object": converter.converted()}


class TikTokenTokenizer:
    """What `tokenizer_class` of released folders names: not a tokenizer but a way to :class:`KimiK3Tokenizer`."""

    # `AutoTokenizer` lets `trust_remote_code=True` win over built-in classes only; others use this name too.
    __module__ = TokenizersBackend.__module__

    @staticmethod
    def from_pretrained(*args, **kwargs) -> KimiK3Tokenizer:
        """As `KimiK3Tokenizer.from_pretrained`."""
        return KimiK3Tokenizer.from_pretrained(*args, **kwargs)


def register() -> None:
    """Make `AutoTokenizer` return :class:`KimiK3Tokenizer` for our models; calling it again changes nothing."""
    for model_type in ("kimi_k3", "kimi_k3_text"):
        AutoTokenizer.register(CONFIG_MAPPING[model_type], fast_tokenizer_class=KimiK3Tokenizer, exist_ok=True)
    REGISTERED_TOKENIZER_CLASSES.setdefault(TikTokenTokenizer.__name__, TikTokenTokenizer)
