# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Gated RMS norm: the equation in float64 → the PyTorch form → Triton; gradients, precision, messages."""

import pytest
import torch

from deltalatent.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from tests.kernels.test_kda_triton import unwritten_memory_is_nan
from tests.kernels.triton_testing import DEVICE, assert_as_exact_as_plain, needs_triton, run_under_interpreter

EPS = 1e-5


def random_case(shape, dtype=torch.float64, gate_dtype=None, device="cpu"):
    x = torch.randn(shape, dtype=dtype, device=device)
    gate = 2 * torch.randn(shape, dtype=gate_dtype or dtype, device=device)
    weight = torch.randn(shape[-1], dtype=torch.promote_types(dtype, torch.float32), device=device)
    return x, gate, weight


def test_reference_is_the_equation():
    x, gate, weight = random_case((2, 3, 7))
    y = gated_rms_norm(x, gate, weight, EPS)
    for i in range(2):
        for j in range(3):
            row = x[i, j]
            rms = (sum(value**2 for value in row) / 7 + EPS) ** 0.5
            expected = row / rms * weight / (1 + torch.exp(-gate[i, j]))
            torch.testing.assert_close(y[i, j], expected, rtol=1e-12, atol=1e-12)


def test_reference_gradients():
    tensors = [tensor.requires_grad_() for tensor in random_case((2, 3, 5))]
    assert torch.autograd.gradcheck(lambda x, gate, weight: gated_rms_norm_reference(x, gate, weight, EPS), tensors)


def test_epsilon_decides_for_tiny_rows():
    """A read-out far below the root of epsilon is scaled by 1/sqrt(epsilon), and zero stays zero with a gradient."""
    x = torch.tensor([[1e-6, -1e-6], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    y = gated_rms_norm(x, torch.full_like(x, 50.0), torch.ones(2), EPS)
    torch.testing.assert_close(y, x * EPS**-0.5, rtol=1e-6, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad[1], torch.full((2,), EPS**-0.5, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_result_has_the_dtype_of_the_gate_and_is_rounded_once(gate_dtype):
    x, gate, weight = random_case((5, 64), torch.float32, gate_dtype)
    y = gated_rms_norm(x, gate, weight, EPS)
    assert y.dtype == gate_dtype
    exact = gated_rms_norm(x.double(), gate.double(), weight.double(), EPS)
    assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(gate_dtype).eps / 2 * 1.01 + 1e-6).all()


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_saturated_gate_is_finite(logit):
    x = torch.randn(3, 8, requires_grad=True)
    y = gated_rms_norm(x, torch.full_like(x, logit), torch.ones(8), EPS)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def test_compiles_without_graph_break():
    x, gate, weight = random_case((3, 8), torch.float32)

    def run(x, gate):
        return gated_rms_norm(x, gate, weight, EPS)

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x, gate), run(x, gate))


X = torch.zeros(2, 3, 8)


@pytest.mark.parametrize(
    ("x", "gate", "weight", "options", "error", "message"),
    [
        (X.long(), X, X[0, 0], {}, TypeError, "`x` must be a floating tensor, got torch.int64"),
        (X, X[:1], X[0, 0], {}, ValueError, r"`gate` must have the shape \[2, 3, 8\] of `x`, got \[1, 3, 8\]"),
        (X, X, X[0], {}, ValueError, r"`weight` must have shape \[V\] = \[8\], got \[3, 8\]"),
        (X[..., :0], X[..., :0], X[0, 0, :0], {}, ValueError, "V > 0"),
        (X, X.to("meta"), X[0, 0], {}, ValueError, "`gate` must be on the device of `x`, cpu, got meta"),
        (X, X, X[0, 0], {"eps": -1.0}, ValueError, "`eps` must be at least 0, got -1.0"),
        (X, X, X[0, 0], {"eps": float("nan")}, ValueError, "`eps` must be at least 0, got nan"),
        (X, X, X[0, 0], {"impl": "cuda"}, ValueError, "must be one of 'auto', 'triton', 'torch', got 'cuda'"),
        (X.double(), X, X[0, 0], {"impl": "triton"}, TypeError, "float32, float16 or bfloat16, got torch.float64"),
        (
            X[:1, :1, :1].expand(1, 1, 5000),
            X[:1, :1, :1].expand(1, 1, 5000),
            X[0, 0, :1].expand(5000),
            {"impl": "triton"},
            ValueError,
            "up to 4096 channels, got 5000",
        ),
    ],
    ids=["int", "gate", "weight", "empty", "device", "eps", "eps-nan", "impl", "float64", "wide"],
)
def test_messages(x, gate, weight, options, error, message):
    with pytest.raises(error, match=message):
        gated_rms_norm(x, gate, weight, **({"eps": EPS} | options))


# Triton


def evaluate(impl, tensors, dtype=None):
    """Output and all gradients of `sum(y*dy)`; `dtype` casts everything."""
    x, gate, weight, dy = (tensor.detach().clone().to(dtype or tensor.dtype) for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (x, gate, weight)]
    y = gated_rms_norm(*leaves, EPS, impl=impl)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def check_triton(shape, dtype, gate_dtype=None):
    tensors = random_case(shape, dtype, gate_dtype, DEVICE)
    tensors = (*tensors, torch.randn_like(tensors[1]))
    results = [evaluate("triton", tensors), evaluate("torch", tensors, torch.float64), evaluate("torch", tensors)]
    for name, *triple in zip(("y", "dx", "dgate", "dweight"), *results, strict=True):
        assert_as_exact_as_plain(*triple, name)


@needs_triton
@pytest.mark.parametrize("shape", [(1, 16), (2, 3, 5, 60), (7, 128), (3, 257), (70, 32)], ids=str)
def test_triton_equals_torch(shape):
    check_triton(shape, torch.float32)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "gate_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.bfloat16)],
    ids=["bfloat16", "float16", "float32-with-bfloat16-gate"],
)
def test_triton_in_half_precision(dtype, gate_dtype):
    check_triton((3, 5, 40), dtype, gate_dtype)


