# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Which experts of each layer are worth keeping, from how often tokens chose them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig

Usage = Mapping[Any, Sequence[float] | Tensor]


def load_usage(source: str | Path | Usage) -> dict[int, Tensor]:
    """Counts per 0-based layer, float64 [E].

    Args:
        source: A mapping, or a file of one (`.json`, `.safetensors`): layer -> how many tokens chose each expert. A
            layer is its number, or any name with `layers.<number>.` in it, such as the router's. The `names` and
            `loads` of a `BalanceReport` make such a mapping.

    Raises:
        ValueError: The file cannot be read, or a key names no layer.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        try:
            mapping = load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_bytes())
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"`{path}` must be a JSON or safetensors file of counts per layer, got: {error}"
            ) from error
    else:
        mapping = source
    if not isinstance(mapping, Mapping):
        raise ValueError(f"usage must map layers to counts, got a {type(mapping).__name__}: see docs/conversion.md.")
    usage = {}
    for key, counts in mapping.items():
        match = re.fullmatch(r"(\d+)|(?:.*\.)?layers\.(\d+)(?:\..*)?", str(key))
        if match is None:
            raise ValueError(f"usage must have layer numbers or names with `layers.<number>.` as keys, got {key!r}.")
        layer = int(match[1] or match[2])
        if layer in usage:
            raise ValueError(f"usage must have one entry per layer, got two for layer {layer} (one is {key!r}).")
        try:
            usage[layer] = torch.as_tensor(counts, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"usage of layer {layer} must be a list of numbers, got: {error}") from error
    return usage


def choose_experts(config: KimiK3TextConfig, usage: dict[int, Tensor], keep: int) -> dict[int, list[int]]:
    """The `keep` most used experts per sparse layer, in ascending order; of equals the first.

    With expert groups each group keeps its share, so that routing by groups still makes sense.

    Raises:
        ValueError: The model is dense, `keep` does not fit groups or `num_experts_per_token`, or a layer's counts are
            missing, of another length, negative or not finite.
    """
    experts, groups = config.num_experts, config.num_expert_group
    if not experts:
        raise ValueError("experts of a dense model (`num_experts` null) cannot be pruned: leave the option out.")
    if not config.num_experts_per_token <= keep <= experts or keep % groups:
        raise ValueError(
            f"`keep_experts` must be between `num_experts_per_token`={config.num_experts_per_token} and `num_experts`="
            f"{experts}, and a multiple of `num_expert_group`={groups}, got {keep}: choose another number."
        )
    chosen = {}
    for layer, kind in enumerate(config.mlp_layer_types):
        if kind != "sparse":
            continue
        counts = usage.get(layer)
        if counts is None or counts.shape != (experts,) or not bool((counts >= 0).all() & counts.isfinite().all()):
            got = "none" if counts is None else f"shape {tuple(counts.shape)}, smallest {counts.min():g}"
            raise ValueError(
                f"usage of layer {layer} must be {experts} counts of 0 or more, one per expert, got {got}: count with "
                "the model that is being pruned."
            )
        ranked = counts.view(groups, -1).sort(dim=1, descending=True, stable=True).indices[:, : keep // groups]
        first_of_group = torch.arange(groups)[:, None] * (experts // groups)
        chosen[layer] = sorted((ranked + first_of_group).flatten().tolist())
    return chosen
