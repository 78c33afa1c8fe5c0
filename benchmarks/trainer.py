# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What `CudaGraphTrainer` gives: tokens per second of `Trainer.train` with and without it, in one process.

    python -m benchmarks.trainer --out benchmarks/results/trainer-h200.json

Both train a ready-made size on random tokens of one shape: bf16 weights, fused AdamW, clipping, and the balancing of
experts. Times are medians of optimizer steps, from the end of one to the end of the next, the device idle at both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from benchmarks.run import environment, write
from benchmarks.whole_model import Settings, build, release
from deltalatent.training import CudaGraphTrainer, QuantileBalancingCallback

UNTIMED = CudaGraphTrainer.warmup_steps + 2
"""Steps before the first that counts: compilation, warm-up and the capture."""


class StepTimer(TrainerCallback):
    """Seconds of every step, waiting for the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def measure(kind: type[Trainer], size: str, rows: int, tokens: int, steps: int) -> dict[str, float]:
    """Milliseconds per step, tokens per second and peak memory of a run of `Trainer.train`."""
    release()
    torch.cuda.reset_peak_memory_stats()
    model = build(size, Settings(torch.device("cuda"), flops_per_s=1.0))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, model.config.vocab_size, (rows * 4, tokens))]
    timer = StepTimer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            max_steps=UNTIMED + steps,
            optim="adamw_torch_fused",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        callbacks = [QuantileBalancingCallback(), timer]
        run = kind(model, arguments, data_collator=default_data_collator, train_dataset=data, callbacks=callbacks)
        run.train()
    step = statistics.median(timer.seconds[UNTIMED:])
    result = {"step_ms": 1e3 * step, "tokens_per_s": rows * tokens / step}
    return result | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__.split("\n")[0])
    parser.add_argument("--size", action="append", help="ready-made size; repeatable (default: small and base)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch (default: 2)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a row (default: 8192)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps (default: 8)")
    parser.add_argument("--out", type=Path, help="result file (default: only print)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("CUDA graphs need a CUDA GPU, none is available")
    report: dict[str, Any] = {"environment": environment(torch.device("cuda")), "results": []}
    for size in options.size or ("small", "base"):
        for kind in (Trainer, CudaGraphTrainer):
            record: dict[str, Any] = {"size": size, "trainer": kind.__name__, "batch": [options.rows, options.tokens]}
            record |= measure(kind, size, options.rows, options.tokens, options.steps)
            report["results"].append(record)
            print(json.dumps(record), flush=True)
            write(report, options.out)


if __name__ == "__main__":
    main()
