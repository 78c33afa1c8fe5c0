# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked KDA in Triton against the float64 recurrence: golden numbers, extremes, packing, compilation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deltalatent.kernels.kda import kda_chunk, kda_chunk_reference, kda_recurrent_reference
from deltalatent.kernels.kda.autograd import kda_chunk_op
from deltalatent.kernels.kda.reference import l2_normalize, log_decay
from deltalatent.kernels.tiles import INTERPRETER_LIMITS
from tests.kernels.triton_testing import (
    DEVICE,
    INTERPRETING,
    assert_as_exact_as_plain,
    needs_triton,
    run_under_interpreter,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "kda_op"
CASES = json.loads((GOLDEN / "config.json").read_text())["cases"]
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
LENGTHS = [0, 1, 33, 0, 5, 32]


def random_inputs(B, T, H, K, V, *, HV=None, documents=None, dtype=torch.float32, gate="wide", keys="random"):
    """Raw inputs by name; `gate` says where the log decay lies, `keys` how alike the keys are."""
    HV = HV or H

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    shift, spread = {"wide": (0.0, 4.0), "bound": (30.0, 1.0), "none": (-12.0, 1.0)}[gate]
    inputs = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, HV, V),
        "g": shift + spread * normal(B, T, HV, K),
        "beta": normal(B, T, HV),
        "A_log": 0.5 * normal(HV, dtype=torch.float32),
        "dt_bias": normal(HV * K, dtype=torch.float32),
        "initial_state": normal(documents or B, HV, K, V, dtype=torch.float32),
    }
    if keys == "collinear":
        inputs["k"] = normal(B, 1, H, K) + 0.02 * inputs["k"]
        inputs["beta"] = inputs["beta"] + 6
    return inputs


def run(form, inputs, *, o_weight=None, state_weight=None, **options):
    """Outputs, final states and the gradients of a fixed random functional of both, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    state = leaves.get("initial_state")
    o, final = form(*[leaves[n] for n in NAMES], initial_state=state, output_final_state=True, **options)
    if o_weight is None:
        generator = torch.Generator().manual_seed(7)
        o_weight = torch.randn(o.shape, generator=generator).to(DEVICE)
        state_weight = torch.randn(final.shape, generator=generator).to(DEVICE)
    loss = (o.to(torch.promote_types(o.dtype, torch.float32)) * o_weight).sum() + (final * state_weight).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o.detach(), "final_state": final.detach()} | dict(zip(leaves, grads, strict=True))


def triton_form(*args, **options):
    return kda_chunk(*args, impl="triton", **options)


def channel_sums(exact, inputs):
    """What each channel adds to dA_log, the sum over tokens and channels of dg (g + dt_bias): [HV, K].

    These parts cancel against each other, so that rounding errors are on their scale and not on that of the result.
    """
    g = inputs["g"].double()
    return (exact["g"].double() * (g + inputs["dt_bias"].double().view(g.shape[2:]))).sum((0, 1))


def check(inputs, **options):
    """Triton against float64, within twice the error of the PyTorch recurrence in float32 plus a rounding band."""
    exact = run(kda_recurrent_reference, {name: x.double() for name, x in inputs.items()}, **options)
    plain = run(kda_recurrent_reference, inputs, **options)
    actual = run(triton_form, inputs, **options)
    for name, x in exact.items():
        assert torch.isfinite(actual[name]).all(), f"{name} is not finite"
        error, error_plain = ((y[name].double() - x).abs().max().item() for y in (actual, plain))
        # Chunked sums of 32 terms behind factors of up to 2^58: some 100 roundings of the largest element.
        rounding = 100 * torch.finfo(torch.float32).eps
        if DEVICE.type == "cuda":
            rounding *= 2  # products are made of three tf32 ones there, which round to 2^-22
        scale = x.abs().max().item()
        if name == "A_log":
            scale = max(scale, channel_sums(exact, inputs).norm(dim=-1).max().item())
        if name == "dt_bias":  # a sum over tokens, whose parts cancel likewise
            scale = max(scale, exact["g"].norm(dim=(0, 1)).max().item())
        allowed = 2 * error_plain + rounding * scale + 1e-9
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
    return actual


@needs_triton
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case["gate_lower_bound"] is not None])
def test_golden_numbers(case):
    """Tolerances: those published with the numbers, plus float32 rounding where the exact gradient is zero."""
    data = {n.removeprefix(f"{case}."): x.to(DEVICE) for n, x in golden().items() if n.startswith(f"{case}.")}
    stored = {"g": "g_raw", "beta": "beta_raw"}
    inputs = {n: data[stored.get(n, n)].float() for n in NAMES}
    if "initial_state" in data:
        inputs["initial_state"] = data["initial_state"]
    actual = run(
        triton_form,
        inputs,
        o_weight=data.get("do"),
        state_weight=data.get("dstate"),
        cu_seqlens=data.get("cu_seqlens"),
    )
    torch.testing.assert_close(actual["o"], data["o"], rtol=0, atol=2e-5)
    torch.testing.assert_close(actual["final_state"], data["final_state"], rtol=0, atol=2e-5)
    if not CASES[case]["gradients"]:
        return
    tolerance = 1e-3 if case == "all_min" else 2e-4
    expected = {n: data["d_" + stored.get(n, n)] for n in inputs}
    rounding = torch.finfo(torch.float32).eps * max(x.abs().max().item() for x in expected.values())
    if DEVICE.type == "cuda":
        rounding *= 4  # products are made of three tf32 ones there, which keep 21 to 22 of 24 bits
    for name, x in expected.items():
        error = (actual[name] - x).abs().max().item()
        scale = x.abs().max().item()
        if name == "A_log":
            scale = max(scale, channel_sums(expected, inputs).norm(dim=-1).max().item())
        assert error <= tolerance * scale + rounding, f"gradient of {name}: {error:.2e}"


def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


@needs_triton
@pytest.mark.parametrize(
    "shape",
    [dict(H=1, HV=3, K=12, V=40), dict(H=2, K=48, V=8), dict(H=1, K=40, V=72), dict(H=1, K=16, V=136)],
    ids=["three-value-heads-K12-V40", "K48-V8", "K40-V72", "K16-V136"],
)
def test_head_shapes(shape):
    check(random_inputs(1, 37, **shape))


@needs_triton
@pytest.mark.parametrize("bound", [-1.0, -9.5], ids=["bound1-chunks-of-32", "bound9.5-chunks-of-16"])
def test_other_bounds(bound):
    check(random_inputs(1, 37, 1, 16, 16, gate="bound"), gate_lower_bound=bound)


@needs_triton
@pytest.mark.parametrize("gate", ["bound", "none"])
@pytest.mark.parametrize("keys", ["random", "collinear"])
def test_extreme_gates_and_keys(gate, keys):
    """S01, S02, S06 of the field's reports: strong or no decay, and a triangular inverse with large entries."""
    check(random_inputs(1, 65, 1, 16, 16, gate=gate, keys=keys))


