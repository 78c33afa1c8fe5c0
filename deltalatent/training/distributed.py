# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""FSDP2 as accelerate and the Trainer apply it, without casting what must stay float32.

Nothing here is needed for models that `from_pretrained(..., distributed_config=DistributedConfig(...))` spreads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from deltalatent.modeling.sharding import shard_float32_modules

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["keep_float32"]


def keep_float32(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Keep float32 tensors float32 when `accelerator` shards `model` with FSDP2; call it before the optimizer is made.

    accelerate gives all groups of FSDP2 one policy: under `mixed_precision="bf16"` each parameter is rounded to bf16
    before it is used, decay parameters, short convolutions and the router included, and a bf16 model with float32
    tensors is refused. This makes the groups of these tensors (:func:`shard_float32_modules`); accelerate then makes
    the others. With the Trainer: `keep_float32(trainer.accelerator, trainer.model)` before `trainer.train()`.

    Args:
        accelerator: Its FSDP2 plugin says how to shard. Without FSDP2 nothing happens.
        model: Not yet prepared; changed in place.

    Returns:
        The model.

    Raises:
        ValueError: The plugin's `cpu_ram_efficient_loading` is on (it would load before the groups exist: load with
            `distributed_config` instead), or some rank would get no row of a float32 tensor.
    """
    if not accelerator.is_fsdp2:
        return model
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "`cpu_ram_efficient_loading` must be off for `keep_float32`, got it on: switch it off, or load with "
            "`from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=...))`; a rank then reads its part."
        )
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    parts = accelerator.num_processes if mesh is None else mesh.size(-1)
    for name, parameter in model.named_parameters():
        if accelerator.mixed_precision != "no" and parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)  # as accelerate will do with all of them
        rows = parameter.shape[0]
        if name.endswith("A_log") and -(-rows // parts) * (parts - 1) >= rows:
            raise ValueError(
                f"`{name}` must have a row for each of the {parts} ranks that share parameters, got {rows}: "
                "accelerate cannot tell empty parts apart; raise `dp_replicate_size` of its parallelism config."
            )
    if plugin.mixed_precision_policy is not None:
        # accelerate also rounds what a layer returns, and that includes the router scores that balancing counts.
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)
    shard_float32_modules(
        model,
        mesh=mesh,
        mp_policy=plugin.mixed_precision_policy,
        offload_policy=plugin.cpu_offload,
        reshard_after_forward=plugin.reshard_after_forward,
    )
    return model
