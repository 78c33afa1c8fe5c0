# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Machine code of the kernels for GPUs that are not here, made by the compilers that Triton carries.

Every launch of a room is recorded and compiled as it would be on a device: with the tiles chosen from its limits, far
enough to know how much shared memory a program takes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from deltalatent.kernels.tiles import AMD_SHARED_MEMORY, DeviceLimits
from tests.kernels.triton_testing import HAS_TRITON, INTERPRETING, needs_launches

if HAS_TRITON and not INTERPRETING:
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompiledKernel, make_backend
    from triton.runtime.jit import JITFunction

    from deltalatent.kernels.attn_res import triton_kernels as attn_res
    from deltalatent.kernels.experts import triton_launch as experts
    from deltalatent.kernels.gated_rms_norm import triton_kernels as gated_rms_norm
    from deltalatent.kernels.kda import triton_bwd, triton_fwd, triton_recurrent
    from deltalatent.kernels.latent_attention import triton_absorbed
    from deltalatent.kernels.linear_cross_entropy import triton_kernels as cross_entropy
    from deltalatent.kernels.router import triton_kernels as router
    from deltalatent.kernels.short_conv import triton_bwd as conv_bwd
    from deltalatent.kernels.short_conv import triton_fwd as conv_fwd
    from deltalatent.kernels.situ import triton_kernels as situ

    TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

pytestmark = needs_launches

POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip
LIMITS = {
    "sm80": DeviceLimits(166912, 108, (8, 0)),
    "sm86": DeviceLimits(101376, 84, (8, 6)),
    "sm90": DeviceLimits(232448, 132, (9, 0)),
    "gfx942": DeviceLimits(AMD_SHARED_MEMORY, 304, (0, 0)),
}


class Launch(NamedTuple):
    """A kernel with its positional and its named arguments."""

    kernel: Any
    args: tuple
    options: dict


def target_of(device: str) -> GPUTarget:
    return GPUTarget("cuda", int(device[2:]), 32) if device.startswith("sm") else GPUTarget("hip", device, 64)


def record(monkeypatch, device: str, run: Callable[[], Any]) -> list[Launch]:
    """The launches of `run` on a device with these limits, alike ones once; nothing runs."""
    launches = {}

    def subscript(kernel, grid):
        def launch(*args, **options):
            launches.setdefault((kernel.fn.__name__, str(options)), Launch(kernel, args, options))

        return launch

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", subscript)
        patch.setattr(torch.version, "hip", "7.0" if device.startswith("gfx") else None)
        for name, module in sys.modules.items():
            if name.startswith("deltalatent.kernels.") and hasattr(module, "device_limits"):
                patch.setattr(module, "device_limits", lambda _: LIMITS[device])
        run()
    return list(launches.values())


def source_of(launch: Launch) -> tuple[ASTSource, dict]:
    """What Triton would make of the launch: specialised arguments, and the options that are no arguments."""
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
    signature, constants, attributes = {}, {}, {}

    def type_of(value, free, path):
        if isinstance(value, tuple):
            return tuple(type_of(x, free, (*path, i)) for i, x in enumerate(value))
        if isinstance(value, torch.Tensor) or (type(value) is int and free and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"

    for i, parameter in enumerate(launch.kernel.params):
        value, free = values[parameter.name], not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            signature[parameter.name] = type_of(value, free, (i,))
    kind = ASTSource
    if launch.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as kind
    source = kind(launch.kernel, signature, constants, attributes)
    return source, {name: value for name, value in launch.options.items() if name not in launch.kernel.arg_names}


def build(launch: Launch, device: str, folder: Path) -> tuple[CompiledKernel, str]:
    """The kernel as it would run, which must fit the device, and its machine code; for NVIDIA alone."""
    source, options = source_of(launch)
    compiled = triton.compile(source, target=target_of(device), options=options)
    assert compiled.metadata.shared <= LIMITS[device].shared_memory, launch.kernel.fn.__name__
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", "-sass", path]
    return compiled, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lower(launch: Launch, device: str) -> tuple[int, dict[str, str]]:
    """Bytes of shared memory, and the intermediate forms by name, without the slow last steps."""
    source, options = source_of(launch)
    backend = make_backend(target_of(device))
    unknown = options.keys() - backend.parse_options({}).__dict__.keys()
    assert not unknown, f"{launch.kernel.fn.__name__}: a launch on {device} refuses {unknown}"
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target_of(device), parsed, implementation, backend.get_module_map(), context)
    stages: dict = {}
    backend.add_stages(stages, parsed, source.language)
    metadata = {"target": target_of(device), **parsed.__dict__}
    texts = {}
    for name in ("ttir", "ttgir", "llir"):
        module = stages[name](module, metadata)
        texts[name] = str(module)
    return metadata["shared"], texts


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def run_attn_res():
    """Streams of both backward passes."""
    for width in (2048, 7168):
        sources, weight = [zeros(4, width) for _ in range(9)], zeros(width)
        _, stats = attn_res.attn_res_forward(sources, weight, weight, weight, 1e-6, 1e-6, True)
        attn_res.attn_res_backward(sources, weight, weight, weight, stats, sources[0], sources, 1e-6)


