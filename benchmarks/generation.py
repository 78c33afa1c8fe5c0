# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What `generate` takes per token on this machine, as a user calls it: with a dynamic and with a static cache.

    python -m benchmarks.generation --out benchmarks/results/generation-h200.json

Greedy, bf16, prompts of 1024 random tokens. A token is the difference of two calls that differ in the number of new
tokens; so the prompt, the first step and (with a static cache) recording the CUDA graph are not in it. They are in
"call_s", which is a whole call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.run import environment, write
from benchmarks.whole_model import Settings, build, release, synchronize

STEPS = {"dynamic": 12, "static": 148}
"""By `cache_implementation`: new tokens that a longer call has beyond a shorter one."""


def prompts(vocabulary: int, rows: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Random prompts, each 20 tokens shorter than the one before, padded on the left."""
    ids = torch.randint(3, vocabulary, (rows, length), device=device)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : min(20 * row, length - 1)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def measure(model: Any, inputs: dict[str, Tensor], kind: str, steps: int, repeats: int = 3) -> dict[str, Any]:
    """Milliseconds per token, each of `repeats` measurements, and seconds of the longest call."""

    def seconds(new_tokens: int) -> float:
        synchronize(model.device)
        start = time.perf_counter()
        model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, cache_implementation=kind
        )
        synchronize(model.device)
        return time.perf_counter() - start

    few = 8
    if kind == "static":  # one size for both calls
        model.generation_config.max_cache_len = inputs["input_ids"].shape[1] + few + steps
    seconds(few)  # kernels are compiled, libraries initialised
    pairs = [(seconds(few), seconds(few + steps)) for _ in range(repeats)]
    model.generation_config.max_cache_len = None
    each = [1e3 * (longer - shorter) / steps for shorter, longer in pairs]
    return {
        "ms_per_token": statistics.median(each),
        "ms_per_token_each": each,
        "call_s": {str(few): min(pair[0] for pair in pairs), str(few + steps): min(pair[1] for pair in pairs)},
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print and write; `--tiny` takes toy models, to try the script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="result file (default: only print)")
    parser.add_argument("--size", action="append", help="size of the model; repeatable (default: small and base)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="prompts of a batch (default: 1 and 16)")
    parser.add_argument("--tiny", action="store_true", help="toy models and few tokens")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(device, flops_per_s=1.0, tiny=options.tiny)
    report: dict[str, Any] = {"environment": environment(device), "results": {}}
    for size in options.size or ["small", "base"]:
        model = build(size, settings).eval()
        for rows in options.rows:
            inputs = prompts(model.config.vocab_size, rows, 16 if options.tiny else 1024, device)
            for kind in STEPS:
                name = f"{size}.{rows}_rows.{kind}"
                report["results"][name] = measure(model, inputs, kind, 2 if options.tiny else STEPS[kind])
                print(f"{name:<30} {json.dumps(report['results'][name])}", flush=True)
                write(report, options.out)
        del model
        release()
    return report


if __name__ == "__main__":
    main()
