# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What `CudaGraphTrainer` gives: tokens per second of `Trainer.train` with and without it, in one process.

    python -m benchmarks.trainer --out benchmarks/results/trainer-h200.json
    python -m benchmarks.trainer --size small --variant ours --variant fla+grouped_mm  # beside a peer's kernels

Both train a ready-made size on random tokens of one shape: bf16 weights, fused AdamW, clipping, and the balancing of
experts. The time of a step is that of all timed steps together, over their number: the host works ahead of the device
as it does in training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments, default_data_collator

from benchmarks.run import environment, write
from benchmarks.tuning import quick_tuning
from benchmarks.whole_model import VARIANTS, Settings, build, release
from deltalatent.training import CudaGraphTrainer, QuantileBalancingCallback

TRAINERS: tuple[type[Trainer], ...] = (Trainer, CudaGraphTrainer)
UNTIMED = CudaGraphTrainer.warmup_steps + 2
"""Steps before the first that counts: compilation, warm-up and the capture."""


class StepTimer(TrainerCallback):
    """`marks`, the clock after the first `UNTIMED` steps and at the end of training, the device idle at both."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, args: Any, state: TrainerState, *others: Any, **kwargs: Any) -> None:
        if state.global_step in (UNTIMED, state.max_steps):
            torch.cuda.synchronize()
            self.marks.append(time.perf_counter())


def measure(
    kind: type[Trainer], size: str, variant: str, rows: int, tokens: int, steps: int, non_blocking: bool
) -> dict[str, float]:
    """Milliseconds per step, tokens per second and peak memory of a run of `Trainer.train`."""
    release()
    torch.cuda.reset_peak_memory_stats()
    model = build(size, Settings(torch.device("cuda"), flops_per_s=1.0), variant)
    shape = (UNTIMED + steps, rows, tokens)
    data = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(3, model.config.vocab_size, shape).flatten(0, 1)
    ]
    timer = StepTimer()
    with tempfile.TemporaryDirectory() as folder, quick_tuning():
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
            accelerator_config={"non_blocking": non_blocking},
        )
        callbacks = [QuantileBalancingCallback(), timer]
        run = kind(model, arguments, data_collator=default_data_collator, train_dataset=data, callbacks=callbacks)
        run.train()
    start, end = timer.marks
    step = (end - start) / steps
    result = {"step_ms": 1e3 * step, "tokens_per_s": rows * tokens / step}
    return result | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__.split("\n")[0])
    parser.add_argument("--size", action="append", help="ready-made size; repeatable (default: small and base)")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="kernels; repeatable (default: ours)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch (default: 2)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a row (default: 8192)")
    parser.add_argument("--steps", type=int, default=16, help="timed steps (default: 16)")
    parser.add_argument("--non-blocking", action="store_true", help="batches are copied while the device computes")
    parser.add_argument("--out", type=Path, help="result file (default: only print)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("CUDA graphs need a CUDA GPU, none is available")
    if (devices := torch.cuda.device_count()) > 1:
        sys.exit(f"`Trainer` would spread a batch over all GPUs, got {devices}: set CUDA_VISIBLE_DEVICES to one")
    report: dict[str, Any] = {"environment": environment(torch.device("cuda")), "results": []}
    cases = itertools.product(options.size or ("small", "base"), options.variant or ("ours",), TRAINERS)
    for size, variant, kind in cases:
        batch = [options.rows, options.tokens]
        record: dict[str, Any] = {"size": size, "variant": variant, "trainer": kind.__name__, "batch": batch}
        record["non_blocking"] = options.non_blocking
        record |= measure(kind, size, variant, *batch, options.steps, options.non_blocking)
        report["results"].append(record)
        print(json.dumps(record), flush=True)
        write(report, options.out)


if __name__ == "__main__":
    main()
