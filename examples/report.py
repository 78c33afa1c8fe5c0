# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves behind: curves and a checksum of the weights."""

import hashlib
from pathlib import Path

import torch
from matplotlib.figure import Figure


def last_logged(history: list[dict[str, float]], key: str) -> float | None:
    """Returns the newest value of `key` in a Trainer's `state.log_history`, or `None` if it was never logged."""
    return next((log[key] for log in reversed(history) if key in log), None)


def plot_curves(history: list[dict[str, float]], unigram: float, path: Path) -> None:
    """Draws loss and expert load over the optimizer steps of a Trainer's `state.log_history` into a PNG file."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, loads = figure.subplots(1, 2)
    curves = [
        (losses, "loss", "training", "-"),
        (losses, "eval_loss", "held out", "o-"),
        (loads, "expert_load/max_violation", "max violation: busiest expert / mean - 1", "-"),
        (loads, "expert_load/cv", "coefficient of variation", "-"),
    ]
    for axes, key, label, style in curves:
        logs = [log for log in history if key in log]
        axes.plot([log["step"] for log in logs], [log[key] for log in logs], style, label=label)
    losses.axhline(unigram, color="grey", linestyle="--", label="unigram model, held out")
    losses.set(title="Loss", xlabel="optimizer step", ylabel="nats per token")
    loads.set(title="Expert load", xlabel="optimizer step", ylim=(0, None))
    for axes in (losses, loads):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def weights_sha256(model: torch.nn.Module) -> str:
    """Returns a checksum of every parameter and persistent buffer: equal only if all bits are equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
