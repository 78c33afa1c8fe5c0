# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""One GPU against several: do they compute the same, how fast, in how much memory, and what the links cost.

    torchrun --nproc-per-node 1 -m benchmarks.scaling one --work /scratch --out benchmarks/results
    torchrun --nproc-per-node 2 -m benchmarks.scaling many --work /scratch --out benchmarks/results
    torchrun --nproc-per-node 1 -m benchmarks.scaling back --work /scratch --out benchmarks/results

`one` makes the checkpoints and the reference; `many` compares every layout with it, and goes on from what one process
saved; `back` goes on in one process from what several saved. `--work` is shared by the three. Weights are bf16
(float32 where the model keeps them so). Each measurement stands for itself: one that fails is recorded with its error
and what it had found, the file is written after each, and a second launch measures only what the file does not have.

Equality: five steps on the same global batch, with AdamW and with Muon; the scale of errors is what bf16 changes on
one GPU. Speed: the same number of tokens per GPU, few and many, steps of AdamW with balancing one after the other, and
how long the host takes to issue one. The layout `alone` is FSDP2 over one GPU: all of its work except that of links.
Collectives: share of the time of a step in which an NCCL kernel runs, and in which nothing else does; the rest of a
step that is neither is a GPU that waits for its host. Skewed routing: the selection bias sends every token to the
experts of the first rank.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig, load_optimizer_distributed, save_optimizer_distributed

from deltalatent import KimiK3ForCausalLM, size_config
from deltalatent.modeling.sharding import shard_float32_modules
from deltalatent.training import MuonAdamW, balanced_routers, parameter_groups, register_quantile_balancing


class Part(NamedTuple):
    """What one launch does: with these layouts everything, with `speed_only` speed alone, equality with weights of
    these `dtypes`; `resumed`: whose checkpoints are gone on with, and in which layout."""

    layouts: tuple[str, ...] = ()
    speed_only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16",)
    resumed: tuple[tuple[str, str], ...] = ()


PARTS = {
    "one": Part(("one",), ("alone",), ("float32", "bfloat16")),
    "many": Part(("ep", "fsdp"), ("ddp",), resumed=(("one", "ep"), ("one", "fsdp"))),
    "back": Part(resumed=(("ep", "one"), ("fsdp", "one"))),
}
OPTIMIZERS = ("adamw", "muon")
LENGTH = {"tiny": 64, "small": 4096, "base": 4096}
"""Tokens per row."""
ROWS = {"tiny": 2, "small": 4, "base": 2}
"""Of a step whose results are compared, over all GPUs together."""
ROWS_PER_GPU = {"tiny": (2, 4), "small": (4, 32), "base": (4, 16)}
"""Of a step whose speed is measured: few tokens, and as many as a GPU with 140 GB holds well."""
STEPS = 5
LEARNING_RATES = {"adamw": 1e-4, "muon": 1e-3}
"""Muon's is such that its updates are not lost in the rounding of bf16 weights."""
SKEW = 10.0
"""Added to the selection bias of the first rank's experts: more than any score."""

Results = dict[str, Any]


def distributed_config(layout: str) -> DistributedConfig | None:
    world_size = dist.get_world_size()
    return {
        "one": None,
        "alone": None,
        "ddp": None,
        "fsdp": DistributedConfig(fsdp_size=world_size),
        "ep": DistributedConfig(fsdp_size=world_size, ep_size=world_size),
    }[layout]


