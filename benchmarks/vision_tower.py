# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the vision tower and projector at the released size, from pixels to visual tokens.

    python -m benchmarks.vision_tower --out benchmarks/results/vision_tower-h200.json

For square images of several sizes, and for a batch of different ones: median time, peak memory with everything in it
(weights, pixels, activations), and matrix products per second. Inference, then a training step with activation
checkpointing.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import environment, milliseconds
from deltalatent import KimiK3VisionConfig
from deltalatent.modeling.vision_tower import Grid, KimiK3Projector, KimiK3VisionModel

GIB = 2**30
CASES: dict[str, list[Grid]] = {
    "224 x 224": [(1, 16, 16)],
    "448 x 448": [(1, 32, 32)],
    "896 x 896": [(1, 64, 64)],
    "1792 x 1792": [(1, 128, 128)],
    "3584 x 3584": [(1, 256, 256)],
    "clip, 4 frames of 448 x 448": [(4, 32, 32)],
    "16 images, 448 x 448": [(1, 32, 32)] * 16,
    "16 images of 16 sizes": [(1, 2 * rows, 40) for rows in range(8, 24)],
}
TRAINED = ("448 x 448", "16 images, 448 x 448", "1792 x 1792")
SMALL = {"vt_num_hidden_layers": 2, "vt_hidden_size": 64, "mm_hidden_size": 64, "vt_intermediate_size": 128}


def matrix_products(config: KimiK3VisionConfig, grids: Sequence[Grid]) -> float:
    """Floating-point operations of one forward: projections of every patch, attention within items, projector."""
    width, inner = config.vt_hidden_size, config.qkv_hidden_size
    per_patch = config.vt_num_hidden_layers * (4 * width * inner + 2 * width * config.vt_intermediate_size)
    merged = width * config.merge_kernel_size[0] * config.merge_kernel_size[1]
    total = 0.0
    for frames, rows, columns in grids:
        patches = frames * rows * columns
        total += patches * (per_patch + 3 * config.patch_size**2 * width)
        total += 2 * patches**2 * inner * config.vt_num_hidden_layers
        total += rows * columns // 4 * (merged * merged + merged * config.text_hidden_size)
    return 2 * total


def measure(
    config: KimiK3VisionConfig, grids: Sequence[Grid], device: torch.device, dtype: torch.dtype, train: bool
) -> dict[str, Any]:
    """One case on a model of its own, so that the peak holds nothing else."""
    torch.manual_seed(0)
    with device:
        tower, projector = KimiK3VisionModel(config).to(dtype), KimiK3Projector(config).to(dtype)
    tower.train(train)
    if train:
        tower.activation_checkpointing_enable()
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, 3, config.patch_size, config.patch_size, device=device)
    grid_thws = torch.tensor(grids)

    def step() -> None:
        with torch.set_grad_enabled(train):
            tokens = projector(tower(pixels, grid_thws).pooler_output)
            if train:
                tower.zero_grad(set_to_none=True)
                projector.zero_grad(set_to_none=True)
                tokens.float().square().mean().backward()

    step()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    ms = milliseconds(step, device)
    operations = matrix_products(config, grids) * (
        4 if train else 1
    )  # backward is two forwards, and one recomputation
    return {
        "patches": patches,
        "visual_tokens": sum(h * w // 4 for _, h, w in grids),
        "ms": ms,
        "peak_gib": peak,
        "tflops_per_s": operations / ms / 1e9,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print and write; `--small` takes a toy tower (for a CPU)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="a toy tower and the smallest images")
    flags = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = KimiK3VisionConfig(**(SMALL if flags.small else {}))
    names = list(CASES)[:2] if flags.small else list(CASES)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "environment": environment(device),
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in KimiK3VisionModel(config).parameters()),
        "inference": {},
        "training": {},
    }
    for mode, wanted in (("inference", names), ("training", [name for name in TRAINED if name in names])):
        for name in wanted:
            record = measure(config, CASES[name], device, dtype, mode == "training")
            report[mode][name] = record
            print(mode, name, json.dumps(record), flush=True)
    if flags.out is not None:
        flags.out.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    main()
