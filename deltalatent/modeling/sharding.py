# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What Transformers' distributed engine must know of our models beyond the plans on the config.

The engine gives each FSDP2 group one dtype and one precision policy. A KDA layer has tensors that stay float32
(`KeepFloat32`) next to matrices that do not, so such modules are grouped here, before the engine groups the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.distributed import DistributedConfig, DistributedMixin
from transformers.distributed.utils import is_dtensor
from transformers.modeling_utils import PreTrainedModel

from deltalatent.modeling.precision import KeepFloat32

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


def shard_float32_modules(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
) -> list[str]:
    """FSDP2 groups for the modules with float32 tensors; in place, before anything shards the modules around them.

    Each outermost :class:`KeepFloat32` module with parameters becomes a group whose parameters are gathered in the
    dtype that they are stored in, whatever `mp_policy` says. Its linear maps become a group of their own that follows
    `mp_policy`. So float32 tensors are float32 in memory, on the wire, in the forward and in their gradients, and no
    group mixes dtypes.

    Args:
        model: A model of this package, also inside a wrapper.
        mesh, mp_policy, offload_policy, reshard_after_forward: As for `torch.distributed.fsdp.fully_shard`, and equal
            to what shards the rest of the model.

    Returns:
        Names of the float32 modules, in module order.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mp_policy = mp_policy or MixedPrecisionPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload_policy or OffloadPolicy(),
        "reshard_after_forward": reshard_after_forward,
    }
    as_stored = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    modules = list(_float32_modules(model))
    for _, module in modules:
        linears = [
            child for child in module.children() if not isinstance(child, KeepFloat32) and _has_parameters(child)
        ]
        if linears:
            fully_shard(linears, mp_policy=mp_policy, **options)
        fully_shard(module, mp_policy=as_stored, **options)
    return [name for name, _ in modules]


def _float32_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, KeepFloat32]]:
    """Outermost `KeepFloat32` modules that have parameters, with their names."""
    if isinstance(module, KeepFloat32):
        if _has_parameters(module):
            yield name, module
        return
    for child_name, child in module.named_children():
        yield from _float32_modules(child, f"{name}.{child_name}" if name else child_name)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class ShardedLoading(DistributedMixin):
    """The part of `KimiK3PreTrainedModel` that `from_pretrained(..., distributed_config=...)` uses."""

    @classmethod
    def prepare_distribute_model(cls, distributed_config, device_map=None):
        """As in Transformers. Raises ValueError for pipeline parallelism."""
        if isinstance(distributed_config, dict):
            distributed_config = DistributedConfig.from_dict(distributed_config)
        if distributed_config is not None and distributed_config.pp_size > 1:
            raise ValueError(
                f"`pp_size` must be 1, got {distributed_config.pp_size}: pipeline stages hand on one hidden state, "
                "but attention residuals read the sums of all earlier blocks; use `fsdp_size` and `ep_size`."
            )
        return super().prepare_distribute_model(distributed_config, device_map)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """As in Transformers, after grouping the modules with float32 tensors."""
        if mesh_manager is not None and distributed_config.dp_size > 1:
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

            is_replicated = distributed_config.dp_replicate_size > 1
            is_mixed = distributed_config.fsdp_mixed_precision
            shard_float32_modules(
                model,
                mesh=mesh_manager.get_mesh(("dp_replicate", "fsdp") if is_replicated else "fsdp"),
                # What Transformers means by `fsdp_mixed_precision`.
                mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else None,
                offload_policy=CPUOffloadPolicy() if distributed_config.fsdp_cpu_offload else None,
            )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    @staticmethod
    def _load_pretrained_model(model, *args, **kwargs):
        # The engine reads a rank's share of what is stored, and `A_log` is stored padded: the shares would be wrong.
        # Each rank reads all of it, and the conversion takes the share (`NarrowDecay`).
        def hide_sharding(module, state_dict, prefix, local_metadata) -> None:
            for name, tensor in state_dict.items():
                if name.endswith("self_attn.A_log") and is_dtensor(tensor):
                    state_dict[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        handle = model.register_state_dict_post_hook(hide_sharding)
        try:
            return PreTrainedModel._load_pretrained_model(model, *args, **kwargs)
        finally:
            handle.remove()

    def _resolve_parallel_plans(self, distributed_config):
        # Of a half-precision model the base class makes groups for what stays float32: modules that are grouped
        # already, and MLA layers, which its pattern cannot tell from KDA layers. Every group costs the host time.
        tp_plan, ep_plan, fsdp_plan = super()._resolve_parallel_plans(distributed_config)
        named = self._expand_parallel_plan(dict(self.fsdp_plan))
        grouped = [name for name, _ in _float32_modules(cast(nn.Module, self))]
        fsdp_plan = {
            name: style
            for name, style in fsdp_plan.items()
            if name in named and not any(name == prefix or name.startswith(f"{prefix}.") for prefix in grouped)
        }
        return tp_plan, ep_plan, fsdp_plan
