# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the distributed tests do; each job is called with its rank first (see `launch.run_ranks`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation

from deltalatent import KimiK3ForCausalLM
from deltalatent.training import balanced_routers, register_quantile_balancing
from tests.testing_common import linear_attn_config, random_ids, tiny_config, tiny_model

STEPS = 5
MAX_NORM = 1.0

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp_size": 2},
    "ep": {"fsdp_size": 2, "ep_size": 2},
    "tp": {"tp_size": 2},
    "tp_ep": {"tp_size": 2, "ep_size": 2},
    "ep4": {"fsdp_size": 4, "ep_size": 4},
    "fsdp_ep": {"fsdp_size": 4, "ep_size": 2},
    "hsdp": {"fsdp_size": 2, "dp_replicate_size": 2},
    "fsdp_tp_ep": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
}


def make_model(**overrides: Any) -> Any:
    """Four KDA heads, so that four ranks have one each."""
    return tiny_model(linear_attn_config=linear_attn_config(num_heads=4), **overrides)


def make_batch(seed: int) -> dict[str, Tensor]:
    """Four rows of 24, 17, 9 and no real tokens, padded on the left; the first real token of a row has no target."""
    ids = random_ids(tiny_config(), 4, 24, seed)
    first = torch.tensor([0, 7, 15, 24])[:, None]
    position = torch.arange(24)
    return {
        "input_ids": ids,
        "attention_mask": (position >= first).long(),
        "labels": ids.masked_fill(position <= first, -100),
    }


def load(path: Path, **distributed: Any) -> Any:
    config = DistributedConfig(**distributed) if distributed else None
    return KimiK3ForCausalLM.from_pretrained(path, distributed_config=config).train()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    part: int = 0,
    parts: int = 1,
    first_step: int = 0,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Some steps on this rank's part of the batches, with balancing and clipping, as a loop of one's own would do it.

    Returns:
        By step: this rank's share of the loss (`losses`), the norm of the gradient before clipping (`norms`), the
        whole clipped gradients by name (`gradients`), the selection biases [L, E] (`biases`).
    """
    accelerator = Accelerator(cpu=True)
    handle = register_quantile_balancing(model, optimizer)
    record: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "biases": []}
    for step in range(first_step, first_step + steps):
        batch = make_batch(step)
        targets = (batch["labels"] != -100).sum()
        mine = {name: tensor.chunk(parts)[part] for name, tensor in batch.items()}
        loss = model(**mine, num_items_in_batch=targets).loss
        (loss * parts).backward()  # gradients are averaged over the parts
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        record["losses"].append(loss.item())
        record["norms"].append(whole(norm).item())
        record["gradients"].append(
            {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
        record["biases"].append(torch.stack([router.e_score_correction_bias for _, router in balanced_routers(model)]))
    handle.remove()
    return record


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)


def train_layouts(rank: int, path: Path, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Train with each of `LAYOUTS[names]`; the losses of the ranks are summed, the rest is that of this rank."""
    records = {}
    for name in names:
        layout = LAYOUTS[name]
        model = load(path, **layout)
        if name == "ddp":
            model = DistributedDataParallel(model)
        tp_size = layout.get("tp_size", 1)
        parts = dist.get_world_size() // tp_size
        record = train(model, sgd(model), part=rank // tp_size, parts=parts)
        losses = torch.tensor(record["losses"], dtype=torch.float64)
        dist.all_reduce(losses)
        record["losses"] = (losses / tp_size).tolist()
        records[name] = record if rank == 0 else {"biases": record["biases"], "norms": record["norms"]}
    return records


def max_difference(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()


def count_what_is_read(rank: int, path: Path) -> dict[str, int]:
    """Elements that loading with two expert-parallel ranks takes from the file and keeps."""
    read = []
    shard_tensor = DtensorShardOperation.shard_tensor

    def counted(self, source, tensor_idx=None, **kwargs):
        part = shard_tensor(self, source, tensor_idx=tensor_idx, **kwargs)
        if self.param_ndim == 3 and len(source.get_shape()) == 2:  # one expert of a fused parameter
            read.append(0 if part is None else part.numel())
        return part

    DtensorShardOperation.shard_tensor = counted
    try:
        model = load(path, **LAYOUTS["ep"])
    finally:
        DtensorShardOperation.shard_tensor = shard_tensor
    held = {name: p.to_local().numel() for name, p in model.named_parameters()}
    return {
        "experts": sum(read),
        "largest_expert": max(read),
        "held": sum(held.values()),
        "held_others": sum(size for name, size in held.items() if ".experts." not in name),
    }
