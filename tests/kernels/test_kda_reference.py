# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""KDA references: golden numbers, chunked form against the recurrence in float64, extremes, packing, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltalatent.kernels.kda import kda_chunk, kda_chunk_reference, kda_recurrent, kda_recurrent_reference

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "kda_op"
CASES = json.loads((GOLDEN / "config.json").read_text())["cases"]
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
FORMS = {
    "recurrent": kda_recurrent_reference,
    "chunk64": kda_chunk_reference,
    "chunk16": lambda *args, **kwargs: kda_chunk_reference(*args, chunk_size=16, **kwargs),
}


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


def make_inputs(B, T, H, K, V, *, HV=None, N=None, gate="wide", keys="random", dtype=torch.float64, seed=0):
    """Random raw inputs as a dict; `gate` sets where the log decay lies, `keys` how alike neighbouring keys are."""
    rng = torch.Generator().manual_seed(seed)
    HV = HV or H

    def randn(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q, k, v, g, beta = randn(B, T, H, K), randn(B, T, H, K), randn(B, T, HV, V), randn(B, T, HV, K), randn(B, T, HV)
    if gate == "bound":
        g = g + 30
    elif gate == "zero":
        g = g - 12
    elif gate == "wide":
        g = 4 * g
    if keys == "collinear":
        k = randn(B, 1, H, K) + 0.02 * k
        beta = beta + 6
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": 0.5 * randn(HV), "dt_bias": randn(HV * K)}
    inputs["initial_state"] = randn(N or B, HV, K, V)
    return {name: x.to(dtype) for name, x in inputs.items()}


def run(form, inputs, *, o_weight=None, state_weight=None, **kwargs):
    """Output, final state and the gradients of a fixed random functional of both."""
    inputs = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    args = [inputs[name] for name in NAMES]
    o, state = form(*args, initial_state=inputs.get("initial_state"), output_final_state=True, **kwargs)
    rng = torch.Generator().manual_seed(99)
    if o_weight is None:
        o_weight = torch.randn(o.shape, generator=rng, dtype=torch.float64)
        state_weight = torch.randn(state.shape, generator=rng, dtype=torch.float64)
    loss = (o.double() * o_weight).sum() + (state.double() * state_weight).sum()
    grads = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    return {"o": o.detach(), "state": state.detach()} | {f"d_{n}": x for n, x in zip(inputs, grads, strict=True)}


def assert_all_close(got, expected, tolerance):
    """Every tensor within `tolerance` of the largest element of its counterpart (absolute where that is below 1)."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.isfinite(got[name]).all(), f"{name} is not finite"
        error = (got[name].double() - x.double()).abs().max().item() if x.numel() else 0.0
        bound = tolerance * max(1.0, x.abs().max().item() if x.numel() else 0.0)
        assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_golden_outputs_states_and_gradients(golden, case, form):
    """Tolerances: those published with the numbers, plus float32 rounding where the exact gradient is zero."""
    data = {name.removeprefix(f"{case}."): x for name, x in golden.items() if name.startswith(f"{case}.")}
    inputs = {n: data[{"g": "g_raw", "beta": "beta_raw"}.get(n, n)].float() for n in NAMES}
    if "initial_state" in data:
        inputs["initial_state"] = data["initial_state"]
    got = run(
        FORMS[form],
        inputs,
        o_weight=data.get("do"),
        state_weight=data.get("dstate"),
        gate_lower_bound=CASES[case]["gate_lower_bound"],
        cu_seqlens=data.get("cu_seqlens"),
    )
    torch.testing.assert_close(got["o"], data["o"], rtol=0, atol=2e-5)
    torch.testing.assert_close(got["state"], data["final_state"], rtol=0, atol=2e-5)
    if "do" not in data:
        assert not CASES[case]["gradients"]
        return
    tolerance = 1e-3 if case == "all_min" else 2e-4
    expected = {n: data["d_" + {"g": "g_raw", "beta": "beta_raw"}.get(n, n)] for n in inputs}
    rounding = torch.finfo(torch.float32).eps * max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        error = (got[f"d_{name}"] - x).abs().max().item()
        assert error <= tolerance * x.abs().max().item() + rounding, f"gradient of {name}: {error:.2e}"


SHAPES = [pytest.param(dict(B=2, T=T, H=2, K=8, V=12), id=f"T{T}") for T in (1, 15, 16, 17, 63, 64, 65, 131)] + [
    pytest.param(dict(B=1, T=70, H=2, HV=6, K=8, V=4), id="three-value-heads-per-key-head")
]


@pytest.mark.parametrize("gate_lower_bound", [-5.0, -20.0, None], ids=["bound5", "bound20", "softplus"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunk_equals_recurrence_in_float64(shape, gate_lower_bound):
    inputs = make_inputs(**shape)
    expected = run(kda_recurrent_reference, inputs, gate_lower_bound=gate_lower_bound)
    got = run(kda_chunk_reference, inputs, gate_lower_bound=gate_lower_bound)
    assert_all_close(got, expected, 1e-10)


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("gate_lower_bound", [-5.0, None], ids=["bound5", "softplus"])
def test_chunk_equals_recurrence_on_packed_documents(chunk_size, gate_lower_bound):
    """Empty, one-token, chunk-sized and longer documents in any order, and slack rows behind them."""
    lengths = [0, 1, 64, 0, 17, 150, 1, 16, 0]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    inputs = make_inputs(1, sum(lengths) + 9, 2, 8, 8, N=len(lengths))
    kwargs = {"gate_lower_bound": gate_lower_bound, "cu_seqlens": cu_seqlens}
    expected = run(kda_recurrent_reference, inputs, **kwargs)
    got = run(kda_chunk_reference, inputs, **kwargs, chunk_size=chunk_size)
    assert_all_close(got, expected, 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_packed_equals_separate(form):
    lengths = [7, 1, 0, 70]
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    inputs = make_inputs(1, sum(lengths), 2, 8, 8, N=len(lengths))
    packed = run(FORMS[form], inputs, cu_seqlens=cu_seqlens)
    for n, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        args = [inputs[name][:, start:end] if inputs[name].dim() > 2 else inputs[name] for name in NAMES]
        o, state = FORMS[form](*args, initial_state=inputs["initial_state"][n : n + 1], output_final_state=True)
        torch.testing.assert_close(packed["o"][:, start:end], o, rtol=0, atol=1e-12)
        torch.testing.assert_close(packed["state"][n : n + 1], state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_no_document_are_zero_and_leave_no_trace(form):
    """NaN in the slack rows must reach neither the outputs nor the gradients of the document."""
    inputs = make_inputs(1, 32, 2, 8, 8, N=1)
    cu_seqlens = torch.tensor([0, 20])
    clean = run(FORMS[form], inputs, cu_seqlens=cu_seqlens)
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(clean[f"d_{name}"][:, 20:], torch.zeros_like(clean[f"d_{name}"][:, 20:]))
        inputs[name][:, 20:] = 1e3
    moved = run(FORMS[form], inputs, cu_seqlens=cu_seqlens)
    assert torch.equal(clean["o"][:, 20:], torch.zeros_like(clean["o"][:, 20:]))
    for name, x in clean.items():
        assert torch.equal(x, moved[name]), name


@pytest.mark.parametrize(
    "style",
    [dict(gate="bound"), dict(gate="zero"), dict(gate="zero", keys="collinear"), dict(gate="bound", keys="collinear")],
    ids=["all-at-the-bound", "no-decay", "collinear-keys", "collinear-at-the-bound"],
)
def test_extremes_in_float32_against_float64(style):
    """S01, S02, S06 of the field's reports: finite everywhere, and as accurate as float32 allows.

    Bound: twice the error of the float32 recurrence plus 1e-4 of the largest element. The band covers what the inverse
    of a 64-token chunk of nearly equal keys may amplify (its norm reaches 64, times 2^-24, times a few products).
    """
    inputs = make_inputs(1, 130, 2, 16, 16, **style)
    expected = run(kda_recurrent_reference, inputs)
    single = {name: x.float() for name, x in inputs.items()}
    plain = run(kda_recurrent_reference, single)
    got = run(kda_chunk_reference, single)
    for name, x in expected.items():
        largest = x.abs().max().item()
        error, error_plain = ((y[name].double() - x).abs().max().item() for y in (got, plain))
        assert torch.isfinite(got[name]).all() and error <= 2 * error_plain + 1e-4 * largest, (name, error, largest)


@pytest.mark.parametrize("form", FORMS)
def test_unbounded_gate_of_any_size_stays_finite(form):
    """S02, S03: log decays from 0 to -800 per token in one head."""
    inputs = make_inputs(1, 67, 2, 8, 8)
    inputs["g"] = torch.linspace(-8, 300, 67, dtype=torch.float64).view(1, 67, 1, 1).expand(1, 67, 2, 8).clone()
    inputs["A_log"] = torch.tensor([1.0, -1.0], dtype=torch.float64)
    expected = run(kda_recurrent_reference, inputs, gate_lower_bound=None)
    got = run(FORMS[form], {n: x.float() for n, x in inputs.items()}, gate_lower_bound=None)
    assert_all_close(got, expected, 1e-4)


def test_future_tokens_do_not_matter():
    inputs = make_inputs(2, 100, 2, 8, 8, dtype=torch.float32)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, 50:] += 1
    before, _ = kda_chunk_reference(*[inputs[n] for n in NAMES])
    after, _ = kda_chunk_reference(*[changed[n] for n in NAMES])
    assert torch.equal(before[:, :50], after[:, :50])
    assert not torch.equal(before[:, 50:], after[:, 50:])


def test_equal_rows_give_equal_results():
    """S05: the result of a row does not depend on the batch around it."""
    inputs = make_inputs(1, 70, 2, 8, 8, dtype=torch.float32)
    inputs.pop("initial_state")
    one, _ = kda_chunk_reference(*[inputs[n] for n in NAMES])
    rows = [x.expand(4, *x.shape[1:]) if x.dim() > 2 else x for x in (inputs[n] for n in NAMES)]
    four, _ = kda_chunk_reference(*rows)
    torch.testing.assert_close(four, one.expand_as(four), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_inputs_are_computed_in_float32(dtype):
    inputs = make_inputs(1, 40, 2, 8, 8, dtype=dtype)
    inputs["initial_state"] = inputs["initial_state"].float()
    o, state = kda_chunk_reference(*[inputs[n] for n in NAMES], output_final_state=True)
    exact, exact_state = kda_recurrent_reference(*[inputs[n].double() for n in NAMES], output_final_state=True)
    assert o.dtype == dtype and state.dtype == torch.float32
    torch.testing.assert_close(state.double(), exact_state, rtol=0, atol=1e-5)
    torch.testing.assert_close(o, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_prefill_then_decode_equals_whole():
    inputs = make_inputs(2, 40, 2, 8, 8)
    whole, whole_state = kda_chunk(
        *[inputs[n] for n in NAMES], initial_state=inputs["initial_state"], output_final_state=True
    )
    head = [x[:, :37] if x.dim() > 2 else x for x in (inputs[n] for n in NAMES)]
    outputs = [None]
    outputs[0], state = kda_chunk(*head, initial_state=inputs["initial_state"], output_final_state=True)
    state = state.clone()
    for t in range(37, 40):
        token = [x[:, t : t + 1] if x.dim() > 2 else x for x in (inputs[n] for n in NAMES)]
        o, returned = kda_recurrent(*token, initial_state=state, inplace_state=True)
        assert returned is state
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, whole_state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens(form):
    inputs = make_inputs(2, 0, 2, 8, 8)
    got = run(FORMS[form], inputs)
    assert got["o"].shape == (2, 0, 2, 8) and torch.equal(got["state"], inputs["initial_state"])


@pytest.mark.parametrize("form", FORMS)
def test_no_documents(form):
    inputs = make_inputs(1, 20, 1, 8, 8)
    inputs["initial_state"] = inputs["initial_state"][:0]
    got = run(FORMS[form], inputs, cu_seqlens=torch.tensor([0]))
    assert got["state"].shape == (0, 1, 8, 8)
    assert not got["o"].any()
    assert not got["d_v"].any()


@pytest.mark.parametrize("form", FORMS)
def test_a_log_of_any_shape(form):
    """Transformers keeps it as [1, 1, HV, 1]."""
    inputs = make_inputs(1, 3, 2, 8, 8)
    expected = run(FORMS[form], inputs)
    got = run(FORMS[form], inputs | {"A_log": inputs["A_log"].view(1, 1, 2, 1)})
    assert torch.equal(got["o"], expected["o"])
    assert torch.equal(got["d_A_log"].flatten(), expected["d_A_log"])


REFUSALS = {
    "k-shape": (
        dict(k=torch.zeros(1, 4, 2, 9)),
        {},
        ValueError,
        r"`k` must have shape \[B, T, H, K\] = \[1, 4, 2, 8\]",
    ),
    "head-ratio": (dict(v=torch.zeros(1, 4, 3, 8)), {}, ValueError, "multiple of the number of key heads 2, got 3"),
    "padded-A_log": (dict(A_log=torch.zeros(128)), {}, ValueError, "HV = 2 elements, got 128"),
    "integer": (dict(beta=torch.zeros(1, 4, 2, dtype=torch.int64)), {}, TypeError, "`beta` must be a floating point"),
    "positive-bound": ({}, dict(gate_lower_bound=5.0), ValueError, "must be negative"),
    "float-offsets": ({}, dict(cu_seqlens=torch.tensor([0.0, 4.0])), TypeError, "int32 or int64"),
    "state-count": (
        {},
        dict(cu_seqlens=torch.tensor([0, 2, 4]), initial_state=torch.zeros(1, 2, 8, 8)),
        ValueError,
        r"`initial_state` must have shape \[N, HV, K, V\] = \[2, 2, 8, 8\]",
    ),
    "unknown-impl": ({}, dict(impl="cuda"), ValueError, "impl"),
}


@pytest.mark.parametrize("op", [kda_chunk, kda_recurrent])
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_was_expected(op, case):
    replaced, kwargs, error, message = REFUSALS[case]
    inputs = make_inputs(1, 4, 2, 8, 8, dtype=torch.float32) | replaced
    with pytest.raises(error, match=message):
        op(*[inputs[n] for n in NAMES], **kwargs)


def test_packed_batch_of_rows_is_refused():
    inputs = make_inputs(2, 4, 2, 8, 8)
    with pytest.raises(ValueError, match="batch size 1, got 2"):
        kda_chunk(*[inputs[n] for n in NAMES], cu_seqlens=torch.tensor([0, 4, 8]))


def test_chunk_size_must_hold_whole_tiles():
    inputs = make_inputs(1, 4, 2, 8, 8)
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        kda_chunk(*[inputs[n] for n in NAMES], chunk_size=24, impl="torch")