def run_gated_rms_norm():
    x, weight = zeros(4, 128), zeros(128, dtype=torch.float32)
    gated_rms_norm.gated_rms_norm_forward(x, x, weight, 1e-6)
    gated_rms_norm.gated_rms_norm_backward(x, x, weight, x, 1e-6)


def run_situ():
    x = zeros(64, 128)
    situ.situ_glu_forward(x, x, 4.0, 25.0)
    situ.situ_glu_backward(x, x, x, 4.0, 25.0)


def run_cross_entropy():
    cross_entropy.softmax_cross_entropy(zeros(4, 5000), zeros(4, dtype=torch.int64), -100, True)


def run_router():
    for tokens in (32, 256):
        router.logits(zeros(tokens, 256), zeros(896, 256))
    logits, bias = zeros(32, 896, dtype=torch.float32), zeros(896, dtype=torch.float32)
    scores, index, weights, cutoff = router.choose_forward(logits, bias, 16, True, 2.5)
    router.choose_backward(scores, index, weights, scores, weights, True, 2.5)
    router.count(zeros(896 * 10 + 897, dtype=torch.int32), scores, cutoff, bias, None, index, 10)


def run_short_conv():
    """Three streams of two packed documents, with states."""
    xs = [zeros(1, 64, 256) for _ in range(3)]
    weights, states = [zeros(256, 1, 4, dtype=torch.float32) for _ in xs], [zeros(2, 256, 3) for _ in xs]
    offsets = zeros(3, dtype=torch.int32)
    conv_fwd.short_conv_forward(xs, weights, states, offsets, True)
    conv_fwd.short_conv_final_state(xs, states, 4, offsets)
    steps = [zeros(2, 1, 256) for _ in xs]
    conv_fwd.short_conv_update(steps, weights, states, states, steps, True)
    conv_bwd.short_conv_backward(xs, weights, states, offsets, xs, states, True)


def run_experts(dtype: torch.dtype = torch.bfloat16, tokens: int = 200, count: int = 4):
    """So many tokens for an expert that tiles are the largest there are."""
    x, gate_up, down = (zeros(*shape, dtype=dtype) for shape in ((tokens, 256), (count, 512, 256), (count, 256, 256)))
    index, weights = zeros(tokens, 2, dtype=torch.int64), zeros(tokens, 2, dtype=torch.float32)
    options = (True, 4.0, 25.0)
    _, hidden, plan = experts.experts_forward(x, gate_up, down, index, weights, *options, True)
    experts.experts_backward(x, gate_up, down, weights, [hidden], plan, x, *options, [True] * 4)


def run_latent_attention(heads: int = 96, dtype: torch.dtype = torch.bfloat16, masked: bool = False):
    query, shared_query = zeros(1, 1, heads, 512, dtype=dtype), zeros(1, 1, heads, 64, dtype=dtype)
    latent, shared_key = zeros(1, 4096, 512, dtype=dtype), zeros(1, 4096, 64, dtype=dtype)
    mask = zeros(1, 1, 4096, dtype=torch.bool) if masked else None
    triton_absorbed.launch(query, shared_query, latent, shared_key, mask, zeros(1, dtype=torch.int32), 0.1)


def kda_inputs(width: int, dtype: torch.dtype, bound: float | None = -5.0) -> tuple:
    q, k, v, g = (zeros(1, 64, 2, width, dtype=dtype) for _ in range(4))
    A_log, dt_bias = zeros(2, dtype=torch.float32), zeros(2 * width, dtype=torch.float32)
    return q, k, v, g, zeros(1, 64, 2, dtype=dtype), A_log, dt_bias, None, None, bound, 0.1


