# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the distributed tests do; each job is called with its rank first (see `launch.run_ranks`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed import DistributedConfig, load_optimizer_distributed, save_optimizer_distributed
from transformers.distributed.sharding_utils import DtensorShardOperation

from benchmarks import scaling
from deltalatent import KimiK3ForCausalLM
from deltalatent.training import (
    MuonAdamW,
    balanced_routers,
    keep_float32,
    parameter_groups,
    register_quantile_balancing,
)
from tests.testing_common import linear_attn_config, random_ids, tiny_config, tiny_model

STEPS = 5
MAX_NORM = 1.0

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
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
    accelerator: Accelerator | None = None,
) -> dict[str, Any]:
    """Some steps on this rank's part of the batches, with balancing and clipping, as a loop of one's own would do it.

    Returns:
        By step: this rank's share of the loss (`losses`), the norm of the gradient before clipping (`norms`), the
        whole clipped gradients by name (`gradients`), the selection biases [L, E] (`biases`).
    """
    accelerator = accelerator or Accelerator(cpu=True)
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
        record["biases"].append(torch.stack(biases(model)))
    handle.remove()
    return record


def groups_of_fsdp(rank: int, path: Path) -> list[list[str]]:
    """Names of the modules that gather their parameters together, of a model stored in bf16, by group."""
    config = DistributedConfig(fsdp_size=2, ep_size=2)
    model = KimiK3ForCausalLM.from_pretrained(path, distributed_config=config, dtype=torch.bfloat16)
    groups: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            groups.setdefault(id(module._get_fsdp_state()), []).append(name)
    return list(groups.values())


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


def muon(model: nn.Module) -> torch.optim.Optimizer:
    # Float32 products and few iterations: rounding in a gradient near zero is not blown up to the size of an update.
    groups = parameter_groups(model, weight_decay=0.1)
    return MuonAdamW(groups, lr=1e-3, ns_dtype=torch.float32, ns_steps=2)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def assert_weights_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Up to a hundredth of the steps (3e-3 long) that were taken: rounding is not, momenta of another run would be."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert max_difference(found[name], tensor) < 3e-5, name


def biases(model: nn.Module) -> list[Tensor]:
    return [router.e_score_correction_bias for _, router in balanced_routers(model)]


def train_with_muon(rank: int, path: Path, names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """Weights after three steps of Muon, by layout."""
    found = {}
    for name in names:
        model = load(path, **LAYOUTS[name])
        tp_size = LAYOUTS[name].get("tp_size", 1)
        train(model, muon(model), part=rank // tp_size, parts=dist.get_world_size() // tp_size, steps=3)
        found[name] = weights(model)
    return found if rank == 0 else {}


def save_everything(rank: int, path: Path, target: Path) -> None:
    """Two steps, then one whole checkpoint (`whole`) and one in parts with the optimizer (`parts`, `optimizer`)."""
    model = load(path, **LAYOUTS["ep"])
    model.save_pretrained(target / "untrained")
    optimizer = muon(model)
    train(model, optimizer, part=rank, parts=2, steps=2)
    model.save_pretrained(target / "whole")
    model.save_pretrained(target / "parts", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(target / "optimizer"))


def train_with_adamw(rank: int, path: Path) -> dict[str, Tensor]:
    """PyTorch's optimizer with one kernel per group over experts on one mesh and everything else on another."""
    model = load(path, **LAYOUTS["ep"])
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3, foreach=True)
    train(model, optimizer, part=rank, parts=2, steps=2)
    return weights(model)


def resume(rank: int, source: Path, layout: str) -> dict[str, Any]:
    """The third step and after it the weights, from what `save_everything` wrote."""
    model = load(source / "parts", **LAYOUTS[layout])
    optimizer = muon(model)
    load_optimizer_distributed(model, optimizer, str(source / "optimizer"))
    record = train(model, optimizer, part=rank, parts=dist.get_world_size(), first_step=2, steps=1)
    return {"weights": weights(model), "biases": record["biases"], "norms": record["norms"]}


def fsdp_accelerator(mixed_precision: str) -> Accelerator:
    """accelerate offers FSDP on accelerators only; its code for it runs anywhere once its state says so."""
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def mixed_precision(rank: int, path: Path) -> dict[str, dict[str, Any]]:
    """What `observe` says of three ways of computing in bf16 on two ranks; accelerate without our help is refused."""
    found = {}
    ways = {"bf16 weights": (torch.bfloat16, False), "bf16 compute": (torch.float32, True)}
    for name, (dtype, is_mixed) in ways.items():
        config = DistributedConfig(fsdp_size=2, ep_size=2, fsdp_mixed_precision=is_mixed)
        found[name] = observe(KimiK3ForCausalLM.from_pretrained(path, distributed_config=config, dtype=dtype), rank)

    accelerator = fsdp_accelerator("bf16")
    model = keep_float32(accelerator, load(path))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    found["accelerate"] = observe(model, rank)

    model = load(path)
    model, _ = fsdp_accelerator("bf16").prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match=r"`A_log` must be float32, got torch.bfloat16: .*keep_float32"):
        observe(model, rank)
    return found


