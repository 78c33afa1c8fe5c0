# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""One GPU against several: do they compute the same, how fast, in how much memory, and what the links cost.

    torchrun --nproc-per-node 1 -m benchmarks.scaling one --work /scratch --out benchmarks/results
    torchrun --nproc-per-node 2 -m benchmarks.scaling many --work /scratch --out benchmarks/results
    torchrun --nproc-per-node 1 -m benchmarks.scaling back --work /scratch --out benchmarks/results

`one` makes the checkpoints and the reference; `many` compares every layout with it, and goes on from what one process
saved; `back` goes on in one process from what several saved. `--work` is shared by the three. Weights are bf16
(float32 where the model keeps them so), the optimizer is AdamW. Each measurement stands for itself: one that fails is
recorded with its error, and the file is written after each. Equality: five steps on the same global batch; the scale
of errors is what bf16 changes on one GPU. Speed: the same number of tokens per GPU. Collectives: share of the time of
a step in which an NCCL kernel runs, and in which nothing else does. Skewed routing: the selection bias sends every
token to the experts of the first rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig, load_optimizer_distributed, save_optimizer_distributed

from deltalatent import KimiK3ForCausalLM, size_config
from deltalatent.training import balanced_routers, parameter_groups, register_quantile_balancing

LAYOUTS = ("ep", "fsdp")
BATCH = {"tiny": (2, 64), "small": (8, 4096), "base": (4, 4096)}
"""Rows and tokens per GPU where speed is measured; for equality half of the rows, over all GPUs together."""
STEPS = 5
LEARNING_RATE = 1e-4


def distributed_config(layout: str) -> DistributedConfig | None:
    world_size = dist.get_world_size()
    return {
        "one": None,
        "fsdp": DistributedConfig(fsdp_size=world_size),
        "ep": DistributedConfig(fsdp_size=world_size, ep_size=world_size),
    }[layout]


class Bench:
    """Where things are: the device of this process, the folder that launches share, and the results so far."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device, self.work, self.seconds = device, Path(args.work), args.seconds
        self.file = Path(args.out) / f"scaling-{args.part}.json"
        self.results: dict[str, Any] = {}
        self.start = time.monotonic()

    def measure(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Record what `function` returns, or why it did not; nothing is started once time is up (on any rank)."""
        late = torch.tensor(time.monotonic() - self.start > self.seconds, dtype=torch.int32, device=self.device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item():
            self.results[name] = {"error": "not started: out of time"}
            return
        start = time.monotonic()
        try:
            self.results[name] = function(self, *args)
        except Exception:
            self.results[name] = {"error": traceback.format_exc(limit=-4)}
        took = time.monotonic() - start
        if dist.get_rank() == 0:
            self.write()
            shown = json.dumps(self.results[name])[:700]
            print(f"[{time.monotonic() - self.start:.0f} s, {took:.1f} s] {name}: {shown}", flush=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(self) -> None:
        about: dict[str, Any] = {"torch": torch.__version__, "world_size": dist.get_world_size()}
        if self.device.type == "cuda":
            about["device"] = torch.cuda.get_device_name(self.device)
            about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"about": about, "results": self.results}, indent=1) + "\n")

    def load(self, size: str, layout: str, dtype: torch.dtype = torch.bfloat16, source: str | None = None) -> Any:
        path, config = self.work / (source or size), distributed_config(layout)
        model = KimiK3ForCausalLM.from_pretrained(path, distributed_config=config, dtype=dtype)
        return (model.to(self.device) if config is None else model).train()

    def batch(self, size: str, rows: int, length: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        vocabulary = size_config(size).vocab_size
        # Zipf-like: uniform tokens would leave nothing to learn.
        ids = vocabulary ** torch.rand(rows, length, generator=generator)
        return ids.long().clamp(max=vocabulary - 1).to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def over_ranks(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return [tensor.item() for tensor in everyone]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.95))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(bench: Bench, model: Any, ids: Tensor, rows_of_step: int) -> Tensor:
    """Forward and backward; the loss of this rank, as its share of the mean over the step."""
    parts = 1 if model.config.__dict__.get("distributed_config") is None else dist.get_world_size()
    targets = torch.tensor(rows_of_step * (ids.shape[1] - 1), device=ids.device)
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss
    (loss * parts).backward()
    return loss.detach()