def run_kda(width: int = 128, dtype: torch.dtype = torch.bfloat16, bound: float | None = -5.0):
    inputs = kda_inputs(width, dtype, bound)
    triton_fwd.chunk_forward(*inputs, False)
    triton_bwd.chunk_backward(*inputs, inputs[2], inputs[2], None)


def run_kda_unbounded():
    run_kda(bound=None)


def run_kda_step():
    q, k, v, g, beta, A_log, dt_bias, *_ = kda_inputs(128, torch.bfloat16)
    state = zeros(1, 2, 128, 128, dtype=torch.float32)
    triton_recurrent.recurrent_triton(q, k, v, g, beta, A_log, dt_bias, initial_state=state, inplace_state=True)


def run_kda_prepare_of_wide_float32_heads():
    q, k, _, g, beta, A_log, dt_bias, *_ = kda_inputs(256, torch.float32)
    limits = triton_fwd.device_limits(q.device)
    config = triton_fwd.choose_config(256, 256, torch.float32, -5.0, limits.shared_memory)
    chunks = triton_fwd.list_chunks(1, 64, config.C, None)
    triton_fwd.prepare(q, k, g, beta, A_log, dt_bias, None, chunks, config, -5.0, 0.1)


ROOMS = [
    run_attn_res, run_gated_rms_norm, run_situ, run_cross_entropy, run_router, run_short_conv, run_experts,
    run_latent_attention, run_kda, run_kda_unbounded, run_kda_step,
]  # fmt: skip


def check_fits(monkeypatch, device, run):
    """One launch of each kernel and tile."""
    launches = {}
    for launch in record(monkeypatch, device, run):
        tile = {name: x for name, x in launch.options.items() if name in ("MODE", "TAIL") or re.match("B|num_", name)}
        launches[launch.kernel.fn.__name__, str(tile)] = launch
    assert launches
    for launch in launches.values():
        shared, _ = lower(launch, device)
        limit = LIMITS[device].shared_memory
        assert shared <= limit, f"{launch.kernel.fn.__name__} takes {shared} of {limit} bytes with {launch.options}"


@pytest.mark.parametrize("run", ROOMS, ids=lambda run: run.__name__)
def test_every_room_compiles_for_amd_within_its_shared_memory(monkeypatch, run):
    check_fits(monkeypatch, "gfx942", run)


@pytest.mark.parametrize(
    "run",
    [run_experts, run_router, run_latent_attention, run_kda_prepare_of_wide_float32_heads, run_kda_unbounded],
    ids=lambda run: run.__name__,
)
def test_tiles_fit_the_least_shared_memory_of_nvidia(monkeypatch, run):
    check_fits(monkeypatch, "sm86", run)


@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
def test_scans_of_wide_float32_heads_leave_room_for_the_state(monkeypatch, device):
    """In chunks of 16, of which more would be loaded ahead but for the state that eight warps exchange."""
    check_fits(monkeypatch, device, lambda: run_kda(256, torch.float16, None))


@pytest.mark.parametrize(("device", "heads"), [("sm80", 96), ("sm86", 32), ("sm86", 8)])
def test_tiles_of_latent_attention_follow_the_shared_memory(monkeypatch, device, heads):
    check_fits(monkeypatch, device, lambda: run_latent_attention(heads, masked=heads < 96))


def test_float32_tiles_of_latent_attention_fit_the_least_shared_memory_of_nvidia(monkeypatch):
    check_fits(monkeypatch, "sm86", lambda: run_latent_attention(dtype=torch.float32))


def test_cross_entropy_reads_the_target_before_gradients_are_written(monkeypatch):
    """Another warp may own the target's logit, which its gradient replaces: a barrier stands between."""
    (launch,) = record(monkeypatch, "sm90", run_cross_entropy)
    text = lower(launch, "sm90")[1]["ttgir"]
    before, _ = text.rsplit("scf.for", 1)
    assert "barrier" in before[before.rindex("tt.store") :]


INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", re.MULTILINE)


def places(operand: str, width: int) -> list[str]:
    """Names of so many registers, or words of the stack, from the operand on; none if it is neither."""
    if register := re.match(r"(U?R)(\d+)", operand):
        return [f"{register[1]}{int(register[2]) + i}" for i in range(width)]
    if slot := re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", operand):
        return [f"stack {int(slot[1] or '0', 16) + 4 * i}" for i in range(width)]
    return ["RZ"] * width if operand.startswith(("RZ", "URZ")) else []


