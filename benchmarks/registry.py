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

from deltalatent.kernels.gated_rms_norm import gated_rms_norm
from deltalatent.kernels.kda import kda_chunk, kda_recurrent
from deltalatent.kernels.latent_attention import latent_attention
from deltalatent.kernels.short_conv import short_convolution

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
        tests: files, or tests of files, that must pass on the machine before it is timed.
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

    @functools.cache
    def compiled() -> Callable[[Case], Tensors]:
        return torch.compile(lambda case: run("torch", case), dynamic=False)

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
        tests=("tests/kernels/test_latent_attention_triton.py::test_released_widths",),
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
        | {"64x8k-H32": {"H": 32, "S": 8192} | RELEASED_LATENT | {"B": 64}},
        tiny={"B": 1, "T": 1, "H": 2, "S": 12, "R": 16, "Q": 8},
        modes=(FORWARD,),
    ),
}