@needs_triton
def test_unwritten_memory_does_not_reach_triton_results():
    tensors = random_case((3, 5, 40), torch.float32, device=DEVICE)
    tensors = (*tensors, torch.randn_like(tensors[1]))
    expected = evaluate("triton", tensors)
    with unwritten_memory_is_nan():
        actual = evaluate("triton", tensors)
    assert all(map(torch.equal, actual, expected))


@needs_triton
def test_triton_takes_any_layout_and_no_rows():
    x, gate, weight = random_case((4, 6, 16), torch.float32, device=DEVICE)
    x, gate = x.transpose(0, 1), gate[:, :, ::2].repeat_interleave(2, dim=-1).transpose(0, 1)
    y = gated_rms_norm(x, gate, weight, EPS, impl="triton")
    torch.testing.assert_close(y, gated_rms_norm(x, gate, weight, EPS, impl="torch"))
    weight.requires_grad_()
    empty = gated_rms_norm(x[:0], gate[:0], weight, EPS, impl="triton")
    assert empty.shape == (0, 4, 16)
    empty.sum().backward()
    assert not weight.grad.any()


@needs_triton
def test_triton_refuses_second_derivatives():
    x, gate, weight = (tensor.requires_grad_() for tensor in random_case((2, 16), torch.float32, device=DEVICE))
    y = gated_rms_norm(x, gate, weight, EPS, impl="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@needs_triton
def test_triton_under_compile():
    tensors = [tensor.requires_grad_() for tensor in random_case((3, 4, 16), torch.float32, device=DEVICE)]

    def run(x, gate, weight):
        return gated_rms_norm(x, gate, weight, EPS, impl="triton")

    expected, actual = run(*tensors), torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(actual, expected)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), tensors) for y in (actual, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@needs_triton
def test_triton_operator_is_registered_consistently():
    tensors = [tensor.requires_grad_() for tensor in random_case((3, 16), torch.float32, device=DEVICE)]
    torch.library.opcheck(torch.ops.deltalatent.gated_rms_norm, (*tensors, EPS))


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 4096, 32, 128), (3, 1500, 4, 64), (65, 4096), (50000, 256), (9, 8)], ids=str)
def test_gpu_shapes(shape, dtype):
    check_triton(shape, dtype)


@pytest.mark.gpu
def test_gpu_runs_repeat_bit_for_bit():
    tensors = random_case((2, 3000, 8, 128), torch.bfloat16, device=DEVICE)
    tensors = (*tensors, torch.randn_like(tensors[1]))
    first, second = evaluate("triton", tensors), evaluate("triton", tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
