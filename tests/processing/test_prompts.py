# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the processor says of prompts that are none."""

from __future__ import annotations

import numpy as np
import pytest

from deltalatent import KimiK3ImageProcessor, KimiK3Processor
from tests.vision.vision_testing import PATCH, tiny_tokenizer


@pytest.fixture(scope="module")
def processor() -> KimiK3Processor:
    return KimiK3Processor(KimiK3ImageProcessor(patch_size=PATCH), tiny_tokenizer())


@pytest.mark.parametrize("text", [[], ()], ids=["list", "tuple"])
def test_no_prompt(processor, text):
    with pytest.raises(ValueError, match="at least one prompt, got an empty list"):
        processor(text=text)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (5, "int among 1"),
        (["a", None], "NoneType among 2"),
        ([["a", "b"]], "list among 1"),
        ({"role": "user"}, "dict"),
    ],
    ids=["number", "missing", "nested", "conversation"],
)
def test_no_string(processor, text, got):
    with pytest.raises(TypeError, match=rf"list of prompts, got {got}"):
        processor(text=text)


@pytest.mark.parametrize("wrap", [tuple, iter, np.array], ids=["tuple", "iterator", "array"])
def test_whatever_holds_prompts_is_a_list(processor, wrap):
    assert processor(text=wrap(["a b", "c"])) == processor(text=["a b", "c"])


def test_one_prompt_is_a_list_of_one(processor):
    assert processor(text="a b") == processor(text=["a b"])
