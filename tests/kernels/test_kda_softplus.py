# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked KDA in Triton with the unbounded gate, which the kernels cut off at a log decay of -10 per token.

Three questions: do the kernels compute the cut gate to the accuracy of float32, at which the operator does not offer
it; is the cut worth no more than what is promised of it; and does half precision, at which it is offered, hide it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from deltalatent.kernels.kda import autograd, kda_chunk, kda_chunk_reference, kda_recurrent_reference, reference
from tests.kernels.test_kda_triton import (
    CASES,
    NAMES,
    bf16_in_the_interpreter,  # noqa: F401
    golden,
    low_precision,
    random_inputs,
    run,
    splitting,  # noqa: F401
)
from tests.kernels.triton_testing import DEVICE, needs_triton, run_under_interpreter

FLOOR = -10.0

# Where the log decay of a token lies: logits, their spread, and the range of exp(A_log), in Kimi Linear [1, 16].
GATES = {
    "cut": (20.0, 1.0, 16.0, 16.0),  # e^-320
    "mixed": (0.0, 4.0, 1.0, 16.0),  # about a third of the channels are cut
    "uncut": (-3.0, 1.0, 1.0, 4.0),
    "fresh": (-4.0, 1.5, 1.0, 16.0),  # as initialised: softplus in [1e-3, 0.1]
    "none": (-14.0, 1.0, 1.0, 16.0),
}


def inputs_of(gate, B, T, H, K, V, **options):
    """Raw inputs by name, for a gate of `GATES`."""
    shift, spread, low, high = GATES[gate]
    inputs = random_inputs(B, T, H, K, V, **options)
    g = inputs["g"]
    inputs["g"] = (shift + spread * torch.randn(g.shape, device=DEVICE)).to(g.dtype)
    inputs["A_log"] = torch.empty_like(inputs["A_log"]).uniform_(low, high).log()
    inputs["dt_bias"] *= 0.1
    return inputs


def kernels(*tensors, initial_state=None, cu_seqlens=None, output_final_state=False):
    """The Triton form without the operator's refusal of float32."""
    scale = tensors[0].shape[-1] ** -0.5
    return autograd.kda_chunk((*tensors, initial_state, cu_seqlens), None, scale, output_final_state)


def operator(*tensors, **options):
    return kda_chunk(*tensors, gate_lower_bound=None, impl="triton", **options)


def recurrence(*tensors, **options):
    return kda_recurrent_reference(*tensors, gate_lower_bound=None, **options)


def chunks(*tensors, **options):
    return kda_chunk_reference(*tensors, gate_lower_bound=None, **options)


def cut_recurrence(*tensors, **options):
    """The recurrence with the decay of the cut gate and, as in the kernels, the gradient of the gate as it was."""

    def log_decay(*arguments):
        decay = exact_log_decay(*arguments).exp()
        return (decay + (decay.clamp(min=math.exp(FLOOR)) - decay).detach()).log()

    exact_log_decay = reference.log_decay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "log_decay", log_decay)
        return recurrence(*tensors, **options)


def scale_of(name, exact, inputs):
    """Norm that rounding errors of a result are compared with; sums that cancel count by their parts."""
    if name == "dt_bias":
        return exact["g"].norm()
    if name == "A_log":
        logits = inputs["g"].double() + inputs["dt_bias"].double().view(inputs["g"].shape[2:])
        return (exact["g"] * nn.functional.softplus(logits) / logits.sigmoid()).norm()
    return exact[name].norm()


def check(form, inputs, *, exact, plain, eps, left=0.0, **options):
    """Root mean square error at most twice that of `plain`, an independent evaluation, plus `eps` of the result.

    `left`: what more the gradient of the initial state may be off by.
    """
    wide = {name: x.double() for name, x in inputs.items()}
    exact, plain, actual = (run(f, x, **options) for f, x in ((exact, wide), (plain, inputs), (form, inputs)))
    for name, x in exact.items():
        error, error_plain = ((y[name].double() - x).norm().item() for y in (actual, plain))
        # The floor is for gradients that vanish in exact arithmetic.
        allowed = 2 * error_plain + eps * scale_of(name, exact, inputs).item() + 1e-6
        if name == "initial_state":
            allowed += left
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"
    return actual


def check_float32(inputs, **options):
    """Sums of 16 terms behind factors of up to 2^115: 100 roundings, as for the bounded gate."""
    eps = 100 * torch.finfo(torch.float32).eps
    if DEVICE.type == "cuda":
        eps *= 2  # products are made of three tf32 ones there, which round to 2^-22
    return check(kernels, inputs, exact=cut_recurrence, plain=cut_recurrence, eps=eps, **options)


