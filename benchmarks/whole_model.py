# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Training steps, prefill and decoding of whole models on this machine, side by side with their peers.

    python -m benchmarks.whole_model --out benchmarks/results/whole_model-h200.json
    python -m benchmarks.whole_model --part train.small --part decode.small --seconds 30

Every part runs for itself, within its own time limit; one that fails is recorded with its error, and the file is
written after each. Peers come last, since they compile and tune their kernels at first. Training is AdamW on random
tokens in bf16, without activation checkpointing; parts named "train.graph" capture a whole step as a CUDA graph once
and replay it. Model FLOPs are those of the forward pass and twice that for the backward pass: two per active parameter
and token (the input embedding does none), causal latent attention, and three products of a vector with the state per
token and KDA head; their utilisation is relative to a large bf16 matrix product measured in the same run. Contexts of
decode steps are synthetic: a cache of the full size with random latents, read whole by each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import ROOT, environment, measure_ceilings, milliseconds, time_limit, write
from benchmarks.tuning import quick_tuning

VARIANTS: dict[str, dict[str, str]] = {
    "ours": {},
    "fla+grouped_mm": {"kda": "fla", "experts": "grouped_mm"},
    "torch": {"kda": "torch", "experts": "grouped_mm"},
}
"""What computes the KDA recurrence and the experts. With "torch" depth mixing and what surrounds the recurrence are in
their plain PyTorch form, too; the rest of the model is the same in all."""

MATCHED: dict[str, Any] = {
    "vocab_size": 32000,
    "num_hidden_layers": 12,
    "num_experts": 64,
    "moe_intermediate_size": 512,
    "num_shared_experts": 1,
    "routed_expert_hidden_size": None,
    "kv_lora_rank": 512,
}
"""`base` with the shape of `kimi_linear` below: the same projections and experts, and block attention residuals."""

KIMI_LINEAR = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "linear_num_heads": 8,
    "linear_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_local_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "mlp_layer_types": ["dense"] + ["sparse"] * 11,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Settings:
    """How large and how long.

    Attributes:
        rows, tokens: Of a training batch, and of a prefill.
        steps: Timed training steps.
        contexts: Cached tokens of decode steps.
        tiny: Begin with the smallest size in place of every other, for tests.
    """

    device: torch.device
    flops_per_s: float
    rows: int = 2
    tokens: int = 8192
    steps: int = 5
    contexts: tuple[int, ...] = (8192, 131072, 524288)
    tiny: bool = False


def build(size: str, settings: Settings, variant: str = "ours", **overrides: Any) -> Any:
    """A model of a ready-made size with random weights, bf16 as its `from_pretrained` would load it."""
    from deltalatent.configuration.sizes import size_config
    from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM

    torch.manual_seed(0)
    choice = VARIANTS[variant]
    config = size_config("tiny" if settings.tiny else size, **overrides)
    config.kda_implementation = choice.get("kda", "auto")
    with torch.device(settings.device):
        model: Any = KimiK3ForCausalLM(config)
    if "experts" in choice:
        model.set_experts_implementation(choice["experts"])
    return model.to(torch.bfloat16)