def observe(model: nn.Module, rank: int) -> dict[str, Any]:
    """One forward and backward: dtypes of parameters as stored and as used, of gradients, and the loss."""
    names = {module: name for name, module in model.named_modules()}
    used: dict[str, torch.dtype] = {}

    def look(module: nn.Module, args: Any) -> None:
        # Parents come first; what a module finds of its children is the last word for those that are only read.
        used.update({f"{names[module]}.{name}".lstrip("."): p.dtype for name, p in module.named_parameters()})

    handles = [module.register_forward_pre_hook(look) for module in model.modules()]
    batch = make_batch(0)
    mine = {name: tensor.chunk(2)[rank] for name, tensor in batch.items()}
    loss = model.train()(**mine, num_items_in_batch=(batch["labels"] != -100).sum()).loss
    loss.backward()
    for handle in handles:
        handle.remove()
    dist.all_reduce(total := loss.detach().double())
    return {
        "stored": {name: p.dtype for name, p in model.named_parameters()},
        "used": used,
        "gradient": {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None},
        "loss": total.item(),
    }


def train_sharded_by_accelerate(rank: int, path: Path, target: Path) -> dict[str, Tensor]:
    """Float32 training with FSDP2 of accelerate, which must be that of one process; the first rank saves the model."""
    accelerator = fsdp_accelerator("no")
    model = keep_float32(accelerator, load(path))
    model, optimizer = accelerator.prepare(model, muon(model))
    assert isinstance(model, FSDPModule)
    train(model, optimizer, part=rank, parts=dist.get_world_size(), steps=3, accelerator=accelerator)
    accelerator.state.distributed_type = DistributedType.FSDP  # preparing the optimizer has reset it
    state_dict = accelerator.get_state_dict(model)
    if rank == 0:
        model.save_pretrained(target, state_dict=state_dict)
    return weights(model)


class CountBytes(TorchDispatchMode):
    """Adds up what collectives bring (all-gather, reduce-scatter) or send (all-to-all of tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.all_gather = self.reduce_scatter = self.all_to_all = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name == "c10d::_allgather_base_":
            self.all_gather += args[0].nbytes - args[1].nbytes
        elif name == "c10d::_reduce_scatter_base_":
            self.reduce_scatter += args[1].nbytes - args[0].nbytes
        elif name == "_c10d_functional::all_to_all_single":
            self.all_to_all += args[0].nbytes
        return func(*args, **(kwargs or {}))


def measure_footprint(rank: int, path: Path, layouts: dict[str, dict[str, Any]], rows: int) -> dict[str, Any]:
    """What `footprint` plans, as it is: bytes held after a step, and moved in forward and backward."""
    found = {}
    for name, layout in layouts.items():
        config = DistributedConfig(**layout)
        model = KimiK3ForCausalLM.from_pretrained(path, distributed_config=config, dtype=torch.bfloat16).train()
        ids = random_ids(model.config, rows, 16, seed=rank)
        with CountBytes() as count:
            model(input_ids=ids, labels=ids).loss.backward()
        parameters = list(model.parameters())
        optimizers = {
            "adamw": torch.optim.AdamW(parameter_groups(model), foreach=False),
            "muon": MuonAdamW(parameter_groups(model)),
        }
        states = {}
        for kind, optimizer in optimizers.items():
            optimizer.step()
            tensors = [t for state in optimizer.state.values() for key, t in state.items() if key != "step"]
            states[kind] = sum(t.to_local().nbytes for t in tensors)
        found[name] = {
            "parameters": sum(p.to_local().nbytes for p in parameters),
            "gradients": sum(p.grad.to_local().nbytes for p in parameters),
            "optimizer": states,
            "moved": (count.all_gather, count.reduce_scatter, count.all_to_all),
        }
    return found


def run_example(rank: int, argv: list[str]) -> list[float]:
    """`examples/train_distributed.py` with these arguments; its logged losses (of the first rank, for all)."""
    from train_distributed import main

    losses = [main(argv)]
    dist.broadcast_object_list(losses)
    return losses[0]


def scaling_benchmark(rank: int, folder: Path) -> dict[str, Any]:
    """Results of `benchmarks/scaling.py`: one measurement that fails, one that is made, then a second launch."""

    def fail(bench: scaling.Bench, record: dict[str, Any]) -> None:
        record["found"] = 1
        raise ValueError("for the test")

    def succeed(bench: scaling.Bench, record: dict[str, Any]) -> None:
        record["found"] = 2

    def once(bench: scaling.Bench, function: Any, calls: int) -> float:
        function()
        return 1.0

    scaling.seconds_of, scaling.ROWS_PER_GPU = once, {"tiny": (2,)}
    args = argparse.Namespace(work=str(folder), out=str(folder), part="many", seconds=600.0)
    first = scaling.Bench(args, torch.device("cpu"))
    first.measure("failing", fail)
    first.measure("speed", scaling.speed, "tiny", "ep")
    dist.barrier()
    second = scaling.Bench(args, torch.device("cpu"))
    second.measure("failing", succeed)
    second.measure("speed", fail)
    second.seconds = -1.0
    second.measure("late", succeed)
    return {"first": first.results, "second": second.results}
