# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms, and the machinery that keeps small tensors in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from deltalatent.kernels.autocast import float32_autocast_disabled
from deltalatent.modeling.norms import KimiK3GatedRMSNorm, KimiK3RMSNorm
from deltalatent.modeling.precision import KeepFloat32
from tests.testing_common import assert_close

WIDTH = 24


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def random_norm(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(WIDTH))
    return norm


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e4])
def test_rms_norm_is_its_definition(eps: float, scale: float) -> None:
    norm = random_norm(KimiK3RMSNorm(WIDTH, eps))
    x = scale * torch.randn(3, 5, WIDTH)
    assert_close(norm(x), rms_norm(x, norm.weight, eps), 1e-6)
    assert_close(norm.double()(x.double()), rms_norm(x, norm.weight, eps), 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_rounds_once(dtype: torch.dtype) -> None:
    """Squares of half-precision values overflow or vanish unless they are taken in float32."""
    norm = random_norm(KimiK3RMSNorm(WIDTH, 1e-6)).to(dtype)
    x = (300.0 * torch.randn(3, 5, WIDTH)).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    expected = rms_norm(x, norm.weight, 1e-6)
    # Half a unit in the last place of the result, and float32 roundings.
    assert ((y.double() - expected).abs() <= (torch.finfo(dtype).eps / 2 * 1.01) * expected.abs() + 1e-7).all()


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_rms_norm_of_mixed_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """As under autocast, or with a weight kept apart: both as they are, nothing is rounded to the narrower one."""
    norm = random_norm(KimiK3RMSNorm(WIDTH, 1e-6)).to(weight_dtype)
    x = torch.randn(3, 5, WIDTH).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    expected = rms_norm(x, norm.weight, 1e-6)
    assert ((y.double() - expected).abs() <= torch.finfo(dtype).eps / 2 * 1.01 * expected.abs() + 1e-6).all()


def test_rms_norm_is_one_kernel_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, that is: it takes one dtype for input and weight, and refuses with a warning if they differ."""
    dtypes = []

    def recorded(x: Tensor, shape: torch.Size, weight: Tensor, eps: float) -> Tensor:
        dtypes.append((x.dtype, weight.dtype))
        return torch.rms_norm(x, shape, weight, eps)

    monkeypatch.setattr(nn.functional, "rms_norm", recorded)
    norm = random_norm(KimiK3RMSNorm(WIDTH, 1e-6))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert norm(torch.randn(2, WIDTH).to(dtype)).dtype == dtype
    assert dtypes == [(torch.float32,) * 2, (torch.float32,) * 2, (torch.float64,) * 2]


def test_rms_norm_gradient() -> None:
    norm = random_norm(KimiK3RMSNorm(WIDTH, 1e-3)).double()
    x = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(norm, {"weight": weight}, (x.detach(),)),
        (norm.weight.detach().clone().requires_grad_(),),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norm_is_norm_times_sigmoid(dtype: torch.dtype) -> None:
    norm = random_norm(KimiK3GatedRMSNorm(WIDTH, 1e-5))
    x, gate = torch.randn(2, 7, 3, WIDTH).to(dtype), torch.randn(2, 7, 3, WIDTH).to(dtype)
    y = norm(x, gate)
    assert y.dtype == dtype
    expected = rms_norm(x, norm.weight, 1e-5) * torch.sigmoid(gate.double())
    assert_close(y, expected, 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


class Holder(KeepFloat32):
    """A module with a kept and an ordinary parameter, a kept and an ordinary buffer, an integer and a child."""

    float32_tensors = ("kept", "kept_buffer", "absent", "index")

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.randn(5))
        self.plain = nn.Parameter(torch.randn(5))
        self.register_buffer("kept_buffer", torch.randn(5))
        self.register_buffer("plain_buffer", torch.randn(5))
        self.register_buffer("index", torch.arange(5))
        self.child = nn.Linear(3, 3)
        self.absent = None


@pytest.mark.parametrize("nested", [False, True], ids=["itself", "inside_another_module"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_kept_tensors_never_get_narrower_than_float32(dtype: torch.dtype, nested: bool) -> None:
    holder = Holder()
    values = copy.deepcopy(holder.state_dict())
    parameter = holder.kept
    (nn.Sequential(holder) if nested else holder).to(dtype)
    for name, tensor in holder.state_dict().items():
        if name in ("kept", "kept_buffer"):
            assert tensor.dtype == torch.promote_types(dtype, torch.float32), name
            assert torch.equal(tensor.float(), values[name]), name
        elif name == "index":
            assert tensor.dtype == torch.int64
        else:
            assert tensor.dtype == dtype, name
    assert holder.kept is parameter, "an optimizer would lose the parameter"


def test_gradients_stay_float32_with_their_tensors() -> None:
    holder = Holder()
    (holder.kept.square().sum() + holder.plain.square().sum()).backward()
    holder.to(torch.bfloat16)
    assert holder.kept.grad.dtype == torch.float32
    assert holder.plain.grad.dtype == torch.bfloat16


def test_kept_tensors_move_between_devices() -> None:
    holder = Holder().to("meta", torch.bfloat16)
    assert all(tensor.is_meta for tensor in holder.state_dict().values())
    assert holder.kept.dtype == torch.float32 and holder.plain.dtype == torch.bfloat16
    holder.to_empty(device="cpu")
    assert not any(tensor.is_meta for tensor in holder.state_dict().values())
    assert holder.kept.dtype == torch.float32


def test_kept_tensors_of_children_are_their_own_business() -> None:
    """Names are those of the module, not of what is inside it."""
    outer = Holder()
    outer.child = nn.Module()
    outer.child.kept = nn.Parameter(torch.randn(2))
    outer.inner = Holder()
    outer.to(torch.bfloat16)
    assert outer.child.kept.dtype == torch.bfloat16
    assert outer.inner.kept.dtype == torch.float32


def test_autocast_does_not_reach_float32_arithmetic() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
        with float32_autocast_disabled(a.device):
            assert torch.equal(a @ b, torch.mm(a, b)) and (a @ b).dtype == torch.float32
        assert (a @ b).dtype == torch.bfloat16
    with float32_autocast_disabled(torch.device("meta")):
        pass