def build_kimi_linear(settings: Settings, accelerated: bool = False) -> Any:
    """Transformers' own predecessor model; with our operators in it if `accelerated`."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(0)
    fields: dict[str, Any] = dict(KIMI_LINEAR)
    if settings.tiny:
        small = dict.fromkeys(("hidden_size", "intermediate_size", "kv_lora_rank"), 32)
        small |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_head_dim"), 16)
        fields |= small | {"vocab_size": 64, "moe_intermediate_size": 16}
    with torch.device(settings.device):
        model: Any = KimiLinearForCausalLM(KimiLinearConfig(**fields))
    model.to(torch.bfloat16)
    if accelerated:
        from deltalatent.kernels import accelerate

        accelerate(model)
    return model


def forward_flops_per_token(model: torch.nn.Module, context: float) -> float:
    """Model FLOPs of one token that sees `context` tokens on average."""
    config: Any = model.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    share = getattr(config, "num_experts_per_tok", experts) / experts
    active = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name:
            active += parameter.numel() * (share if ".experts." in name else 1.0)
    heads, value_width = config.num_attention_heads, config.v_head_dim
    key_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    latent = config.layer_types.count("full_attention")
    attention = latent * 2 * heads * (key_width + value_width) * context
    recurrence = (len(config.layer_types) - latent) * 6 * config.linear_num_heads * config.linear_head_dim**2
    return 2 * active + attention + recurrence


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `step`, and what it returned, which every replay writes anew; before, it runs three times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled and libraries initialised, which a graph cannot hold
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def train(make: Callable[[], Any], settings: Settings, label: str, graph: bool = False) -> dict[str, Any]:
    """Tokens per second, memory and FLOP utilisation of whole optimizer steps; `graph`: replayed from a CUDA graph."""
    device = settings.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu, capturable=graph)
    vocabulary = model.config.vocab_size
    batches = torch.randint(3, vocabulary, (settings.steps + 2, settings.rows, settings.tokens), device=device)
    ids = batches[0].clone()

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step
    if graph:
        recorded, loss = capture(step)

        def run() -> torch.Tensor:
            recorded.replay()
            return loss

    seconds, host = [], []
    for batch in batches:
        ids.copy_(batch)
        synchronize(device)
        start = time.perf_counter()
        loss = run()
        host.append(time.perf_counter() - start)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    step_s = statistics.median(seconds[2:])
    tokens = settings.rows * settings.tokens
    flops = 3 * tokens * forward_flops_per_token(model, settings.tokens / 2)
    result: dict[str, Any] = {
        "label": label,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": [settings.rows, settings.tokens],
        "first_step_s": seconds[0],
        "step_ms": 1e3 * step_s,
        "host_ms": 1e3 * statistics.median(host[2:]),
        "tokens_per_s": tokens / step_s,
        "model_tflops_per_s": flops / step_s / 1e12,
        "flop_utilisation": flops / step_s / settings.flops_per_s,
        "loss": float(loss),
    }
    if on_gpu:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


@torch.no_grad()
def prefill(make: Callable[[], Any], settings: Settings, label: str) -> dict[str, Any]:
    """Tokens per second of one prompt of `tokens` and of `8 * tokens` in pieces of `tokens`, logits of the last."""
    device = settings.device
    from transformers import DynamicCache

    model = make().eval()
    result: dict[str, Any] = {"label": label}
    for pieces in (1, 8):
        ids = torch.randint(3, model.config.vocab_size, (1, pieces * settings.tokens), device=device)
        seconds = []
        for _ in range(3):
            cache = DynamicCache(config=model.config)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            synchronize(device)
            start = time.perf_counter()
            for piece in ids.split(settings.tokens, 1):
                model(input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        record = {"ms": 1e3 * min(seconds), "tokens_per_s": ids.shape[1] / min(seconds)}
        if device.type == "cuda":
            record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result[f"{ids.shape[1]}_tokens"] = record
    return result


@torch.no_grad()
def decode(make: Callable[[], Any], settings: Settings, label: str) -> dict[str, Any]:
    """Milliseconds per token of greedy decoding of one row: eager, and replayed from a CUDA graph."""
    from transformers import DynamicCache, StaticCache

    device = settings.device
    model = make().eval()
    result: dict[str, Any] = {"label": label}
    ids = torch.randint(3, model.config.vocab_size, (1, min(1024, settings.tokens)), device=device)

    cache: Any = DynamicCache(config=model.config)
    model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, -1:].clone()
    seconds = []
    for _ in range(24):
        synchronize(device)
        start = time.perf_counter()
        token = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    result["eager_ms_per_token"] = {str(ids.shape[1]): 1e3 * statistics.median(seconds[4:])}
    if device.type != "cuda":
        return result

    graphed: dict[str, Any] = {}
    for context in settings.contexts:
        cache = StaticCache(config=model.config, max_cache_len=context + 64)
        model(input_ids=ids[:, :16], cache=cache, use_cache=True, logits_to_keep=1)
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.keys.normal_()
                layer.values.normal_()
                layer.cumulative_length.fill_(context)
        token = ids[:, -1:].clone()

        def step(cache: Any = cache, token: torch.Tensor = token) -> None:
            token.copy_(model(input_ids=token, cache=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True))

        graph, _ = capture(step)
        times = []
        for _ in range(20):
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            graph.replay()
            end_event.record()
            torch.cuda.synchronize()
            times.append(start_event.elapsed_time(end_event))
        graphed[str(context)] = statistics.median(times)
        del graph, cache, step
        release()
    result["graph_ms_per_token"] = graphed
    return result


def attention_layer(settings: Settings, heads: int = 32) -> dict[str, Any]:
    """One layer of latent attention, plain, left-padded and packed: what lengths cost, and what an explicit mask does.

    "plain" ignores padding and documents: one causal batch of the same shape, which equal documents should reach.
    """
    from deltalatent.configuration.sizes import size_config
    from deltalatent.kernels.latent_attention import document_groups
    from deltalatent.kernels.sequence_layout import sequence_layout
    from deltalatent.modeling.latent_attention import CausalView, KimiK3LatentAttention

    device = settings.device
    config = size_config("tiny") if settings.tiny else size_config("base", num_attention_heads=heads, kv_lora_rank=512)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        layer = KimiK3LatentAttention(config, config.layer_types.index("full_attention")).to(torch.bfloat16)
    total = settings.tokens
    padded = torch.ones(4, total // 4, dtype=torch.bool, device=device)
    for row in range(1, 4):
        padded[row, : row * total // 40] = False
    weights = [0.26, 0.04, 0.21, 0.01, 0.12, 0.16, 0.02]
    uneven = [int(weight * total) for weight in weights]
    uneven.append(total - sum(uneven))
    cases = {
        "1_document": (1, {"cu_seqlens": [total]}),
        "8_equal_documents": (1, {"cu_seqlens": [total // 8] * 8}),
        "8_uneven_documents": (1, {"cu_seqlens": uneven}),
        "4_left_padded_rows": (4, {"attention_mask": padded}),
    }
    result: dict[str, Any] = {"heads": heads, "tokens": total}
    for name, (rows, description) in cases.items():
        if "cu_seqlens" in description:
            description = {"cu_seqlens": torch.tensor([0, *description["cu_seqlens"]], device=device).cumsum(0).int()}
        layout = sequence_layout(rows, total // rows, **description)
        documents = torch.zeros(rows, total // rows, dtype=torch.int64, device=device)
        if layout is not None and layout.documents is not None:
            documents = layout.documents
        mask = torch.ones(total // rows, total // rows, dtype=torch.bool, device=device).tril()
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        if rows > 1:
            mask = mask & padded[:, None, None, :]
        views = {"lengths": CausalView(groups=document_groups(layout)), "mask": mask, "plain": CausalView()}
        x = torch.randn(rows, total // rows, config.hidden_size, device=device, dtype=torch.bfloat16)
        if name == "8_equal_documents":
            views.pop("plain")  # of the row as it is; the batch to compare with has eight rows
            rows_apart = x.view(8, -1, x.shape[2])
        leaves = [x.requires_grad_(), *layer.parameters()]
        for kind, view in views.items():
            result[f"{name}.{kind}"] = _layer_ms(layer, x, view, leaves, device)
        if name == "8_equal_documents":
            result[f"{name}.plain"] = _layer_ms(layer, rows_apart, CausalView(), leaves, device)
    return result


def _layer_ms(layer: Any, x: torch.Tensor, view: Any, leaves: list[Any], device: torch.device) -> dict[str, float]:
    upstream = torch.randn_like(x)

    def forward() -> None:
        with torch.no_grad():
            layer(x, view)

    def both() -> None:
        torch.autograd.grad(layer(x, view)[0], leaves, upstream, allow_unused=True)

    return {"forward_ms": milliseconds(forward, device), "forward_backward_ms": milliseconds(both, device)}


def memory(make: Callable[..., Any], settings: Settings, label: str) -> dict[str, Any]:
    """What a training step keeps for its backward pass and takes at its peak, and the same of plain residuals.

    Both in GiB beyond what is there before the step (parameters). The bank is what depth mixing may add: the sums of
    the closed blocks.
    """
    if settings.device.type != "cuda":
        raise ValueError(
            f"memory is counted by the allocator of a GPU, got {settings.device.type}: use --device cuda."
        )
    result: dict[str, Any] = {"label": label}
    for name, options in (("ours", {}), ("plain_residuals", {"attn_res_block_size": None})):
        model = make(**options).train()
        ids = torch.randint(3, model.config.vocab_size, (settings.rows, settings.tokens), device=settings.device)
        for _ in range(2):  # kernels and libraries take some memory at first use
            model.zero_grad()
            release()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
        result[name] = {"kept_gib": kept / 2**30, "peak_gib": peak / 2**30}
        if model.config.attn_res_block_size is not None:
            blocks = sum(layer.closes_block for layer in model.model.layers)
            bank = blocks * ids.numel() * model.config.hidden_size * model.dtype.itemsize
            result["bank_gib"] = bank / 2**30
        del model, loss
    return result


def profile(make: Callable[[], Any], settings: Settings, label: str) -> dict[str, Any]:
    """The kernels of one training step, the longest first, and how much of the step the GPU was busy."""
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=settings.device.type == "cuda")
    ids = torch.randint(3, model.config.vocab_size, (settings.rows, settings.tokens), device=settings.device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    synchronize(settings.device)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds if settings.device.type == "cuda" else kinds[:1]) as recorded:
        start = time.perf_counter()
        step()
        synchronize(settings.device)
        wall = 1e3 * (time.perf_counter() - start)
    on_gpu = settings.device.type == "cuda"
    kernels: dict[str, list[float]] = {}
    for event in recorded.events():
        if on_gpu != (event.device_type == torch.autograd.DeviceType.CPU) and not event.is_user_annotation:
            entry = kernels.setdefault(event.name[:120], [0.0, 0])
            entry[0] += event.time_range.elapsed_us() / 1e3
            entry[1] += 1
    table = sorted(((ms, int(count), name) for name, (ms, count) in kernels.items()), reverse=True)
    return {
        "label": label,
        "wall_ms": wall,
        "busy_ms": sum(ms for ms, _, _ in table) if on_gpu else None,
        "launches": sum(count for _, count, _ in table),
        "kernels": [{"ms": ms, "count": count, "name": name} for ms, count, name in table[:80]],
    }


def first_call(settings: Settings) -> dict[str, Any]:
    """Seconds of the first prefill and of the first training step of `small`, with an empty kernel cache and again."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty_cache", "filled_cache"):
            command = [
                sys.executable,
                "-m",
                "benchmarks.whole_model",
                "--first-call",
                "--device",
                settings.device.type,
            ]
            command += ["--tiny"] if settings.tiny else []
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"TRITON_CACHE_DIR": folder}, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-600:])
            result[name] = json.loads(done.stdout.splitlines()[-1])
    return result