def train(bench: Bench, model: Any, optimizer: Any, size: str, first: int = 0, steps: int = STEPS) -> dict[str, Any]:
    """Steps on the batches that all layouts share, with balancing; losses, gradient norms, gradients of the first."""
    handle = register_quantile_balancing(model, optimizer)
    parts = 1 if model.config.__dict__.get("distributed_config") is None else dist.get_world_size()
    part = dist.get_rank() if parts > 1 else 0
    rows, length = BATCH[size]
    rows = max(2, rows // 2)
    losses, norms, gradients = [], [], {}
    for number in range(first, first + steps):
        ids = bench.batch(size, rows, length, number)
        loss = step(bench, model, ids.chunk(parts)[part], rows)
        if parts > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
        squares = torch.zeros((), dtype=torch.float64, device=bench.device)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = whole(parameter.grad).float()
                squares += gradient.double().square().sum()
                if number == first and size != "base":
                    gradients[name] = gradient.cpu()
        norms.append(squares.sqrt().item())
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    return {"losses": losses, "norms": norms, "gradients": gradients}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest deviation of losses and of gradient norms (relative), and of the gradient of the first step."""
    pairs = {key: list(zip(found[key], expected[key], strict=True)) for key in ("losses", "norms")}
    result = {
        "loss": max(abs(a - b) for a, b in pairs["losses"]),
        "norm": max(abs(a / b - 1) for a, b in pairs["norms"]),
    }
    if found["gradients"] and expected["gradients"]:
        square = sum((g - expected["gradients"][n]).double().square().sum() for n, g in found["gradients"].items())
        total = sum(g.double().square().sum() for g in expected["gradients"].values())
        result["gradient"] = float((square / total).sqrt())
    return result


def make_checkpoint(bench: Bench, size: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(size_config(size)).to(torch.bfloat16)
    model.save_pretrained(bench.work / size)
    return {"parameters": model.num_parameters()}


def equality(bench: Bench, size: str, layout: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Five steps, and how far they are from those of one process, in bf16 and (the scale of errors) in float32."""
    model = bench.load(size, layout, dtype)
    found = train(bench, model, optimizer_of(model), size)
    result: dict[str, Any] = {"losses": found["losses"], "norms": found["norms"]}
    for name in ("bfloat16", "float32"):
        path = bench.work / f"{size}-{name}.pt"
        if path.exists():
            result[f"against {name}"] = difference(found, torch.load(path))
    if layout == "one":
        torch.save(found, bench.work / f"{size}-{str(dtype).removeprefix('torch.')}.pt")
    return result


def speed(bench: Bench, size: str, layout: str) -> dict[str, Any]:
    """Tokens per second, memory, share of collectives; balanced, then with all tokens on one rank's experts."""
    model = bench.load(size, layout)
    optimizer = optimizer_of(model)
    rows, length = BATCH[size]
    parts = 1 if layout == "one" else dist.get_world_size()
    ids = bench.batch(size, rows, length, 100 + dist.get_rank())
    is_cuda = bench.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()

    def one_step() -> None:
        step(bench, model, ids, rows * parts)
        optimizer.step()
        optimizer.zero_grad()

    def timed(steps: int) -> float:
        seconds = []
        for _ in range(steps):
            bench.synchronize()
            start = time.perf_counter()
            one_step()
            bench.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    handle = register_quantile_balancing(model, optimizer)
    for _ in range(5):  # compiles, and balances
        one_step()
    handle.remove()
    held = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters())
    states = sum(
        (t.to_local() if isinstance(t, DTensor) else t).nbytes
        for state in optimizer.state.values()
        for t in state.values()
    )
    tokens = rows * length * parts
    seconds = timed(8)
    result: dict[str, Any] = {
        "tokens per GPU and step": rows * length,
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "parameter_bytes": bench.over_ranks(held),
        "optimizer_bytes": bench.over_ranks(states),
    }
    if is_cuda:
        result["peak_bytes"] = bench.over_ranks(torch.cuda.max_memory_allocated())
        result["collectives"] = collectives(one_step)
    for _, router in balanced_routers(model):
        first = router.e_score_correction_bias.numel() // max(2, parts)
        router.e_score_correction_bias[:first] += 10.0
    for _ in range(2):
        one_step()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    skewed = timed(5)
    result["skewed"] = {"step_s": skewed, "tokens_per_s": tokens / skewed}
    if is_cuda:
        result["skewed"]["peak_bytes"] = bench.over_ranks(torch.cuda.max_memory_allocated())
    return result


