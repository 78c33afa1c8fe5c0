# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What is measured: for every operator its shapes, inputs, peers, and the least work that a chip must do for it.

The floor of a call is the larger of two times: the bytes it must move (every input read once, every output written
once) at the copy bandwidth of the device, and the floating-point operations it must do at the rate of a large matrix
product. Both ceilings are measured in the run that uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from deltalatent.kernels.attn_res import attention_residual_mix
from deltalatent.kernels.experts import grouped_experts
from deltalatent.kernels.gated_rms_norm import gated_rms_norm
from deltalatent.kernels.kda import kda_chunk, kda_recurrent
from deltalatent.kernels.latent_attention import latent_attention
from deltalatent.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from deltalatent.kernels.router import choose_experts
from deltalatent.kernels.short_conv import short_convolution
from deltalatent.kernels.situ import situ_glu, situ_glu_reference

Dims = Mapping[str, int]
Tensors = tuple[torch.Tensor, ...]

FORWARD = "forward"
FORWARD_BACKWARD = "forward+backward"


@dataclass
class Case:
    """Inputs of one call.

    Attributes:
        tensors: arguments by name: tensors, tuples of tensors, or None.
        differentiable: names of the arguments whose gradients are wanted; none for a decode step.
    """

    tensors: dict[str, Any]
    differentiable: tuple[str, ...] = ()

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that get gradients, in order."""
        found: list[torch.Tensor] = []
        for name in self.differentiable:
            value = self.tensors[name]
            found.extend(value if isinstance(value, tuple) else [value])
        return found


@dataclass(frozen=True)
class Work:
    """Least bytes moved and floating-point operations done, of the forward and of the backward pass."""

    forward_bytes: float
    forward_flops: float = 0.0
    backward_bytes: float = 0.0
    backward_flops: float = 0.0


@dataclass(frozen=True)
class Operator:
    """An operator under measurement.

    Attributes:
        tests: files that must pass on the machine before it is timed.
        make: `(dims, dtype, device) -> Case`.
        work: `(dims, bytes per element) -> Work`.
        implementations: by name, `Case -> outputs`; the first is ours.
        shapes: dims by readable name; `tiny` is for tests.
        modes: passes that exist.
    """

    tests: tuple[str, ...]
    make: Callable[[Dims, torch.dtype, torch.device], Case]
    work: Callable[[Dims, int], Work]
    implementations: Mapping[str, Callable[[Case], Tensors]]
    shapes: Mapping[str, Dims]
    tiny: Dims
    modes: tuple[str, ...] = (FORWARD, FORWARD_BACKWARD)


def equal_documents(dims: Dims, device: torch.device) -> torch.Tensor | None:
    """Offsets of `documents` documents of one length, or None where the dims name none."""
    if "documents" not in dims:
        return None
    return torch.arange(dims["documents"] + 1, device=device, dtype=torch.int32) * (dims["T"] // dims["documents"])


def _compiled(run: Callable[..., Tensors]) -> Callable[[Case], Tensors]:
    """`run(impl, case)` with the PyTorch form, compiled at the first call of a shape."""
    return _compiled_peer(lambda case: run("torch", case))


def _compiled_peer(run: Callable[[Case], Tensors]) -> Callable[[Case], Tensors]:
    @functools.cache
    def compiled() -> Callable[[Case], Tensors]:
        return torch.compile(run, dynamic=False)

    return lambda case: compiled()(case)


# KDA


def _kda_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    """Gates spread over the whole range between no decay and the bound, as the log-uniform initialisation does."""
    B, T, H, K, V = (dims[letter] for letter in "BTHKV")

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    tensors = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, H, V),
        "g": 2 * normal(B, T, H, K),
        "beta": normal(B, T, H),
        "A_log": 0.5 * normal(H, dtype=torch.float32),
        "dt_bias": normal(H * K, dtype=torch.float32),
        "cu_seqlens": equal_documents(dims, device),
    }
    return Case(tensors, ("q", "k", "v", "g", "beta", "A_log", "dt_bias"))


def _kda_chunk(impl: str, case: Case) -> Tensors:
    return kda_chunk(**case.tensors, impl=impl)[:1]


def _kda_chunk_work(dims: Dims, size: int) -> Work:
    """q, k, g [K], v, o [V]; three products of a vector with the state per token, and twice that backwards."""
    B, T, H, K, V = (dims[letter] for letter in "BTHKV")
    tokens = B * T * H
    forward = tokens * size * (3 * K + 2 * V + 1)
    backward = tokens * size * (6 * K + 3 * V + 2)
    return Work(forward, 6.0 * tokens * K * V, backward, 12.0 * tokens * K * V)


def _kda_forward_work(dims: Dims, size: int) -> Work:
    work = _kda_chunk_work(dims, size)
    return Work(work.forward_bytes, work.forward_flops)


def _kda_step_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    case = _kda_case(dims, dtype, device)
    case.differentiable = ()
    del case.tensors["cu_seqlens"]
    shape = (dims["B"], dims["H"], dims["K"], dims["V"])
    case.tensors["initial_state"] = 0.1 * torch.randn(shape, dtype=torch.float32, device=device)
    return case


def _kda_step(impl: str, case: Case) -> Tensors:
    return kda_recurrent(**case.tensors, inplace_state=True, impl=impl)[:1]


def _kda_step_fla(case: Case) -> Tensors:
    """The peer's own in-place entry point: its public one allocates the new state."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    return fused_recurrent_kda_fwd(
        **case.tensors,
        inplace_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=-5.0,
    )


