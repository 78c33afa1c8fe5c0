# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A reader that others wrote: llama.cpp converts and runs what the quickstart trained, and gives our numbers.

`make test-serving` builds llama.cpp and runs this; elsewhere it is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from deltalatent import KimiK3ForCausalLM
from deltalatent.conversion.serving import export_serving
from tests.integration.quickstart_run import run_quickstart

SOURCE = os.environ.get("LLAMA_CPP_SOURCE", "")
if not SOURCE:
    pytest.skip("needs llama.cpp: run `make test-serving`", allow_module_level=True)
llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: run `make test-serving`")

PROMPT = """async def read(self, n=-1):
    # Read up to n bytes from the stream.
    if self._exception is not None:"""
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A model of the quickstart, small enough for seconds, wide enough for groups of 32 that share a scale."""
    folder = tmp_path_factory.mktemp("trained")
    run_quickstart(folder, "--size", "nano", "--max_steps", "30", "--learning_rate", "3e-3", "--block_size", "128")
    return folder


@pytest.fixture(scope="module", params=["bfloat16", "mxfp4"])
def served(request, trained, tmp_path_factory) -> dict[str, Any]:
    """The exported folder, our model of it, and llama.cpp's."""
    workspace = tmp_path_factory.mktemp(request.param)
    saved, exported, converted = (workspace / name for name in ("saved", "exported", "model.gguf"))
    KimiK3ForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).save_pretrained(saved)
    AutoTokenizer.from_pretrained(trained).save_pretrained(saved)
    export_serving(saved, exported, experts="mxfp4" if request.param == "mxfp4" else "as-is")
    converter = Path(__file__).with_name("convert_to_gguf.py")
    command = [sys.executable, str(converter), SOURCE, str(exported), "--outfile", str(converted), "--outtype", "f32"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    reader = llama_cpp.Llama(
        str(converted), n_ctx=256, n_batch=256, n_threads=1, logits_all=True, verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    ours = KimiK3ForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    return {"kind": request.param, "reader": reader, "ours": ours, "tokenizer": tokenizer}


def reader_logits(reader, ids: list[int]) -> np.ndarray:
    reader.reset()
    reader.eval(ids)
    return np.array(reader.scores[: len(ids)], dtype=np.float64)


def test_tokens_are_the_same(served):
    ours = served["tokenizer"].encode(PROMPT)
    assert served["reader"].tokenize(PROMPT.encode(), add_bos=False, special=True) == ours


def test_logits_are_the_same(served):
    ids = served["tokenizer"].encode(PROMPT)
    with torch.no_grad():
        ours = served["ours"](torch.tensor([ids])).logits[0].double().numpy()
    theirs = reader_logits(served["reader"], ids)
    error, scale = np.abs(theirs - ours).max(), np.abs(ours).max()
    print(f"{served['kind']}: largest difference {error:.2e} of logits up to {scale:.1f}")
    assert error <= TOLERANCE[served["kind"]] * scale


def test_greedy_tokens_are_the_same(served):
    ids = served["tokenizer"].encode(PROMPT)
    output = served["ours"].generate(
        torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=1
    )
    ours = output[0, len(ids) :].tolist()
    reader, theirs = served["reader"], []
    logits = reader_logits(reader, ids)[-1]
    for _ in range(NEW_TOKENS):
        theirs.append(int(logits.argmax()))
        reader.eval(theirs[-1:])
        logits = np.array(reader.scores[len(ids) + len(theirs) - 1])
    assert theirs == ours


TOLERANCE = {"bfloat16": 1e-3, "mxfp4": 1e-2}
