# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The main job at tiny scale, in this process, leaving no trace in it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import train_quickstart

TEXTS = str(Path(asyncio.__file__).parent)
MAX_BYTES, HELD_OUT, BLOCK, BATCH, STEPS, VOCABULARY = 100_000, 0.2, 32, 4, 6, 320
FLAGS = (
    f"--size tiny --data {TEXTS} --max_bytes {MAX_BYTES} --held_out_fraction {HELD_OUT} --vocab_size {VOCABULARY} "
    f"--block_size {BLOCK} --per_device_train_batch_size {BATCH} --max_steps {STEPS} --save_steps {STEPS // 2} "
    "--eval_strategy no --logging_steps 1 --disable_tqdm true"
).split()


def run_quickstart(output: Path, *flags: str) -> dict[str, Any]:
    """Trains a tiny model into `output` and returns the summary; later flags override the tiny ones."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        # The script asks for deterministic algorithms, which sets these for its process.
        for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC",
                     "FLASH_ATTENTION_DETERMINISTIC"):  # fmt: skip
            patch.setenv(name, os.environ.get(name, ""))
        try:
            torch.set_num_threads(1)
            return train_quickstart.main([*FLAGS, "--output_dir", str(output), *flags])
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(False)