def _kda_step_work(dims: Dims, size: int) -> Work:
    """The float32 state is read and written; everything else is small beside it."""
    B, T, H, K, V = (dims[letter] for letter in "BTHKV")
    heads = B * H
    return Work(heads * (8 * K * V + T * size * (3 * K + 2 * V + 1)), 6.0 * heads * T * K * V)


# Short convolution


def _conv_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    B, T, D, W, S = (dims[letter] for letter in "BTDWS")
    x = tuple(torch.randn(B, T, D, dtype=dtype, device=device) for _ in range(S))
    weight = tuple(torch.randn(D, 1, W, dtype=torch.float32, device=device) for _ in range(S))
    return Case({"x": x, "weight": weight, "cu_seqlens": equal_documents(dims, device)}, ("x", "weight"))


def _conv(impl: str, case: Case) -> Tensors:
    return tuple(short_convolution(**case.tensors, impl=impl)[0])


def _conv_fla(case: Case) -> Tensors:
    from fla.modules.causal_conv1d import causal_conv1d

    xs, weights, cu_seqlens = case.tensors.values()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.long()
    return tuple(
        causal_conv1d(x, weight[:, 0], activation="silu", backend="triton", cu_seqlens=cu_seqlens)[0]
        for x, weight in zip(xs, weights, strict=True)
    )


def _conv_work(dims: Dims, size: int) -> Work:
    """x, y; then x, dy, dx."""
    elements = dims["B"] * dims["T"] * dims["D"] * dims["S"]
    return Work(2 * elements * size, 0.0, 3 * elements * size)


def _conv_step_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    case = _conv_case(dims, dtype, device)
    case.differentiable = ()
    del case.tensors["cu_seqlens"]
    shape = (dims["B"], dims["D"], dims["W"] - 1)
    case.tensors["initial_state"] = tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(dims["S"]))
    return case


def _conv_step(impl: str, case: Case) -> Tensors:
    return tuple(short_convolution(**case.tensors, inplace_state=True, impl=impl)[0])


def _conv_step_work(dims: Dims, size: int) -> Work:
    B, T, D, W, S = (dims[letter] for letter in "BTDWS")
    return Work(S * D * (B * size * (2 * T + 2 * (W - 1)) + 4 * W))