def check_half_precision(inputs, dtype):
    """Against the gate that is not cut, with no more room for the cut than one rounding of the result.

    But the initial state, of which nothing may be left, has no rounding: e^-10 of the gradient behind the first gate.
    """

    def rounded(*tensors, **named):
        return low_precision(*tensors, dtype=dtype, gate_lower_bound=None, **named)

    open_gate = {name: x.double() for name, x in inputs.items()}
    open_gate["g"][:, 0] = -1e4
    left = math.exp(FLOOR) * run(recurrence, open_gate)["initial_state"].norm().item()
    # float16 is computed with in float32.
    plain = rounded if dtype == torch.bfloat16 else chunks
    return check(operator, inputs, exact=recurrence, plain=plain, eps=torch.finfo(dtype).eps, left=left)


# The arithmetic of the kernels, in float32.


@needs_triton
@pytest.mark.parametrize("gate", GATES)
def test_triton_computes_the_cut_gate(gate):
    check_float32(inputs_of(gate, 1, 45, 1, 16, 16))


@needs_triton
@pytest.mark.parametrize(
    "shape",
    [dict(H=1, HV=3, K=12, V=40), dict(H=2, K=48, V=8), dict(H=1, K=16, V=136)],
    ids=["three-value-heads-K12-V40", "K48-V8", "K16-V136"],
)
def test_head_shapes_of_triton(shape):
    check_float32(inputs_of("mixed", 2, 21, **shape))


@needs_triton
def test_split_documents_of_triton(splitting):  # noqa: F811
    check_float32(inputs_of("mixed", 1, 69, 1, 16, 24))


@needs_triton
def test_packed_documents_of_triton():
    """Empty, one-token and chunk-sized documents, with states; what stands in slack rows reaches nothing."""
    lengths = [0, 1, 33, 0, 5, 16]
    offsets = torch.tensor([0, *lengths], device=DEVICE, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = sum(lengths)
    inputs = inputs_of("mixed", 1, total + 6, 1, 16, 16, HV=2, documents=len(lengths))
    expected = check_float32(inputs, cu_seqlens=offsets)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, total:] = float("nan")
    actual = run(kernels, inputs, cu_seqlens=offsets)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name
    for name in ("o", "q", "k", "v", "g", "beta"):
        assert not actual[name][:, total:].any(), f"{name} of slack rows is not zero"


@needs_triton
def test_golden_numbers_of_triton():
    """Tolerances: those published with the numbers, plus float32 rounding (three tf32 products on a GPU)."""
    case = CASES["softplus"]
    data = {n.removeprefix("softplus."): x.to(DEVICE) for n, x in golden().items() if n.startswith("softplus.")}
    stored = {"g": "g_raw", "beta": "beta_raw"}
    inputs = {n: data[stored.get(n, n)].float() for n in (*NAMES, "initial_state")}
    assert reference.log_decay(inputs["g"], inputs["A_log"], inputs["dt_bias"], case["gate_lower_bound"]).min() > FLOOR
    actual = run(kernels, inputs, o_weight=data["do"], state_weight=data["dstate"])
    torch.testing.assert_close(actual["o"], data["o"], rtol=0, atol=2e-5)
    torch.testing.assert_close(actual["final_state"], data["final_state"], rtol=0, atol=2e-5)
    expected = {n: data["d_" + stored.get(n, n)] for n in inputs}
    rounding = 4 * torch.finfo(torch.float32).eps * max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        error = (actual[name] - x).abs().max().item()
        assert error <= 2e-4 * x.abs().max().item() + rounding, f"gradient of {name}: {error:.2e}"


@needs_triton
def test_softplus_of_triton_at_both_ends():
    """Softplus is e^x far below zero and x far above it, and neither 1 + e^x nor e^x may be taken as they stand.

    One head for each logit. Nothing is written, so that the state of ones becomes e^g, whose sum over keys and values
    has the gradients e^g dg by each logit and e^g g by A_log. The relative error is that of a float32 x log2(e) as an
    exponent, |x| 2^-24 = 2^-19, and as much for roundings.
    """
    logits = torch.tensor([-30.0, -16.0, -8.0, -1.0, 0.0, 1.0, 5.0, 9.0], device=DEVICE)
    inputs = random_inputs(1, 1, 8, 16, 16)
    inputs["g"] = logits[:, None].expand_as(inputs["g"]).clone().requires_grad_()
    inputs["A_log"] = torch.zeros_like(logits).requires_grad_()
    inputs["dt_bias"] *= 0
    inputs["beta"] -= 200
    start = torch.ones_like(inputs["initial_state"])
    _, state = kernels(*[inputs[n] for n in NAMES], initial_state=start, output_final_state=True)
    dg, dA_log = torch.autograd.grad(state.sum(), (inputs["g"], inputs["A_log"]))
    softplus = nn.functional.softplus(logits.double())
    decay = (-softplus).exp()
    tolerance = {"rtol": 2**-18, "atol": 0.0}
    torch.testing.assert_close(state.double(), decay.view(8, 1, 1).expand_as(state), **tolerance)
    expected = 16 * decay * -logits.double().sigmoid()
    torch.testing.assert_close(dg.double(), expected[:, None].expand_as(dg), **tolerance)
    torch.testing.assert_close(dA_log.double(), 16 * 16 * decay * -softplus, **tolerance)