def unsound_descriptors(listing: str) -> list[str]:
    """Hopper's matrix products in a listing of machine code whose operand does not lie where an address says.

    Followed line by line, over registers and the stack: an address is made of constants, parameters and the number of
    the thread, neither of data nor of what nothing has written.
    """
    sound: set[str] = set()
    found = []
    for operation, rest in INSTRUCTION.findall(listing):
        kind = operation.split(".")[0]
        operands = [x.strip() for x in rest.split(",") if not re.fullmatch(r"\s*!?U?P[\dT]\s*", x)]
        if kind == "HGMMA":
            # With registers on the left there is one descriptor, in the second half of the four registers.
            first = int(re.search(r"gdesc\[UR(\d+)\]", rest)[1])
            descriptors = range(first + 2 if re.match(r"R\d", operands[1]) else first, first + 4)
            if not sound.issuperset(f"UR{i}" for i in descriptors):
                found.append(f"{operation} {rest}")
            width = int(re.search(r"64x(\d+)x", operation)[1]) // 2
        else:
            wide = re.search(r"\.(64|128|WIDE|M88\.2|M88\.4)\b", operation)
            width = 4 if kind == "HMMA" else {"128": 4, "M88.4": 4}.get(wide[1], 2) if wide else 1

        if kind in ("STL", "LDL"):
            for target, source in zip(places(operands[0], width), places(operands[1], width), strict=True):
                (sound.add if source in sound or source == "RZ" else sound.discard)(target)
        elif operands and not kind.startswith(("ST", "RED", "ATOM")):
            data = re.match("F|HADD|HFMA|HMUL|HMMA|HGMMA|MUFU|LDG|LDS", kind)
            whole = not data and sound.issuperset(re.findall(r"U?R\d+", ",".join(operands[1:])))
            (sound.update if whole else sound.difference_update)(places(operands[0], width))
    return found


def test_unsound_descriptors_are_found():
    """As `ptxas` 12.8 has made them: from a number in memory, over the stack; and from a register never written."""
    lines = ["S2UR UR6, SR_CgaCtaId", "UMOV UR7, 0x40000040", "LDG.E R9, desc[UR4][R40.64]"]
    lines += ["IADD3 R8, P2, {}, 0x2, RZ", "STL [R1+0x8], R8", "LDL R3, [R1+0x8]", "R2UR {}, R3"]
    lines += ["HGMMA.64x16x8.F32.TF32 R24, R16, gdesc[UR4], R24, gsb0"]

    def found(source, target):
        text = "".join(f"        /*{16 * i:04x}*/    {line} ;\n" for i, line in enumerate(lines))
        return unsound_descriptors(text.format(source, target))

    assert not found("RZ", "UR6")
    assert found("R9", "UR6") == [lines[-1]]
    assert not found("R9", "UR20")
    lines[0] = "NOP"
    assert found("RZ", "UR20") == [lines[-1]]


@pytest.mark.parametrize(
    ("device", "width", "dtype", "bound"),
    [
        ("sm90", 64, torch.bfloat16, -5.0),
        ("sm80", 128, torch.bfloat16, -5.0),
        ("sm90", 128, torch.bfloat16, None),
        ("sm90", 256, torch.float16, None),
    ],
    ids=["sm90-64", "sm80-128", "sm90-128-unbounded", "sm90-256-unbounded-fp16"],
)
def test_kda_kernels(monkeypatch, tmp_path, device, width, dtype, bound):
    """They fit the device, and `ptxas` has made no address of a matrix product from what is none.

    `ptxas` 12.8 does that in some forms of `input_grad_kernel`, for example with its loop over value columns unrolled,
    and of the scans of wide float32 heads with 64 value columns. Such code gives wrong results or illegal accesses,
    and no other test sees it without a GPU.
    """
    launches = record(monkeypatch, device, lambda: run_kda(width, dtype, bound))
    names = {launch.kernel.fn.__name__ for launch in launches}
    assert names == {"prepare_kernel", "scan_kernel", "reverse_scan_kernel", "pair_grad_kernel", "input_grad_kernel"}
    for launch in launches:
        name = launch.kernel.fn.__name__
        _, listing = build(launch, device, tmp_path)
        assert name in listing
        assert not unsound_descriptors(listing), name