# Gated RMS norm


def _norm_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    shape = tuple(dims[letter] for letter in "BTHV")
    x, gate = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(dims["V"], dtype=torch.float32, device=device)
    return Case({"x": x, "gate": gate, "weight": weight}, ("x", "gate", "weight"))


def _norm(impl: str, case: Case) -> Tensors:
    return (gated_rms_norm(**case.tensors, eps=1e-5, impl=impl),)


def _norm_fla(case: Case) -> Tensors:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    x, gate, weight = case.tensors.values()
    return (rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=1e-5),)


def _norm_work(dims: Dims, size: int) -> Work:
    """x, gate, y; then x, gate, dy, dx, dgate."""
    elements = dims["B"] * dims["T"] * dims["H"] * dims["V"]
    return Work(3 * elements * size, 0.0, 5 * elements * size)


# Latent attention, absorbed


def _latent_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    B, T, H, S, R, Q = (dims[letter] for letter in "BTHSRQ")
    shapes = {"query": (B, T, H, R), "shared_query": (B, T, H, Q), "latent": (B, S, R), "shared_key": (B, S, Q)}
    return Case({name: torch.randn(shape, dtype=dtype, device=device) for name, shape in shapes.items()})


def _latent(impl: str, case: Case) -> Tensors:
    return (latent_attention(**case.tensors, scale=0.07, impl=impl),)


def _latent_sdpa(case: Case) -> Tensors:
    """PyTorch's attention with the heads of one token as queries of one head, so that it does not copy the cache."""
    query, shared_query, latent, shared_key = case.tensors.values()
    queries, keys = torch.cat([query, shared_query], -1), torch.cat([latent, shared_key], -1)
    return (scaled_dot_product_attention(queries, keys[:, None], latent[:, None], scale=0.07),)


def _latent_work(dims: Dims, size: int) -> Work:
    """Queries and cache are read, outputs written; two products of every query with every latent."""
    B, T, H, S, R, Q = (dims[letter] for letter in "BTHSRQ")
    return Work(B * size * (S * (R + Q) + T * H * (2 * R + Q)), 2.0 * B * T * H * S * (2 * R + Q))


# SiTU-GLU


def _situ_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    gate, up = (4 * torch.randn(dims["B"], dims["T"], dims["I"], dtype=dtype, device=device) for _ in range(2))
    return Case({"gate": gate, "up": up}, ("gate", "up"))


def _situ(impl: str, case: Case) -> Tensors:
    return (situ_glu(**case.tensors, beta=4.0, linear_beta=25.0, impl=impl),)


def _situ_work(dims: Dims, size: int) -> Work:
    """Both branches and the result; then these and their gradients."""
    elements = dims["B"] * dims["T"] * dims["I"]
    return Work(3 * elements * size, 0.0, 5 * elements * size)


# Routed experts