@needs_triton
@pytest.mark.parametrize("logit", [9.0, 10.5, 50.0, 1e30])
def test_triton_is_off_by_as_much_as_is_promised(logit):
    """A token that should empty the state leaves up to e^-10 of it; nothing overflows, whatever the logit."""
    inputs = random_inputs(1, 1, 1, 16, 16)
    inputs["g"] = torch.full_like(inputs["g"], logit)
    inputs["A_log"], inputs["dt_bias"] = inputs["A_log"] * 0, inputs["dt_bias"] * 0
    inputs["beta"] = inputs["beta"] - 200
    actual = run(kernels, inputs)
    exact = run(recurrence, {name: x.double() for name, x in inputs.items()})
    error = (actual["final_state"].double() - exact["final_state"]).abs() / inputs["initial_state"].double().abs()
    decay = 1 / (1 + math.exp(min(logit, 99)))
    promised = max(math.exp(FLOOR) - decay, 0.0)
    assert (error - promised).abs().max() <= 2**-18 * (promised + decay)
    assert all(torch.isfinite(x).all() for x in actual.values())
    # The gate's gradient is that without the cut, whose decay it is proportional to.
    scale = exact["g"].abs().max().item()
    torch.testing.assert_close(actual["g"].double(), exact["g"], rtol=0, atol=2**-14 * scale)


# Half precision, as offered.


@needs_triton
@pytest.mark.parametrize("gate", GATES)
def test_bf16_of_triton_hides_the_cut(bf16_in_the_interpreter, gate):  # noqa: F811
    check_half_precision(inputs_of(gate, 1, 70, 1, 32, 32, dtype=torch.bfloat16), torch.bfloat16)


@needs_triton
@pytest.mark.parametrize("gate", GATES)
def test_fp16_of_triton_hides_the_cut(gate):
    inputs = inputs_of(gate, 1, 45, 1, 16, 16)
    half = {n: x.half() if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}
    check_half_precision(half, torch.float16)


@needs_triton
def test_compiled_triton_op_is_one_graph_with_the_same_numbers():
    inputs = inputs_of("mixed", 1, 20, 1, 16, 16)
    half = {n: x.half() if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    eager, traced = run(operator, half), run(compiled, half)
    for name, x in eager.items():
        assert torch.equal(x, traced[name]), name


@needs_triton
def test_triton_op_registrations():
    inputs = inputs_of("mixed", 1, 5, 1, 16, 16)
    arguments = (*[inputs[n].requires_grad_() for n in NAMES], None, None, None, 0.25, True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(autograd.kda_chunk_op, arguments, test_utils=tests)


@needs_triton
def test_auto_takes_triton_for_half_precision_alone(monkeypatch):
    inputs = inputs_of("mixed", 1, 4, 1, 16, 16)
    calls = []
    run_triton = autograd.kda_chunk
    monkeypatch.setattr(autograd, "kda_chunk", lambda *args: calls.append(args[1]) or run_triton(*args))
    kda_chunk(*[inputs[n] for n in NAMES], gate_lower_bound=None)
    assert not calls
    kda_chunk(*[inputs[n].half() for n in NAMES], gate_lower_bound=None)
    assert calls == [None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_float32_is_refused_with_the_reason(dtype):
    """What a float32 caller asked for is more than the cut leaves; `v` decides, whose dtype is that of the result."""
    inputs = random_inputs(1, 4, 1, 16, 16, dtype=dtype)
    with pytest.raises(ValueError, match=r"e\^-10 per token.*got torch.float32 for `v`: use 'torch'"):
        operator(*[inputs[n].float() if n == "v" else inputs[n] for n in NAMES])


def test_under_the_interpreter():
    run_under_interpreter(__file__)


# On a GPU, at sizes of use.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("gate", GATES)
def test_half_precision_on_gpu(dtype, width, gate):
    check_half_precision(inputs_of(gate, 2, 150, 2, width, width, dtype=dtype), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["mixed", "fresh"])
def test_long_split_documents_on_gpu(gate):
    """So few heads and so many tokens that documents are split; bounds as for the bounded gate."""
    offsets = torch.tensor([0, 3000, 3000, 8100], device=DEVICE)
    inputs = inputs_of(gate, 1, 8192, 1, 128, 128, dtype=torch.bfloat16, documents=3)
    exact = run(chunks, {name: x.double() for name, x in inputs.items()}, cu_seqlens=offsets)
    actual = run(operator, inputs, cu_seqlens=offsets)
    for name in ("o", "final_state", "q", "k", "v", "g", "beta", "initial_state"):
        error = (actual[name].double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-6)
        allowed = 2**-7 * (2**0.5 if name == "beta" else 1.0)
        assert error <= allowed, (name, error.item())