@needs_triton
def test_packed_documents():
    """Empty, one-token and chunk-sized documents, and slack rows whose content reaches nothing."""
    offsets = torch.tensor([0, *LENGTHS], device=DEVICE, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = sum(LENGTHS)
    inputs = random_inputs(1, total + 6, 1, 16, 16, HV=2, documents=len(LENGTHS))
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, total:] = float("nan")
    actual = run(triton_form, inputs, cu_seqlens=offsets)
    for name in ("o", "q", "k", "v", "g", "beta"):
        assert not actual[name][:, total:].any(), f"{name} of slack rows is not zero"
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, total:] = 0
    exact = run(kda_recurrent_reference, {n: x.double() for n, x in inputs.items()}, cu_seqlens=offsets)
    for name, x in exact.items():
        torch.testing.assert_close(actual[name].double(), x, rtol=0, atol=1e-5 * max(1.0, x.abs().max().item()))


@pytest.fixture
def splitting(monkeypatch):
    """Split documents into segments of one chunk, as on a GPU with very many processors."""
    from deltalatent.kernels.kda import triton_bwd, triton_fwd

    for module in (triton_fwd, triton_bwd):
        monkeypatch.setattr(module, "device_limits", lambda device: INTERPRETER_LIMITS._replace(processors=10**6))
    monkeypatch.setattr(triton_fwd, "MIN_SEGMENT", 1)


@needs_triton
def test_split_documents_of_triton(splitting):
    check(random_inputs(2, 97, 1, 16, 24))


@needs_triton
def test_split_packed_documents_of_triton(splitting):
    inputs = random_inputs(1, 135, 1, 16, 16, documents=2)
    check(inputs, cu_seqlens=torch.tensor([0, 20, 129], device=DEVICE))