def _experts_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    """K different experts per token, all equally likely."""
    T, K, E, Z, I = (dims[letter] for letter in "TKEZI")  # noqa: E741

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=shape[-1] ** -0.5)

    tensors = {
        "hidden_states": torch.randn(T, Z, dtype=dtype, device=device),
        "gate_up_proj": normal(E, 2 * I, Z),
        "down_proj": normal(E, Z, I),
        "top_k_index": torch.rand(T, E, device=device).topk(K, dim=1).indices,
        "top_k_weights": torch.rand(T, K, device=device),
    }
    return Case(tensors, ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights"))


def _experts(impl: str, case: Case) -> Tensors:
    return (grouped_experts(**case.tensors, impl=impl),)


def _experts_grouped_mm(case: Case) -> Tensors:
    """PyTorch's grouped products with everything around them in eager PyTorch, as Transformers' `grouped_mm` does."""
    x, gate_up, down, index, weights = case.tensors.values()
    expert, order = index.flatten().sort()
    ends = torch.histc(expert.int(), bins=gate_up.shape[0], max=gate_up.shape[0] - 1).cumsum(0, dtype=torch.int32)
    hidden = torch._grouped_mm(x[order // index.shape[1]], gate_up.mT, offs=ends)
    activated = situ_glu_reference(*hidden.chunk(2, dim=-1), 4.0, 25.0)
    y = torch._grouped_mm(activated, down.mT, offs=ends)
    y = y * weights.flatten()[order, None]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (y[inverse].unflatten(0, index.shape).sum(1).to(x.dtype),)


def _experts_work(dims: Dims, size: int) -> Work:
    """Weights of the experts in use, tokens and output; backwards the weights' gradients besides."""
    T, K, E, Z, I = (dims[letter] for letter in "TKEZI")  # noqa: E741
    used = E * (1 - (1 - K / E) ** T)
    weights, tokens = used * 3 * Z * I * size, T * Z * size
    flops = 6.0 * T * K * Z * I
    return Work(weights + 2 * tokens + 12 * T * K, flops, 2 * weights + 3 * tokens + 16 * T * K, 2 * flops)


def _experts_step_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    case = _experts_case(dims, dtype, device)
    case.differentiable = ()
    return case


def _experts_step_work(dims: Dims, size: int) -> Work:
    work = _experts_work(dims, size)
    return Work(work.forward_bytes, work.forward_flops)


# Router


def _router_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    """Logits are float32 whatever the dtype of the model."""
    logits = torch.randn(dims["T"], dims["E"], device=device)
    bias = 0.1 * torch.randn(dims["E"], device=device)
    return Case({"logits": logits, "bias": bias, "slots": torch.arange(dims["K"])}, ("logits",))


def _router(impl: str, case: Case) -> Tensors:
    logits, bias, slots = case.tensors.values()
    choice = choose_experts(logits, bias, len(slots), impl=impl)
    return choice.scores, choice.weights


def _router_work(dims: Dims, size: int) -> Work:
    """Logits and scores, index and weights; then scores and gradients of both kinds."""
    T, K, E = (dims[letter] for letter in "TKE")
    return Work(T * (8 * E + 12 * K), 0.0, T * (12 * E + 20 * K))


# Depth mixing


def _mix_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    B, T, D, S = (dims[letter] for letter in "BTDS")
    sources = tuple(torch.randn(B, T, D, dtype=dtype, device=device) for _ in range(S))
    query, key_weight, norm_weight = (torch.randn(D, dtype=dtype, device=device) for _ in range(3))
    tensors = {"sources": sources, "query": query / D**0.5, "key_weight": key_weight, "norm_weight": norm_weight}
    return Case(tensors, tuple(tensors))


def _mix(impl: str, case: Case) -> Tensors:
    return (attention_residual_mix(**case.tensors, eps=1e-5, norm_eps=1e-5, impl=impl),)


def _mix_definition(case: Case) -> Tensors:
    """As one would write it down: a stack of all sources, softmax, weighted sum, norm."""
    sources, query, key_weight, norm_weight = case.tensors.values()
    stack = torch.stack(sources).float()
    keys = torch.nn.functional.rms_norm(stack, stack.shape[-1:], key_weight.float(), 1e-5)
    weights = torch.softmax(keys @ query.float(), dim=0)
    mixed = (weights[..., None] * stack).sum(0)
    return (torch.nn.functional.rms_norm(mixed, mixed.shape[-1:], norm_weight.float(), 1e-5).to(sources[0].dtype),)


def _mix_work(dims: Dims, size: int) -> Work:
    """Sources, output; then sources, gradient of the output, gradients of the sources."""
    elements = dims["B"] * dims["T"] * dims["D"] * size
    return Work((dims["S"] + 1) * elements, 0.0, (2 * dims["S"] + 1) * elements)


def _mix_step_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    case = _mix_case(dims, dtype, device)
    case.differentiable = ()
    return case


def _mix_step_work(dims: Dims, size: int) -> Work:
    return Work(_mix_work(dims, size).forward_bytes)


# Loss of a linear head


def _loss_case(dims: Dims, dtype: torch.dtype, device: torch.device) -> Case:
    B, T, D, V = (dims[letter] for letter in "BTDV")
    hidden_states = torch.randn(B, T, D, dtype=dtype, device=device)
    weight = torch.randn(V, D, dtype=dtype, device=device) / D**0.5
    targets = torch.randint(V, (B, T), device=device)
    return Case({"hidden_states": hidden_states, "weight": weight, "targets": targets}, ("hidden_states", "weight"))


def _loss(impl: str, case: Case) -> Tensors:
    return (linear_cross_entropy(**case.tensors, impl=impl),)


def _loss_of_all_logits(case: Case) -> Tensors:
    return (linear_cross_entropy_reference(**case.tensors),)


def _loss_work(dims: Dims, size: int) -> Work:
    """A product of the hidden states with the weight, and two of their size for the gradients."""
    tokens, D, V = dims["B"] * dims["T"], dims["D"], dims["V"]
    inputs = (tokens + V) * D * size
    return Work(inputs, 2.0 * tokens * D * V, 2 * inputs, 4.0 * tokens * D * V)


def _implementations(
    run: Callable[[str, Case], Tensors], fla: Callable[[Case], Tensors] | None = None
) -> dict[str, Callable[[Case], Tensors]]:
    return {
        "triton": lambda case: run("triton", case),
        "torch": lambda case: run("torch", case),
        "torch.compile": _compiled(run),
        "fla": fla or (lambda case: run("fla", case)),
    }


HEAD = {"K": 128, "V": 128}
RELEASED_EXPERTS = {"B": 1, "K": 16, "E": 896, "Z": 1792, "I": 1536}
STREAMS = {"W": 4, "S": 3}
SMALL_LATENT = {"B": 1, "T": 1, "R": 192, "Q": 32}
RELEASED_LATENT = {"B": 1, "T": 1, "R": 512, "Q": 64}
CONTEXTS = {"8k": 8192, "128k": 131072, "512k": 524288, "1M": 1048576}

OPERATORS: dict[str, Operator] = {
    "kda_chunk": Operator(
        tests=("tests/kernels/test_kda_reference.py", "tests/kernels/test_kda_triton.py"),
        make=_kda_case,
        work=_kda_chunk_work,
        implementations=_implementations(_kda_chunk),
        shapes={
            "T8192-H96": {"B": 1, "T": 8192, "H": 96} | HEAD,
            "T8192-H32": {"B": 1, "T": 8192, "H": 32} | HEAD,
            "8x1024-H32": {"B": 8, "T": 1024, "H": 32} | HEAD,
            "T65536-H32": {"B": 1, "T": 65536, "H": 32} | HEAD,
            "T65536-H8": {"B": 1, "T": 65536, "H": 8} | HEAD,
            "16-packed-T8192-H32": {"B": 1, "T": 8192, "H": 32, "documents": 16} | HEAD,
        },
        tiny={"B": 1, "T": 12, "H": 2, "K": 16, "V": 16, "documents": 3},
    ),
    # Time against length and against the number of heads.
    "kda_chunk_curves": Operator(
        tests=("tests/kernels/test_kda_reference.py", "tests/kernels/test_kda_triton.py"),
        make=_kda_case,
        work=_kda_forward_work,
        implementations={name: run for name, run in _implementations(_kda_chunk).items() if name != "torch.compile"},
        shapes={f"T{4**n}k-H32": {"B": 1, "T": 1024 * 4**n, "H": 32} | HEAD for n in range(6)}
        | {f"T64k-H{H}": {"B": 1, "T": 65536, "H": H} | HEAD for H in (4, 8, 16, 64, 96)},
        tiny={"B": 1, "T": 12, "H": 2, "K": 16, "V": 16},
        modes=(FORWARD,),
    ),
    "kda_recurrent": Operator(
        tests=("tests/kernels/test_kda_recurrent_triton.py",),
        make=_kda_step_case,
        work=_kda_step_work,
        implementations=_implementations(_kda_step, _kda_step_fla),
        shapes={
            "B64-H96": {"B": 64, "T": 1, "H": 96} | HEAD,
            "B256-H32": {"B": 256, "T": 1, "H": 32} | HEAD,
            "B1-H96": {"B": 1, "T": 1, "H": 96} | HEAD,
        },
        tiny={"B": 2, "T": 1, "H": 2, "K": 16, "V": 16},
        modes=(FORWARD,),
    ),
    "short_conv": Operator(
        tests=("tests/kernels/test_short_conv.py",),
        make=_conv_case,
        work=_conv_work,
        implementations=_implementations(_conv, _conv_fla),
        shapes={
            "T8192-D12288": {"B": 1, "T": 8192, "D": 12288} | STREAMS,
            "8x1024-D4096": {"B": 8, "T": 1024, "D": 4096} | STREAMS,
            "16-packed-T8192-D4096": {"B": 1, "T": 8192, "D": 4096, "documents": 16} | STREAMS,
        },
        tiny={"B": 1, "T": 12, "D": 8, "documents": 3} | STREAMS,
    ),
    "short_conv_step": Operator(
        tests=("tests/kernels/test_short_conv.py",),
        make=_conv_step_case,
        work=_conv_step_work,
        implementations={name: run for name, run in _implementations(_conv_step).items() if name != "fla"},
        shapes={"B64-D12288": {"B": 64, "T": 1, "D": 12288} | STREAMS},
        tiny={"B": 2, "T": 1, "D": 8} | STREAMS,
        modes=(FORWARD,),
    ),
    "gated_rms_norm": Operator(
        tests=("tests/kernels/test_gated_rms_norm.py",),
        make=_norm_case,
        work=_norm_work,
        implementations=_implementations(_norm, _norm_fla),
        shapes={
            "T8192-H96": {"B": 1, "T": 8192, "H": 96, "V": 128},
            "T8192-H32": {"B": 1, "T": 8192, "H": 32, "V": 128},
        },
        tiny={"B": 1, "T": 6, "H": 2, "V": 16},
    ),
    "latent_attention": Operator(
        tests=("tests/kernels/test_latent_attention.py", "tests/kernels/test_latent_attention_triton.py"),
        make=_latent_case,
        work=_latent_work,
        implementations={
            "triton": lambda case: _latent("triton", case),
            "torch": lambda case: _latent("torch", case),
            "sdpa": _latent_sdpa,
        },
        shapes={
            f"{context}-H{heads}": {"H": heads, "S": tokens} | RELEASED_LATENT
            for heads in (32, 64, 96)
            for context, tokens in CONTEXTS.items()
        }
        | {
            f"{context}-small": {"B": 1, "T": 1, "H": 8, "S": CONTEXTS[context], "R": 192, "Q": 32}
            for context in CONTEXTS
        }
        | {f"64x8k-H{heads}": {"H": heads, "S": 8192} | RELEASED_LATENT | {"B": 64} for heads in (32, 64, 96)},
        tiny={"B": 1, "T": 1, "H": 2, "S": 12, "R": 16, "Q": 8},
        modes=(FORWARD,),
    ),
    "situ_glu": Operator(
        tests=("tests/kernels/test_situ.py",),
        make=_situ_case,
        work=_situ_work,
        implementations={name: run for name, run in _implementations(_situ).items() if name != "fla"},
        shapes={"T8192-I3072": {"B": 1, "T": 8192, "I": 3072}},
        tiny={"B": 1, "T": 3, "I": 8},
    ),
    "experts": Operator(
        tests=("tests/kernels/test_experts.py",),
        make=_experts_case,
        work=_experts_work,
        implementations={
            "triton": lambda case: _experts("triton", case),
            "torch": lambda case: _experts("torch", case),
            "grouped_mm": _experts_grouped_mm,
        },
        shapes={
            "T8192-release": {"T": 8192} | RELEASED_EXPERTS,
            "T16384-base": {"B": 1, "T": 16384, "K": 8, "E": 128, "Z": 512, "I": 256},
            "T16384-small": {"B": 1, "T": 16384, "K": 8, "E": 96, "Z": 256, "I": 128},
        },
        tiny={"B": 1, "T": 6, "K": 2, "E": 4, "Z": 8, "I": 4},
    ),
    "experts_step": Operator(
        tests=("tests/kernels/test_experts.py",),
        make=_experts_step_case,
        work=_experts_step_work,
        implementations={
            "triton": lambda case: _experts("triton", case),
            "torch": lambda case: _experts("torch", case),
            "grouped_mm": _experts_grouped_mm,
        },
        shapes={f"T{tokens}-release": {"T": tokens} | RELEASED_EXPERTS for tokens in (1, 8, 64)},
        tiny={"B": 1, "T": 2, "K": 2, "E": 4, "Z": 8, "I": 4},
        modes=(FORWARD,),
    ),
    "router": Operator(
        tests=("tests/kernels/test_router.py",),
        make=_router_case,
        work=_router_work,
        implementations={name: run for name, run in _implementations(_router).items() if name != "fla"},
        shapes={
            "T8192-E896": {"B": 1, "T": 8192, "K": 16, "E": 896},
            "T16384-E128": {"B": 1, "T": 16384, "K": 8, "E": 128},
        },
        tiny={"B": 1, "T": 6, "K": 2, "E": 4},
    ),
    "attn_res": Operator(
        tests=("tests/kernels/test_attn_res.py",),
        make=_mix_case,
        work=_mix_work,
        implementations={
            "triton": lambda case: _mix("triton", case),
            "torch": lambda case: _mix("torch", case),
            "definition": _mix_definition,
            "torch.compile": _compiled_peer(_mix_definition),
        },
        shapes={
            "T8192-D7168-S9": {"B": 1, "T": 8192, "D": 7168, "S": 9},
            "T32768-D2048-S9": {"B": 1, "T": 32768, "D": 2048, "S": 9},
            "T8192-D1024-S5": {"B": 1, "T": 8192, "D": 1024, "S": 5},
        },
        tiny={"B": 1, "T": 6, "D": 8, "S": 3},
    ),
    "attn_res_step": Operator(
        tests=("tests/kernels/test_attn_res.py",),
        make=_mix_step_case,
        work=_mix_step_work,
        implementations={
            "triton": lambda case: _mix("triton", case),
            "torch": lambda case: _mix("torch", case),
            "torch.compile": _compiled_peer(_mix_definition),
        },
        shapes={
            "B1-D7168-S9": {"B": 1, "T": 1, "D": 7168, "S": 9},
            "B64-D7168-S9": {"B": 64, "T": 1, "D": 7168, "S": 9},
            "B1-D1024-S5": {"B": 1, "T": 1, "D": 1024, "S": 5},
        },
        tiny={"B": 2, "T": 1, "D": 8, "S": 3},
        modes=(FORWARD,),
    ),
    "linear_cross_entropy": Operator(
        tests=("tests/kernels/test_linear_cross_entropy.py",),
        make=_loss_case,
        work=_loss_work,
        implementations={
            "triton": lambda case: _loss("triton", case),
            "torch": lambda case: _loss("torch", case),
            "all logits": _loss_of_all_logits,
            "torch.compile": _compiled_peer(_loss_of_all_logits),
        },
        shapes={
            "T8192-D1024-V163840": {"B": 1, "T": 8192, "D": 1024, "V": 163840},
            "T8192-D512-V163840": {"B": 1, "T": 8192, "D": 512, "V": 163840},
        },
        tiny={"B": 1, "T": 6, "D": 8, "V": 20},
    ),
}
