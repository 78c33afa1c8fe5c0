# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Released tensor names, understood by `load_state_dict`.

`from_pretrained` and `save_pretrained` translate names through Transformers' conversion mapping
(`conversion/mapping.py`). Code that reads files by itself - `Trainer` when it resumes or loads the best model, or a
user with `load_file` - calls `load_state_dict` with the names on disk. This hook makes that work, one shard at a time
if need be.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

TEXT_PREFIX = "language_model."
"""Of the text model's tensors in a composite checkpoint."""

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
"""Of all its other tensors."""

RELEASED_MOE_NAME, MOE_NAME = "block_sparse_moe", "mlp"
EXPERT_KEY = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<which>w[123])\.weight")


@torch.no_grad()
def accept_released_layout(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args, **kwargs) -> None:
    """Pre-hook of `load_state_dict`: rename the MoE blocks and fuse the experts, in place; other names pass untouched.

    A composite model (`released_prefixes`) gets its parts under its own names first.

    Experts go straight into their slice of the fused parameter. The fused name is added to `state_dict` once all of
    its slices were there, so that a strict load still reports an incomplete file; shards that hold some of the slices
    can be loaded one after the other (not strictly).
    """
    for released, ours in getattr(module, "released_prefixes", ()):
        for key in [key for key in state_dict if key.startswith(prefix + released)]:
            state_dict[prefix + ours + key.removeprefix(prefix + released)] = state_dict.pop(key)
    slices: dict[str, int] = defaultdict(int)
    for key in [key for key in state_dict if key.startswith(prefix) and f".{RELEASED_MOE_NAME}." in key]:
        renamed = key.replace(f".{RELEASED_MOE_NAME}.", f".{MOE_NAME}.")
        tensor = state_dict.pop(key)
        if (match := EXPERT_KEY.fullmatch(renamed)) is None:
            state_dict[renamed] = tensor
            continue
        name = match["experts"] + (".down_proj" if match["which"] == "w2" else ".gate_up_proj")
        parameter, index = module.get_parameter(name.removeprefix(prefix)), int(match["index"])
        if index >= parameter.shape[0]:
            raise ValueError(
                f"`{key}` must belong to one of the {parameter.shape[0]} experts of the model, got expert {index}: "
                "the file belongs to another config."
            )
        target = _slice(parameter[index], match["which"])
        if target.shape != tensor.shape:
            raise ValueError(
                f"`{key}` must have shape {tuple(target.shape)}, got {tuple(tensor.shape)}: the file belongs to "
                "another config."
            )
        target.copy_(tensor)
        slices[name] += 1
    for name, count in slices.items():
        parameter = module.get_parameter(name.removeprefix(prefix))
        if count == parameter.shape[0] * (1 if name.endswith("down_proj") else 2):
            state_dict[name] = parameter.detach()


def _slice(expert: Tensor, which: str) -> Tensor:
    """Where w1 (gate), w3 (up) or w2 (down) lives in one expert of the fused parameter."""
    half = expert.shape[0] // 2
    return {"w1": expert[:half], "w3": expert[half:], "w2": expert}[which]