@needs_triton
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_spans_of_the_triton_backward(monkeypatch, packed):
    """Gradients do not depend, to the last bit, on how many chunks are held at a time."""
    from deltalatent.kernels.kda import triton_bwd

    inputs = random_inputs(1 if packed else 2, 64, 1, 16, 16, documents=3 if packed else None)
    options = {"cu_seqlens": torch.tensor([0, 40, 40, 62], device=DEVICE)} if packed else {}
    whole = run(triton_form, inputs, **options)
    monkeypatch.setattr(triton_bwd, "MAX_STATE_GRADS", 1)
    parts = run(triton_form, inputs, **options)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@needs_triton
def test_triton_gradients_scale_with_the_loss():
    """Tiny gradients, as of a mean over many tokens, must not drown among factors of up to 2^+-116."""
    inputs = random_inputs(1, 40, 1, 16, 16)
    weights = [torch.randn_like(inputs["v"]), torch.randn_like(inputs["initial_state"])]
    one = run(triton_form, inputs, o_weight=weights[0], state_weight=weights[1])
    small = run(triton_form, inputs, o_weight=weights[0] * 2.0**-40, state_weight=weights[1] * 2.0**-40)
    for name in NAMES:
        assert torch.equal(small[name], one[name] * 2.0**-40), name


@needs_triton
def test_future_tokens_do_not_matter():
    """To the last bit: nothing computed for a token depends on later ones, not even a common factor."""
    inputs = random_inputs(1, 70, 1, 16, 16)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, 40:] += 1
    before, after = (triton_form(*[x[n] for n in NAMES])[0] for x in (inputs, changed))
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


