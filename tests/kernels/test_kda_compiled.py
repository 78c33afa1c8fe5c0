# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Machine code of the chunked KDA kernels, made without a GPU by the compilers that Triton carries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from deltalatent.kernels.tiles import INTERPRETER_LIMITS
from tests.kernels.triton_testing import HAS_TRITON, INTERPRETING

if HAS_TRITON and not INTERPRETING:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from deltalatent.kernels.kda import triton_bwd, triton_fwd

    TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

needs_compiler = pytest.mark.skipif(not HAS_TRITON or INTERPRETING, reason="needs Triton, without its interpreter")
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}


def compile_launch(kernel, capability: int, args: tuple, options: dict):
    """What Triton would compile for one launch on a device of this compute capability."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if free and signature[name] == "i32" and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    launch = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)


def unset_uniform_registers(cubin: bytes, folder: Path) -> list[str]:
    """Instructions that read a uniform register which no instruction before them has written."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    listing = subprocess.run([TOOLS / "cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    written: set[str] = set()
    found = []
    for instruction in re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d\s+)?(.*?);", listing, re.MULTILINE):
        operation, _, rest = instruction.partition(" ")
        operands = [x for x in rest.split(",") if not re.fullmatch(r"\s*!?U?P[\dT]\s*", x)]
        target = re.fullmatch(r"\s*(UR\d+)\s*", operands[0]) if operands else None
        # With registers on the left, a matrix product has one descriptor, in the second half of the four registers.
        if not (operation.startswith("HGMMA") and re.match(r"\s*R\d", operands[1])):
            read = re.findall(r"UR\d+", ",".join(operands[1:] if target else operands))
            found += [instruction for register in read if register not in written]
        if target:
            first = int(target[1][2:])
            wide = ".64" in operation or ".WIDE" in operation
            written |= {f"UR{first + i}" for i in range(2 if wide else 1)}
    return found


@needs_compiler
@pytest.mark.parametrize(("capability", "width"), [(90, 64), (80, 128)], ids=["sm90-64", "sm80-128"])
def test_compiled_kernels(monkeypatch, tmp_path, capability, width):
    """They fit the device, and `ptxas` has made no use of registers that nothing wrote.

    `ptxas` 12.8 does that to a matrix product's descriptor in some forms of `input_grad_kernel`, for example with its
    loop over value columns unrolled. Such code gives wrong results, and no other test sees it without a GPU.
    """
    shared_memory = {80: 166912, 90: 232448}[capability]
    compiled = {}

    def launch(kernel, grid):
        def record(*args, **options):
            key = (kernel.fn.__name__, options.get("MODE"))
            if key not in compiled:
                compiled[key] = compile_launch(kernel, capability, args, options)

        return record

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    for module in (triton_fwd, triton_bwd):
        limits = INTERPRETER_LIMITS._replace(shared_memory=shared_memory)
        monkeypatch.setattr(module, "device_limits", lambda device, limits=limits: limits)
    B, T, H = 1, 64, 2
    q, k, v, g = (torch.zeros(B, T, H, width, dtype=torch.bfloat16) for _ in range(4))
    beta, A_log, dt_bias = torch.zeros(B, T, H, dtype=torch.bfloat16), torch.zeros(H), torch.zeros(H * width)
    inputs = (q, k, v, g, beta, A_log, dt_bias, None, None, -5.0, 0.1)
    triton_fwd.chunk_forward(*inputs, False)
    triton_bwd.chunk_backward(*inputs, v, v, None)
    assert {name for name, _ in compiled} >= {"prepare_kernel", "scan_kernel", "reverse_scan_kernel"}
    assert {name for name, _ in compiled} >= {"pair_grad_kernel", "input_grad_kernel"}
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= shared_memory, name
        assert not unset_uniform_registers(kernel.asm["cubin"], tmp_path), name