def time_first_call(settings: Settings) -> dict[str, float]:
    start = time.perf_counter()
    model = build("small", settings)
    synchronize(settings.device)
    result = {"build_s": time.perf_counter() - start}
    ids = torch.randint(3, model.config.vocab_size, (1, 64 if settings.tiny else 1024), device=settings.device)
    start = time.perf_counter()
    with torch.no_grad():
        model.eval()(input_ids=ids, logits_to_keep=1)
    synchronize(settings.device)
    result["prefill_s"] = time.perf_counter() - start
    start = time.perf_counter()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    synchronize(settings.device)
    result["training_step_s"] = time.perf_counter() - start
    return result


def parts(settings: Settings) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, most wanted first."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}

    def model(size: str, variant: str = "ours", **overrides: Any) -> Callable[[], Any]:
        return partial(build, size, settings, variant, **overrides)

    found["train.small.ours"] = partial(train, model("small"), settings, "small, ours")
    found["train.base.ours"] = partial(train, model("base"), settings, "base, ours")
    found["train.graph.small.ours"] = partial(train, model("small"), settings, "small, ours, a CUDA graph", True)
    found["train.graph.base.ours"] = partial(train, model("base"), settings, "base, ours, a CUDA graph", True)
    found["decode.small.ours"] = partial(decode, model("small"), settings, "small, ours")
    found["attention_layer"] = partial(attention_layer, settings)
    found["train.matched.ours"] = partial(
        train, model("base", **MATCHED), settings, "ours at the shape of kimi_linear"
    )
    found["train.graph.matched.ours"] = partial(
        train, model("base", **MATCHED), settings, "ours at the shape of kimi_linear, a CUDA graph", True
    )
    found["prefill.small.ours"] = partial(prefill, model("small"), settings, "small, ours")
    found["prefill.base.ours"] = partial(prefill, model("base"), settings, "base, ours")
    found["decode.base.ours"] = partial(decode, model("base"), settings, "base, ours")
    for size in ("small", "base"):
        found[f"memory.{size}"] = partial(memory, partial(build, size, settings), settings, size)
    found["train.small.fla"] = partial(
        train, model("small", "fla+grouped_mm"), settings, "small, flash-linear-attention and grouped_mm"
    )
    found["train.graph.small.fla"] = partial(
        train, model("small", "fla+grouped_mm"), settings, "small, the same, a CUDA graph", True
    )
    found["train.base.fla"] = partial(
        train, model("base", "fla+grouped_mm"), settings, "base, flash-linear-attention and grouped_mm"
    )
    found["train.graph.base.fla"] = partial(
        train, model("base", "fla+grouped_mm"), settings, "base, the same, a CUDA graph", True
    )
    found["train.kimi_linear"] = partial(
        train, partial(build_kimi_linear, settings), settings, "Transformers' kimi_linear as shipped"
    )
    found["train.kimi_linear.accelerated"] = partial(
        train, partial(build_kimi_linear, settings, True), settings, "Transformers' kimi_linear with our operators"
    )
    few = replace(settings, steps=1)
    found["train.small.torch"] = partial(train, model("small", "torch"), few, "small, plain PyTorch")
    found["train.base.torch"] = partial(train, model("base", "torch"), few, "base, plain PyTorch")
    # After what is timed: once a profiler has run, launches may stay slower.
    for size in ("small", "base"):
        found[f"profile.{size}"] = partial(profile, model(size), settings, f"{size}, ours")
    found["profile.matched"] = partial(profile, model("base", **MATCHED), settings, "ours at the shape of kimi_linear")
    found["first_call"] = partial(first_call, settings)
    return found


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(name: str, result: dict[str, Any]) -> str:
    """One line."""
    if "error" in result:
        return f"{name:<30} {result['error']}"
    if "tokens_per_s" in result:
        memory = f"{result['peak_gib']:6.1f} GiB" if "peak_gib" in result else ""
        return (
            f"{name:<30} {result['step_ms']:9.1f} ms {result['tokens_per_s']:9.0f} tokens/s "
            f"{result['flop_utilisation']:6.1%} of the matrix rate {memory}"
        )
    short = {key: value for key, value in result.items() if key not in ("label", "kernels")}
    return f"{name:<30} {json.dumps(short)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if every part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_model", description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", help="part or beginning of its name; repeatable (default: all)")
    parser.add_argument("--out", type=Path, help="result file (default: only print)")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of a part (default: 120)")
    parser.add_argument("--total-seconds", type=float, default=float("inf"), help="begin no further part after these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true", help="the smallest models, to try the script")
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)  # the child of that part
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    device = torch.device(options.device)
    settings = Settings(device, flops_per_s=1.0)
    if options.tiny:
        settings = replace(settings, rows=1, tokens=32, steps=1, contexts=(128, 256), tiny=True)
    if options.first_call:
        print(json.dumps(time_first_call(settings)))
        return 0
    ceilings = measure_ceilings(device)
    settings = replace(settings, flops_per_s=ceilings["flops_per_s"])
    report: dict[str, Any] = {"environment": environment(device), "ceilings": ceilings, "results": {}}
    wanted = {
        name: run for name, run in parts(settings).items() if not options.part or name.startswith(tuple(options.part))
    }
    if not wanted:
        parser.error(f"--part must be the beginning of one of {', '.join(parts(settings))}, got {options.part}")
    for name, run in wanted.items():
        if time.perf_counter() - begun > options.total_seconds:
            report["results"][name] = {"error": "not begun: out of time"}
            continue
        try:
            with time_limit(options.seconds), quick_tuning():
                report["results"][name] = run()
        except Exception as error:  # a peer may be absent or out of memory: that is a result, too
            report["results"][name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(describe(name, report["results"][name]), flush=True)
        write(report, options.out)
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # one for each stream that a graph was captured on
        release()
    write(report, options.out)
    return int(all("error" in result for result in report["results"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
