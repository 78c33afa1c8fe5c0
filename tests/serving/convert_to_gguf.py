# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs llama.cpp's own converter, with help in one place: it knows pre-tokenizers by a hash of known vocabularies.

python convert_to_gguf.py LLAMA_CPP_SOURCE [arguments of convert_hf_to_gguf.py]
"""

import sys
from pathlib import Path

source = Path(sys.argv.pop(1))
sys.path[:0] = [str(source), str(source / "gguf-py")]

import convert_hf_to_gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402

# The quickstart's tokenizer splits text as GPT-2's does (`pre_tokenizers.ByteLevel`).
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"

convert_hf_to_gguf.main()
