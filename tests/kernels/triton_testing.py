# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""How Triton kernels are tested: on a GPU where there is one, otherwise in Triton's interpreter in its own process.

The interpreter is chosen by an environment variable that Triton reads while kernels are being defined, and it would
make `impl="auto"` choose Triton on a CPU. Therefore a file of kernel tests marks its tests with `needs_triton`, so
that they skip in an ordinary process without a GPU, and holds one test that calls `run_under_interpreter(__file__)`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu")

needs_triton = pytest.mark.skipif(
    not HAS_TRITON or (DEVICE.type == "cpu" and not INTERPRETING),
    reason="needs Triton and a CUDA GPU, or TRITON_INTERPRET=1",
)
needs_launches = pytest.mark.skipif(not HAS_TRITON or INTERPRETING, reason="needs Triton, without its interpreter")


def run_under_interpreter(file: str) -> None:
    """Run the tests of `file` with "triton" in their names under the interpreter; skips where that cannot be."""
    if INTERPRETING:
        pytest.skip("is running under the interpreter already")
    if not HAS_TRITON:
        pytest.skip("the package `triton` is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU itself")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton", "-m", "not gpu", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, file], cwd=root, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


def repair_interpreter() -> None:
    """Let interpreted kernels loop up to a run-time bound: Triton 3.6 converts it in a way that NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_scalar_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_scalar_index


if INTERPRETING and HAS_TRITON:
    repair_interpreter()


def assert_as_exact_as_plain(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, what: str) -> None:
    """An implementation may be off by twice what the plain evaluation in the same precision is off, plus rounding.

    `exact` is the float64 evaluation, `plain` the PyTorch reference on the very inputs of `actual`. Rounding is one
    unit in the last place of the result's dtype and four of the float32 arithmetic before it, at the largest element.
    """
    assert actual.dtype == plain.dtype, f"{what}: {actual.dtype} instead of {plain.dtype}"
    assert actual.shape == exact.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    error, reference = ((x.detach().double() - exact.detach()).abs().max().item() for x in (actual, plain))
    rounding = torch.finfo(actual.dtype).eps + 4 * torch.finfo(torch.float32).eps
    allowed = 2 * reference + rounding * exact.detach().abs().max().item()
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"