@needs_triton
def test_repeated_runs_and_equal_rows_are_bit_equal():
    """S05: no atomics, and no row knows of the others."""
    inputs = random_inputs(1, 40, 1, 16, 16)
    first, second = run(triton_form, inputs), run(triton_form, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows = {n: x.expand(3, *x.shape[1:]) if x.dim() > 2 else x for n, x in inputs.items()}
    o, final = triton_form(*[rows[n] for n in NAMES], initial_state=rows["initial_state"], output_final_state=True)
    assert torch.equal(o, first["o"].expand_as(o)) and torch.equal(final, first["final_state"].expand_as(final))


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Context in which `torch.empty` and its like give NaN, so that whatever reads what nothing has written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@needs_triton
@pytest.mark.parametrize("case", ["packed", "split"])
def test_unwritten_memory_does_not_reach_triton_results(case, request):
    """Outputs and all buffers between kernels are born full of NaN; head widths are padded."""
    packed = case == "packed"
    if not packed:
        request.getfixturevalue("splitting")
    inputs = random_inputs(1, 40, 1, 20, 24, documents=3 if packed else None)
    options = {"cu_seqlens": torch.tensor([0, 33, 33, 38], device=DEVICE)} if packed else {}
    expected = run(triton_form, inputs, **options)
    with unwritten_memory_is_nan():
        actual = run(triton_form, inputs, **options)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@needs_triton
def test_strided_inputs():
    """Slices of one fused projection, as a model has them."""
    inputs = random_inputs(2, 20, 2, 16, 16)
    fused = torch.cat([inputs[n] for n in ("q", "k", "v", "g")], dim=-1)
    strided = inputs | dict(zip(("q", "k", "v", "g"), fused.split(16, dim=-1), strict=True))
    assert not strided["q"].is_contiguous()
    expected, actual = (triton_form(*[x[n] for n in NAMES])[0] for x in (inputs, strided))
    assert torch.equal(expected, actual)


@needs_triton
def test_fp16_is_as_exact_as_its_rounding():
    inputs = random_inputs(1, 40, 1, 16, 16)
    half = {n: x.half() if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}
    exact = kda_recurrent_reference(*[half[n].double() for n in NAMES])[0]
    plain = kda_chunk_reference(*[half[n] for n in NAMES])[0]
    assert_as_exact_as_plain(triton_form(*[half[n] for n in NAMES])[0], exact, plain, "o")


@needs_triton
def test_no_tokens():
    inputs = random_inputs(2, 0, 1, 16, 16)
    actual = run(triton_form, inputs)
    assert actual["o"].shape == (2, 0, 1, 16) and torch.equal(actual["final_state"], inputs["initial_state"])


@needs_triton
def test_gradients_have_the_dtypes_they_should():
    """Those of the inputs, whatever the default dtype is."""
    from deltalatent.kernels.kda import triton_bwd

    inputs = random_inputs(1, 5, 1, 16, 16)
    inputs["initial_state"] = inputs["initial_state"].half()
    arguments = [*(inputs[name] for name in NAMES), inputs["initial_state"], None, -5.0, 0.25]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        o, _ = kda_chunk(*(inputs[name] for name in NAMES), initial_state=inputs["initial_state"], impl="triton")
        grads = triton_bwd.chunk_backward(*arguments, o, o, None)
    finally:
        torch.set_default_dtype(default)
    assert [x.dtype for x in grads] == [x.dtype for x in inputs.values()]


@needs_triton
def test_no_documents():
    """A row of slack alone, longer than a chunk: no entry of `cu_seqlens` behind the first is looked for."""
    inputs = random_inputs(1, 40, 1, 16, 16)
    inputs["initial_state"] = inputs["initial_state"][:0]
    actual = run(triton_form, inputs, cu_seqlens=torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert actual["final_state"].shape == (0, 1, 16, 16)
    for name in ("o", "q", "k", "v", "g", "beta", "A_log", "dt_bias"):
        assert not actual[name].any(), name


@needs_triton
def test_compiled_triton_op_is_one_graph_with_the_same_numbers():
    """S07: the operator is opaque to the compiler, so eager and compiled calls run the same kernels."""
    inputs = random_inputs(1, 20, 1, 16, 16)
    compiled = torch.compile(triton_form, backend="aot_eager", fullgraph=True)
    eager, traced = run(triton_form, inputs), run(compiled, inputs)
    for name, x in eager.items():
        assert torch.equal(x, traced[name]), name


@needs_triton
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_unused_final_state_and_no_state_of_triton(compiled):
    """Gradients are those of the outputs alone, and there is none for an initial state that is not there."""
    inputs = random_inputs(1, 20, 1, 16, 16)
    form = torch.compile(triton_form, backend="aot_eager", fullgraph=True) if compiled else triton_form
    grads = []
    for output_final_state in (False, True):
        leaves = [inputs[n].clone().requires_grad_() for n in NAMES]
        o, _ = form(*leaves, output_final_state=output_final_state)
        grads.append(torch.autograd.grad((o * inputs["v"]).sum(), leaves))
    for name, without, unused in zip(NAMES, *grads, strict=True):
        assert torch.equal(without, unused), name


@needs_triton
def test_triton_refuses_second_derivatives():
    inputs = random_inputs(1, 5, 1, 16, 16)
    leaves = [inputs[n].requires_grad_() for n in NAMES]
    (grad,) = torch.autograd.grad(triton_form(*leaves)[0].square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@needs_triton
def test_triton_op_registrations():
    inputs = random_inputs(1, 5, 1, 16, 16)
    args = [inputs[n].requires_grad_() for n in NAMES]
    torch.library.opcheck(kda_chunk_op, (*args, None, None, -5.0, 0.25, True), test_utils="test_schema")
    torch.library.opcheck(kda_chunk_op, (*args, None, None, -5.0, 0.25, True), test_utils="test_faketensor")
    torch.library.opcheck(
        kda_chunk_op, (*args, None, None, -5.0, 0.25, False), test_utils="test_autograd_registration"
    )


REFUSALS = {
    "softplus-gate": ({}, dict(gate_lower_bound=None), ValueError, "float32 for `v`: use 'torch', or a lower"),
    "bound-of-12": ({}, dict(gate_lower_bound=-12.0), ValueError, "at least -10.0, got -12.0: use 'torch'"),
    "float64": (dict(dtype=torch.float64), {}, TypeError, "got torch.float64 for `q`: use 'torch'"),
    "wide-heads": (dict(K=257), {}, ValueError, "widths up to 256, got K = 257"),
    "chunk-size": ({}, dict(chunk_size=64), ValueError, "choose the chunk size themselves, got 64"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_triton_cannot_run_is_refused_and_left_to_torch_by_auto(case):
    changed, options, error, message = REFUSALS[case]
    inputs = random_inputs(**(dict(B=1, T=4, H=1, K=16, V=16) | changed))
    with pytest.raises(error, match=message):
        triton_form(*[inputs[n] for n in NAMES], **options)
    o, _ = kda_chunk(*[inputs[n] for n in NAMES], **options)
    assert o.shape == inputs["v"].shape and torch.isfinite(o).all()


# Half precision.


def low_precision(q, k, v, g, beta, A_log, dt_bias, *, initial_state, output_final_state, dtype, **options):
    """The recurrence with every operand of a product rounded to `dtype`, sums in float32: what half precision can do.

    The state is stored in `dtype` after every 32 tokens. The backward pass rounds gradients at the same places.
    """

    def rounded(x):
        return x.to(dtype).float()

    q, k = (l2_normalize(x.float()) for x in (q, k))
    decay = log_decay(g.float(), A_log, dt_bias, options.get("gate_lower_bound", -5.0)).exp()
    b, S, outputs = beta.float().sigmoid(), initial_state, []
    for t in range(q.shape[1]):
        k_t, q_t = rounded(k[:, t]), rounded(q[:, t] * q.shape[-1] ** -0.5)
        S = decay[:, t].unsqueeze(-1) * (S if t % 32 else rounded(S))
        error = v[:, t].float() - torch.einsum("bhk,bhkv->bhv", k_t, rounded(S))
        S = S + torch.einsum("bhk,bhv->bhkv", k_t, rounded(b[:, t].unsqueeze(-1) * error))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, rounded(S)))
    return torch.stack(outputs, 1).to(v.dtype), S


def check_half_precision(inputs, dtype):
    """Root mean square error at most twice that of an independent evaluation in the same precision, plus rounding."""
    exact = run(kda_recurrent_reference, {name: x.double() for name, x in inputs.items()})
    plain = run(lambda *args, **options: low_precision(*args, dtype=dtype, **options), inputs)
    actual = run(triton_form, inputs)
    for name, x in exact.items():
        norm = x.norm().item()
        if name == "A_log":
            norm = max(norm, channel_sums(exact, inputs).norm().item())
        error, error_plain = ((y[name].double() - x).norm().item() for y in (actual, plain))
        # The floor is for gradients that vanish in exact arithmetic (gates at the bound).
        assert error <= 2 * error_plain + torch.finfo(dtype).eps * norm + 1e-6, (name, error, error_plain, norm)


@pytest.fixture
def bf16_in_the_interpreter(monkeypatch):
    """Give interpreted kernels bfloat16: Triton 3.6 holds it as integers, and multiplies these.

    Float32 operands of tf32 products lose their low bits as in tensor cores.
    """
    if not INTERPRETING:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_cast = InterpreterBuilder.cast_impl

    def widen(x):
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    def cast(self, x, dtype):
        source, target = x.dtype.scalar, dtype.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return TensorHandle(widen(x), tl.float32)
        if source != tl.bfloat16 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data.astype(np.float32))).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return plain_cast(self, x, dtype)

    def dot(self, a, b, accumulator, precision, max_num_imprecise_acc):
        def operand(x):
            if x.dtype.scalar == tl.bfloat16:
                return widen(x)
            if x.dtype.scalar == tl.float32 and precision.name == "TF32":
                return (np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
            return x.data

        with np.errstate(over="ignore", invalid="ignore"):
            product = np.matmul(operand(a), operand(b), dtype=np.float32)
        return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", lambda self, x, dtype, rounding: cast(self, x, dtype))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@needs_triton
def test_triton_forgets_slowly(bf16_in_the_interpreter):
    """A decay of 1e-6 per token still counts over a million tokens: it must not be lost to the format of products."""
    from deltalatent.kernels.kda import triton_fwd

    inputs = random_inputs(1, 32, 1, 16, 16, dtype=torch.bfloat16)
    inputs["g"] = -15 + torch.rand_like(inputs["g"]).to(torch.bfloat16)
    inputs["A_log"].zero_()
    inputs["dt_bias"].zero_()
    tensors = [inputs[name] for name in NAMES if name != "v"]
    config = triton_fwd.choose_config(16, 16, torch.bfloat16, -5.0, 1 << 17)
    chunks = triton_fwd.list_chunks(1, 32, config.C, None)
    decay = triton_fwd.prepare(*tensors, None, chunks, config, -5.0, 0.25)["decay"].double()
    exact = -5.0 * inputs["g"].double().sigmoid().sum(1)
    # 2^-12 for 11 bits of each token's decay, and the resolution of a float32 just below 1.
    error = (decay.log() - exact).abs() / exact.abs()
    assert error.max() <= 2**-12 + 2**-24 / exact.abs().min(), error.max()


@needs_triton
@pytest.mark.parametrize("gate", ["wide", "bound", "none"])
def test_bf16_of_triton(bf16_in_the_interpreter, gate):
    check_half_precision(random_inputs(1, 100, 1, 32, 32, dtype=torch.bfloat16, gate=gate), torch.bfloat16)


@needs_triton
def test_bf16_gate_gradients_of_triton_have_no_common_error(bf16_in_the_interpreter):
    """The error of dt_bias is that of a sum over tokens: errors that a whole chunk shares would stand out in it.

    Pairs of tokens within a chunk cancel in the gradient of the decay. Where the two halves of a pair are rounded
    apart, the error is ten times that of the plain evaluation; it is held to twice.
    """
    inputs = random_inputs(1, 160, 1, 64, 64, dtype=torch.bfloat16)
    exact = run(kda_recurrent_reference, {name: x.double() for name, x in inputs.items()})["dt_bias"]
    plain = run(lambda *args, **options: low_precision(*args, dtype=torch.bfloat16, **options), inputs)["dt_bias"]
    actual = run(triton_form, inputs)["dt_bias"]
    error, error_plain = ((x.double() - exact).norm().item() for x in (actual, plain))
    assert error <= 2 * error_plain, (error, error_plain)


def test_under_the_interpreter():
    run_under_interpreter(__file__)


# On a GPU, at sizes of use.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("gate", ["wide", "bound", "none"])
def test_half_precision_triton_on_gpu(dtype, width, gate):
    check_half_precision(random_inputs(2, 150, 2, width, width, dtype=dtype, gate=gate), dtype)


@pytest.mark.gpu
def test_wide_heads_in_chunks_of_16_of_triton_on_gpu():
    """Float32 states of 256 x 256, for which `ptxas` once addressed operands by data, see `test_compiled.py`."""
    check(random_inputs(1, 70, 1, 256, 256), gate_lower_bound=-9.5)


def check_against_chunks(inputs, **options):
    """bf16 against the chunked reference in float64; 2^-7 is four roundings of an operand, of random sign.

    The gradient of beta is a product of two results, u and dv, whose errors add in quadrature.
    """
    exact = run(kda_chunk_reference, {name: x.double() for name, x in inputs.items()}, **options)
    actual = run(triton_form, inputs, **options)
    for name in ("o", "final_state", "q", "k", "v", "g", "beta", "initial_state"):
        error = (actual[name].double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-6)
        allowed = 2**-7 * (2**0.5 if name == "beta" else 1.0)
        assert error <= allowed, (name, error.item())


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1500, 4096])
def test_lengths_of_triton_on_gpu(T):
    check_against_chunks(random_inputs(1, T, 4, 128, 128, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [None, [3000, 0, 5000]], ids=["row", "packed"])
def test_split_documents_of_triton_on_gpu(lengths):
    """So few heads and so many tokens that documents are split."""
    inputs = random_inputs(1, 8192, 1, 128, 128, dtype=torch.bfloat16, documents=lengths and len(lengths))
    offsets = None if lengths is None else torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    check_against_chunks(inputs, cu_seqlens=offsets)


@pytest.mark.gpu
def test_no_synchronisation_of_triton_on_gpu():
    """A packed call, forward and backward, never waits for the device."""
    offsets = torch.tensor([0, 40, 40, 100], device=DEVICE, dtype=torch.int32)
    inputs = random_inputs(1, 120, 2, 64, 64, documents=3, dtype=torch.bfloat16)
    leaves = [inputs[n].requires_grad_() for n in NAMES]
    triton_form(*leaves, cu_seqlens=offsets)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_form(*leaves, cu_seqlens=offsets)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_of_the_triton_backward_on_gpu():
    """Per token and head: what `prepare` makes, a state per chunk, u, dv and sums; of state gradients 256 MiB in all.

    dq, dk and dg take the place of buffers, so that nothing else is of the size of an input.
    """
    tokens, heads, width, chunk = 32768, 32, 128, 32
    inputs = random_inputs(1, tokens, heads, width, width, dtype=torch.bfloat16)
    leaves = [inputs[n].requires_grad_() for n in NAMES]
    peaks = []
    for _ in range(2):  # the first call loads the kernels
        o = triton_form(*leaves)[0]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(o, leaves, inputs["v"])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # Values of two bytes: q_in, k_in, k_out; qk and M; the state; u and dv; dbeta.
    half = 3 * width + 2 * chunk + width * width / chunk + 2 * width + 1
    full = 3 * width / chunk + 4  # of four: the decay and the sums for dt_bias and A_log; norms and radial
    expected = tokens * heads * (2 * half + 4 * full) + 2**28
    assert peaks[1] <= 1.02 * expected, (peaks, expected)