class Bench:
    """Where things are: the device of this process, the folder that launches share, and the results so far."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device, self.work, self.seconds = device, Path(args.work), args.seconds
        self.is_cuda = device.type == "cuda"
        self.file = Path(args.out) / f"scaling-{args.part}.json"
        self.results: Results = json.loads(self.file.read_text())["results"] if self.file.exists() else {}
        self.start = time.monotonic()

    def measure(self, name: str, function: Callable[..., None], *args: Any) -> None:
        """Let `function` fill a record; nothing is started that the file has, or once time is up (on any rank)."""
        late = torch.tensor(time.monotonic() - self.start > self.seconds, dtype=torch.int32, device=self.device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if name in self.results and "error" not in self.results[name]:
            return
        record = self.results[name] = {}
        start = time.monotonic()
        if late.item():
            record["error"] = "not started: out of time"
            return
        try:
            function(self, record, *args)
        except Exception:
            record["error"] = traceback.format_exc(limit=-4)
        self.write()
        if dist.get_rank() == 0:
            took = time.monotonic() - start
            print(
                f"[{time.monotonic() - self.start:.0f} s, {took:.1f} s] {name}: {json.dumps(record)[:700]}", flush=True
            )
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def write(self) -> None:
        if dist.get_rank() != 0:
            return
        about: Results = {"torch": torch.__version__, "world_size": dist.get_world_size()}
        if self.is_cuda:
            about["device"] = torch.cuda.get_device_name(self.device)
            about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"about": about, "results": self.results}, indent=1) + "\n")

    def load(self, size: str, layout: str, dtype: torch.dtype = torch.bfloat16, source: str | None = None) -> Any:
        path, config = self.work / (source or size), distributed_config(layout)
        model = KimiK3ForCausalLM.from_pretrained(path, distributed_config=config, dtype=dtype)
        model = (model.to(self.device) if config is None else model).train()
        if layout == "alone":
            shard_alone(model, self.device)
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if layout == "ddp" else model

    def batch(self, size: str, rows: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        vocabulary = size_config(size).vocab_size
        # Zipf-like: uniform tokens would leave nothing to learn.
        ids = vocabulary ** torch.rand(rows, LENGTH[size], generator=generator)
        return ids.long().clamp(max=vocabulary - 1).to(self.device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def over_ranks(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return [tensor.item() for tensor in everyone]


def shard_alone(model: Any, device: torch.device) -> None:
    """The groups that `DistributedConfig(fsdp_size=n)` makes, over one rank, for which Transformers makes none."""
    mesh = init_device_mesh(device.type, (1,))
    shard_float32_modules(model, mesh=mesh)
    for module in (*model.model.layers, model.model.embed_tokens):
        fully_shard(module, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def optimizer_of(model: torch.nn.Module, kind: str = "adamw", fused: bool = False) -> torch.optim.Optimizer:
    groups, rate = parameter_groups(model), LEARNING_RATES[kind]
    if kind == "muon":
        return MuonAdamW(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def parts_of(layout: str) -> int:
    """Batches of a step, one per rank."""
    return 1 if layout in ("one", "alone") else dist.get_world_size()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: Any, ids: Tensor, rows_of_step: int, parts: int) -> Tensor:
    """Forward and backward; the loss of this rank, as its share of the mean over the step."""
    targets = torch.tensor(rows_of_step * (ids.shape[1] - 1), device=ids.device)
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss
    (loss * parts).backward()
    return loss.detach()


def train(
    bench: Bench, model: Any, optimizer: Any, size: str, layout: str, first: int = 0, steps: int = STEPS
) -> Results:
    """Steps on the batches that all layouts share, with balancing.

    Returns:
        By step: `losses` and `norms` of the gradient. Whole tensors by name, rounded to bf16: `gradients` of the first
        step, and `updates`, by how much the weights changed in all.
    """
    handle = register_quantile_balancing(model, optimizer)
    parts = parts_of(layout)
    before = weights(model)
    record: Results = {"losses": [], "norms": []}
    for number in range(first, first + steps):
        ids = bench.batch(size, ROWS[size], number).chunk(parts)[dist.get_rank() if parts > 1 else 0]
        loss = step(model, ids, ROWS[size], parts)
        if parts > 1:
            dist.all_reduce(loss)
        record["losses"].append(loss.item())
        gradients = {name: whole(p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}
        record["norms"].append(length_of(gradients))
        if number == first:
            record["gradients"] = {name: gradient.bfloat16().clone() for name, gradient in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    record["updates"] = {name: (after - before[name]).bfloat16() for name, after in weights(model).items()}
    return record


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter).detach().clone() for name, parameter in model.named_parameters()}


def length_of(tensors: dict[str, Tensor]) -> float:
    """2-norm over all values together, float64."""
    squares = [tensor.double().square().sum() for tensor in tensors.values()]
    return torch.stack(squares).sum().sqrt().item()


def difference(found: Results, expected: Results) -> dict[str, float]:
    """Largest deviation of losses and, relative, of gradient norms; relative deviation of the first gradient and of
    what the weights changed by, each as one vector."""
    pairs = {key: list(zip(found[key], expected[key], strict=True)) for key in ("losses", "norms")}
    result = {
        "loss": max(abs(a - b) for a, b in pairs["losses"]),
        "norm": max(abs(a / b - 1) for a, b in pairs["norms"]),
    }
    for key in ("gradients", "updates"):
        far = {name: tensor.float() - expected[key][name].float() for name, tensor in found[key].items()}
        result[key] = length_of(far) / length_of(expected[key])
    return result


def make_checkpoint(bench: Bench, record: Results, size: str) -> None:
    torch.manual_seed(0)
    with bench.device:
        model: Any = KimiK3ForCausalLM(size_config(size))
    model.to(torch.bfloat16)
    model.save_pretrained(bench.work / size)
    record["parameters"] = model.num_parameters()


def equality(bench: Bench, record: Results, size: str, layout: str, kind: str, dtype: str = "bfloat16") -> None:
    """Five steps, and how far they are from those of one process, in bf16 and (the scale of errors) in float32."""
    model = bench.load(size, layout, getattr(torch, dtype))
    found = train(bench, model, optimizer_of(model, kind), size, layout)
    record |= {"losses": found["losses"], "norms": found["norms"]}
    if layout == "one":
        torch.save(found, bench.work / f"{size}-{kind}-{dtype}.pt")
    for name in ("bfloat16", "float32"):
        path = bench.work / f"{size}-{kind}-{name}.pt"
        if path.exists() and (layout, name) != ("one", dtype):
            record[f"against {name}"] = difference(found, torch.load(path, map_location=bench.device))


def speed(bench: Bench, record: Results, size: str, layout: str) -> None:
    """Tokens per second, memory, share of collectives, by tokens per GPU; then what a step of each optimizer takes."""
    model = bench.load(size, layout)
    optimizer = optimizer_of(model, fused=bench.is_cuda)
    parts = parts_of(layout)
    for rows in ROWS_PER_GPU[size]:
        ids = bench.batch(size, rows, 100 + dist.get_rank())
        found = record[f"{ids.numel()} tokens per GPU"] = {}
        speed_of_batch(bench, found, model, optimizer, ids, parts)
        bench.write()
    record["parameter_bytes"] = bench.over_ranks(sum(local(p).nbytes for p in model.parameters()))
    states = (tensor for state in optimizer.state.values() for tensor in state.values())
    record["optimizer_bytes"] = bench.over_ranks(sum(local(tensor).nbytes for tensor in states))
    step(model, bench.batch(size, 1, 0), parts, parts)
    for kind in OPTIMIZERS:
        stepper = optimizer if kind == "adamw" else optimizer_of(model, kind)
        stepper.step()
        record[f"{kind}_step_s"] = seconds_of(bench, stepper.step, 3)


def speed_of_batch(
    bench: Bench, record: Results, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, parts: int
) -> None:
    """Balanced, then with all tokens on the first rank's experts; fills `record` as it goes."""
    routers = balanced_routers(model)

    def one_step() -> None:
        step(model, ids, ids.shape[0] * parts, parts)
        optimizer.step()
        optimizer.zero_grad()

    def measure(record: Results) -> None:
        if bench.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(bench, one_step, 3)
        record |= {"step_s": seconds, "tokens_per_s": ids.numel() * parts / seconds}
        bench.synchronize()
        start = time.perf_counter()
        one_step()
        record["host_s"] = time.perf_counter() - start
        if bench.is_cuda:
            record["peak_bytes"] = bench.over_ranks(torch.cuda.max_memory_allocated())
        bench.write()

    loads: list[Tensor] = []
    handle = register_quantile_balancing(
        model, optimizer, on_report=lambda report: loads.append(sum_loads(report.loads))
    )
    for _ in range(5):  # compiles, and balances
        one_step()
    measure(record)
    if bench.is_cuda:
        record["collectives"] = collectives(one_step)
    record["tokens_of_first_rank"] = share_of_first_rank(loads[-1], parts)
    handle.remove()

    skewed = record["skewed"] = {}
    before = [router.e_score_correction_bias.clone() for _, router in routers]
    for _, router in routers:
        router.balance.reset()
        router.e_score_correction_bias[: router.e_score_correction_bias.numel() // max(2, parts)] += SKEW
    one_step()
    counts = sum_loads([router.balance.loads for _, router in routers])
    dist.all_reduce(counts)
    skewed["tokens_of_first_rank"] = share_of_first_rank(counts, parts)
    measure(skewed)
    for (_, router), bias in zip(routers, before, strict=True):
        router.e_score_correction_bias.copy_(bias)


def sum_loads(loads: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Tokens per expert over all layers, int64 [E]."""
    return torch.stack(tuple(loads)).sum(0)


def share_of_first_rank(loads: Tensor, parts: int) -> float:
    """Of all pairs of token and expert, those whose experts the first rank (of one, half of them) would hold."""
    return (loads.chunk(max(2, parts))[0].sum() / loads.sum()).item()


def seconds_of(bench: Bench, function: Callable[[], Any], calls: int, repeats: int = 3) -> float:
    """Of one call among several without a pause: median over the repeats."""
    seconds = []
    for _ in range(repeats):
        bench.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        bench.synchronize()
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def collectives(one_step: Callable[[], None], steps: int = 2) -> Results:
    """Shares of the profiled time in which NCCL kernels run, and in which only they do; the longest kernels, ms."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(steps):
            one_step()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - start)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    longest: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            spans["nccl" in event.name.lower()].append(span)
            longest[event.name[:80]] += span[1] - span[0]
    communicating, computing, either = (_union(s) for s in (spans[True], spans[False], spans[True] + spans[False]))
    return {
        "profiled_step_s": wall / steps / 1e6,
        "running": communicating / wall,
        "alone": (either - computing) / wall,
        "idle": 1 - either / wall,
        "kernels per step": sum(map(len, spans.values())) / steps,
        "longest_ms": {name: round(took / steps / 1000, 3) for name, took in longest.most_common(14)},
    }


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def save(bench: Bench, record: Results, size: str, layout: str) -> None:
    """Two steps, then parts and optimizer for another number of processes, and the third step as it should be."""
    model = bench.load(size, layout)
    optimizer = optimizer_of(model)
    train(bench, model, optimizer, size, layout, steps=2)
    start = time.perf_counter()
    model.save_pretrained(bench.work / f"{layout}-parts", distributed_checkpoint=layout != "one")
    save_optimizer_distributed(model, optimizer, str(bench.work / f"{layout}-optimizer"))
    record["save_s"] = time.perf_counter() - start
    third = train(bench, model, optimizer, size, layout, first=2, steps=1)
    record |= {"losses": third["losses"], "norms": third["norms"]}
    if dist.get_rank() == 0:
        torch.save(third, bench.work / f"{layout}-third.pt")


def resume(bench: Bench, record: Results, size: str, source: str, layout: str) -> None:
    """The third step from what another number of processes saved after two."""
    model = bench.load(size, layout, source=f"{source}-parts")
    optimizer = optimizer_of(model)
    load_optimizer_distributed(model, optimizer, str(bench.work / f"{source}-optimizer"))
    found = train(bench, model, optimizer, size, layout, first=2, steps=1)
    expected = torch.load(bench.work / f"{source}-third.pt", map_location=bench.device)
    record |= {"losses": found["losses"], "norms": found["norms"], "against": difference(found, expected)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--work", required=True, help="folder that the launches share; gigabytes")
    parser.add_argument("--out", required=True, help="folder for scaling-<part>.json")
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=sorted(ROWS))
    kinds = ("speed", *OPTIMIZERS, "resume")
    parser.add_argument("--measure", nargs="+", default=kinds, choices=kinds, help="optimizers stand for equality")
    parser.add_argument("--seconds", type=float, default=600.0, help="nothing new is started after this time")
    args = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(dist.get_node_local_rank()))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
        device = torch.device("cpu")
    bench, part, first = Bench(args, device), PARTS[args.part], args.sizes[0]
    if args.part == "one":
        for size in args.sizes:
            bench.measure(f"{size} checkpoint", make_checkpoint, size)
    for size in args.sizes:
        if "speed" in args.measure:
            for layout in (*part.layouts, *part.speed_only):
                bench.measure(f"{size} {layout} speed", speed, size, layout)
        for kind, dtype, layout in itertools.product(OPTIMIZERS, part.dtypes, part.layouts):
            if kind in args.measure:
                bench.measure(f"{size} {layout} {kind} {dtype}", equality, size, layout, kind, dtype)
    if "resume" in args.measure:
        for layout in part.layouts:
            bench.measure(f"{first} saved by {layout}", save, first, layout)
        for source, layout in part.resumed:
            bench.measure(f"{first} {layout} resumed from {source}", resume, first, source, layout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