def collectives(one_step: Callable[[], None], steps: int = 2) -> dict[str, float]:
    """Shares of the profiled time in which NCCL kernels run, and in which only they do."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        for _ in range(steps):
            one_step()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - start)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for kernel in kernels:
        spans["nccl" in kernel.name.lower()].append((kernel.time_range.start, kernel.time_range.end))
    communicating, computing, either = (_union(s) for s in (spans[True], spans[False], spans[True] + spans[False]))
    return {
        "running": communicating / wall,
        "alone": (either - computing) / wall,
        "idle": 1 - either / wall,
        "kernels per step": len(kernels) / steps,
    }


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def save(bench: Bench, size: str, layout: str) -> dict[str, Any]:
    """Two steps, then parts and optimizer for another number of processes, and the third step as it should be."""
    model = bench.load(size, layout)
    optimizer = optimizer_of(model)
    train(bench, model, optimizer, size, steps=2)
    start = time.perf_counter()
    if layout == "one":
        model.save_pretrained(bench.work / f"{layout}-parts")
    else:
        model.save_pretrained(bench.work / f"{layout}-parts", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(bench.work / f"{layout}-optimizer"))
    seconds = time.perf_counter() - start
    record = train(bench, model, optimizer, size, first=2, steps=1)
    if dist.get_rank() == 0:
        torch.save(record, bench.work / f"{layout}-third.pt")
    return {"losses": record["losses"], "norms": record["norms"], "save_s": seconds}


def resume(bench: Bench, size: str, source: str, layout: str) -> dict[str, Any]:
    model = bench.load(size, layout, source=f"{source}-parts")
    optimizer = optimizer_of(model)
    load_optimizer_distributed(model, optimizer, str(bench.work / f"{source}-optimizer"))
    found = train(bench, model, optimizer, size, first=2, steps=1)
    expected = torch.load(bench.work / f"{source}-third.pt")
    return {"losses": found["losses"], "norms": found["norms"], "against": difference(found, expected)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("one", "many", "back"))
    parser.add_argument("--work", required=True, help="folder that the launches share; gigabytes")
    parser.add_argument("--out", required=True, help="folder for scaling-<part>.json")
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=sorted(BATCH))
    parser.add_argument("--seconds", type=float, default=90.0, help="nothing new is started after this time")
    args = parser.parse_args()

    if torch.cuda.is_available():
        dist.init_process_group("nccl")
        device = torch.device("cuda", int(dist.get_node_local_rank()))
        torch.cuda.set_device(device)
    else:
        dist.init_process_group("gloo")
        device = torch.device("cpu")
    bench = Bench(args, device)
    first = args.sizes[0]
    if args.part == "one":
        for size in args.sizes:
            bench.measure(f"{size} checkpoint", make_checkpoint, size)
            bench.measure(f"{size} one", speed, size, "one")
        bench.measure(f"{first} one equality float32", equality, first, "one", torch.float32)
        for size in args.sizes:
            bench.measure(f"{size} one equality", equality, size, "one")
        bench.measure(f"{first} saved by one", save, first, "one")
    elif args.part == "many":
        for size in args.sizes:
            for layout in LAYOUTS:
                bench.measure(f"{size} {layout}", speed, size, layout)
                bench.measure(f"{size} {layout} equality", equality, size, layout)
        bench.measure(f"{first} saved by ep", save, first, "ep")
        bench.measure(f"{first} resumed from one", resume, first, "one", "ep")
    else:
        bench.measure(f"{first} resumed from ep", resume, first, "ep", "one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
