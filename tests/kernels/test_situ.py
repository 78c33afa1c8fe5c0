# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""SiTU-GLU: the equation in float64 → PyTorch → Triton; gradients, small and huge inputs, messages."""

import pytest
import torch

from deltalatent.kernels.situ import situ_glu
from tests.kernels.triton_testing import DEVICE, assert_as_exact_as_plain, needs_triton, run_under_interpreter

CAPS = (4.0, 25.0)


def test_reference_is_the_equation():
    gate, up = 6 * torch.randn(50, dtype=torch.float64), 40 * torch.randn(50, dtype=torch.float64)
    expected = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
    torch.testing.assert_close(situ_glu(gate, up, *CAPS), expected, rtol=1e-13, atol=1e-13)


def test_reference_gradients():
    gate, up = (3 * torch.randn(4, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, *CAPS), (gate, up))


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("gate", "up", "caps", "impl", "error", "message"),
    [
        (X, X.half(), CAPS, "auto", TypeError, "one floating dtype, got torch.float32 and torch.float16"),
        (X.long(), X.long(), CAPS, "auto", TypeError, "one floating dtype, got torch.int64"),
        (X, X[:1], CAPS, "auto", ValueError, r"`up` must have the shape \[2, 3\] .* got \[1, 3\] on cpu"),
        (X, X, (0.0, 1.0), "auto", ValueError, "`beta` and `linear_beta` must be positive, got 0.0 and 1.0"),
        (X, X, CAPS, "cuda", ValueError, "must be one of 'auto', 'triton', 'torch', got 'cuda'"),
        (X.double(), X.double(), CAPS, "triton", TypeError, "float32, float16 or bfloat16, got torch.float64"),
    ],
    ids=["dtypes", "int", "shape", "caps", "impl", "float64"],
)
def test_messages(gate, up, caps, impl, error, message):
    with pytest.raises(error, match=message):
        situ_glu(gate, up, *caps, impl=impl)


# Triton


def evaluate(impl, gate, up, dy, dtype=None):
    gate, up, dy = (x.detach().clone().to(dtype or x.dtype) for x in (gate, up, dy))
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    y = situ_glu(*leaves, *CAPS, impl=impl)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def check_triton(shape, dtype, scale):
    inputs = [(scale * torch.randn(shape, device=DEVICE)).to(dtype) for _ in range(2)]
    inputs.append(torch.randn(shape, device=DEVICE).to(dtype))
    results = [evaluate("triton", *inputs), evaluate("torch", *inputs, torch.float64), evaluate("torch", *inputs)]
    for name, *triple in zip(("y", "dgate", "dup"), *results, strict=True):
        assert_as_exact_as_plain(*triple, name)


@needs_triton
@pytest.mark.parametrize("scale", [1e-3, 3.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton_equals_torch(dtype, scale):
    check_triton((3, 700), dtype, scale)


@needs_triton
def test_triton_takes_any_layout_and_nothing():
    gate, up = torch.randn(6, 8, device=DEVICE).chunk(2, dim=-1)
    torch.testing.assert_close(situ_glu(gate, up, *CAPS, impl="triton"), situ_glu(gate, up, *CAPS, impl="torch"))
    assert situ_glu(gate[:0], up[:0], *CAPS, impl="triton").shape == (0, 4)


@needs_triton
def test_triton_under_compile():
    gate, up = (torch.randn(3, 16, device=DEVICE, requires_grad=True) for _ in range(2))

    def run(gate, up):
        return situ_glu(gate, up, *CAPS, impl="triton")

    expected, actual = run(gate, up), torch.compile(run, fullgraph=True, backend="aot_eager")(gate, up)
    assert torch.equal(actual, expected)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), (gate, up)) for y in (actual, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    torch.library.opcheck(torch.ops.deltalatent.situ_glu, (gate, up, *CAPS))


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gpu_shapes(dtype):
    check_triton((4096, 3072), dtype, 4.0)
    check_triton((7, 13, 129), dtype, 4.0)
