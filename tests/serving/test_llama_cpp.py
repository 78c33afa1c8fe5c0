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
from deltalatent.kernels.experts.reference import grouped_experts_reference
from deltalatent.modeling.latent_moe import KimiK3Experts
from tests.integration.quickstart_run import run_quickstart

SOURCE = os.environ.get("LLAMA_CPP_SOURCE", "")
if not SOURCE:
    pytest.skip("needs llama.cpp: run `make test-serving`", allow_module_level=True)
llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: run `make test-serving`")

PROMPT = """async def read(self, n=-1):
    # Read up to n bytes from the stream.
    if self._exception is not None:"""
NEW_TOKENS = 32
FLOAT32_LOGITS = 1e-4
"""What two float32 evaluations may differ by, as for the golden numbers."""


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
    ours = KimiK3ForCausalLM.from_pretrained(exported, dtype=torch.float32, experts_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    return {"kind": request.param, "reader": reader, "ours": ours, "tokenizer": tokenizer}


def reader_logits(reader, ids: list[int]) -> np.ndarray:
    reader.reset()
    reader.eval(ids)
    return np.array(reader.scores[: len(ids)], dtype=np.float64)


def test_tokens_are_the_same(served):
    ours = served["tokenizer"].encode(PROMPT)
    assert served["reader"].tokenize(PROMPT.encode(), add_bos=False, special=True) == ours


def to_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """What llama.cpp multiplies packed weights with: groups of 32 share a float16 scale, their largest / 127."""
    groups = x.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (groups / scale).round() * scale.half().float(), 0).flatten(-2)


def with_eight_bit_inputs(self, hidden_states, top_k_index, top_k_weights):
    """`KimiK3Experts.forward`, both products with rounded inputs."""
    return grouped_experts_reference(
        to_eight_bits(hidden_states), self.gate_up_proj, self.down_proj, top_k_index, top_k_weights,
        lambda gate, up: to_eight_bits(self.gated_unit(gate, up)),
    )  # fmt: skip


def our_logits(model, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


def test_logits_are_the_same(served, monkeypatch):
    ids = served["tokenizer"].encode(PROMPT)
    ours, theirs = our_logits(served["ours"], ids), reader_logits(served["reader"], ids)
    error, scale = np.abs(theirs - ours).max(), np.abs(ours).max()
    print(f"{served['kind']}: largest difference {error:.2e} of logits up to {scale:.1f}")
    if served["kind"] == "bfloat16":
        assert error <= FLOAT32_LOGITS
        return
    # It rounds the inputs of packed matrices to eight bits, which now and then decides who is chosen in a later layer.
    # The same rounding here gives the size of error that explains.
    monkeypatch.setattr(KimiK3Experts, "forward", with_eight_bit_inputs)
    rounding = our_logits(served["ours"], ids) - ours
    typical, expected = (np.sqrt(np.square(difference).mean()) for difference in (theirs - ours, rounding))
    print(f"root mean square {typical:.2e}; of rounding the experts' inputs to eight bits {expected:.2e}")
    assert typical <= 2 * expected


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
