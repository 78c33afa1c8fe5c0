# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Short convolution: a float64 loop over tokens → the PyTorch form → Triton; packing, states, gradients, messages."""

import itertools
import math

import pytest
import torch

from deltalatent.kernels.short_conv import short_convolution, short_convolution_reference
from tests.kernels.test_kda_triton import unwritten_memory_is_nan
from tests.kernels.triton_testing import DEVICE, assert_as_exact_as_plain, needs_triton, run_under_interpreter

# Empty and one-token documents, documents shorter than the window, and two slack tokens of thirteen.
OFFSETS = [0, 0, 1, 3, 3, 8, 11]
PACKED_LENGTH = 13


def loop(x, weight, initial_state=None, silu=True):
    """The equation for one document: x [T, D], weight [D, 1, W], state [D, W-1], one token and tap at a time."""
    width = weight.shape[2]
    history = torch.zeros(x.shape[1], width - 1, dtype=x.dtype) if initial_state is None else initial_state
    inputs = [*history.unbind(1), *x.unbind(0)]
    rows = []
    for t in range(x.shape[0]):
        total = sum(weight[:, 0, j] * inputs[t + j] for j in range(width))
        rows.append(total / (1 + torch.exp(-total)) if silu else total)
    y = torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])
    return y, torch.stack(inputs[len(inputs) - width + 1 :], dim=1)


def random_case(batch_size, total, channels, width, offsets=None, dtype=torch.float64, device="cpu"):
    documents = batch_size if offsets is None else len(offsets) - 1
    x = torch.randn(batch_size, total, channels, dtype=dtype, device=device)
    weight = torch.randn(channels, 1, width, dtype=torch.promote_types(dtype, torch.float32), device=device)
    state = torch.randn(documents, channels, width - 1, dtype=dtype, device=device)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    return x, weight, state, cu_seqlens


def assert_same(actual, expected):
    """Equal but for the last bits of float64: a CPU may fuse multiply and add in one loop and not in another."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize("total", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
def test_reference_is_the_equation(width, total, with_state):
    x, weight, state, _ = random_case(2, total, 5, width)
    state = state if with_state else None
    y, final = short_convolution(x, weight, initial_state=state, output_final_state=True, impl="torch")
    assert y.shape == x.shape
    assert final.shape == (2, 5, width - 1)
    for b in range(2):
        expected_y, expected_final = loop(x[b], weight, None if state is None else state[b])
        assert_same(y[b], expected_y)
        assert torch.equal(final[b], expected_final)


def test_no_activation():
    x, weight, _, _ = random_case(1, 6, 3, 4)
    y, _ = short_convolution(x, weight, activation=None)
    assert_same(y[0], loop(x[0], weight, silu=False)[0])


def test_last_tap_is_the_current_token():
    x = torch.randn(1, 7, 2)
    weight = torch.zeros(2, 1, 4)
    weight[:, 0, 3] = 1
    assert torch.equal(short_convolution(x, weight, activation=None)[0], x)
    weight = weight.roll(-1, dims=2)
    assert torch.equal(short_convolution(x, weight, activation=None)[0][:, 1:], x[:, :-1])


@pytest.mark.parametrize("width", [1, 2, 4, 6])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
def test_packed_documents_equal_separate_ones(width, with_state):
    x, weight, state, cu_seqlens = random_case(1, PACKED_LENGTH, 5, width, OFFSETS)
    y, final = short_convolution(
        x, weight, initial_state=state if with_state else None, cu_seqlens=cu_seqlens, output_final_state=True
    )
    for n, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        alone = state[n : n + 1] if with_state else None
        expected, expected_final = short_convolution(
            x[:, start:end], weight, initial_state=alone, output_final_state=True
        )
        assert_same(y[:, start:end], expected)
        assert torch.equal(final[n : n + 1], expected_final)
    assert not y[:, OFFSETS[-1] :].any()


def test_one_document_with_offsets_equals_no_offsets():
    x, weight, _, _ = random_case(1, 9, 5, 4)
    cu_seqlens = torch.tensor([0, 9])
    assert_same(short_convolution(x, weight, cu_seqlens=cu_seqlens)[0], short_convolution(x, weight)[0])


def test_other_documents_never_matter():
    """What the first document holds, NaN included, does not move the others: no product with a masked value."""
    x, weight, _, cu_seqlens = random_case(1, PACKED_LENGTH, 5, 4, OFFSETS)
    y, _ = short_convolution(x, weight, cu_seqlens=cu_seqlens)
    x[:, 1:3] = math.nan
    x[:, OFFSETS[-1] :] = math.nan
    changed, _ = short_convolution(x, weight, cu_seqlens=cu_seqlens)
    assert changed[:, 1:3].isnan().all()
    changed[:, 1:3] = y[:, 1:3]
    assert torch.equal(changed, y)


def test_slack_has_no_gradient():
    x, weight, _, cu_seqlens = random_case(1, PACKED_LENGTH, 5, 4, OFFSETS)
    x.requires_grad_()
    short_convolution(x, weight, cu_seqlens=cu_seqlens)[0].sum().backward()
    assert not x.grad[:, OFFSETS[-1] :].any()
    assert x.grad[:, : OFFSETS[-1]].all()


@pytest.mark.parametrize(
    "cuts", [[20], [12, 8], [12, 1, 7], [1] * 20, [3, 17]], ids=["20", "12+8", "12+1+7", "ones", "3+17"]
)
def test_any_cut_of_a_sequence_gives_the_same(cuts):
    x, weight, _, _ = random_case(2, 20, 5, 4)
    whole, final = short_convolution(x, weight, output_final_state=True)
    state, pieces = None, []
    for piece in x.split(cuts, dim=1):
        y, state = short_convolution(piece, weight, initial_state=state, output_final_state=True)
        pieces.append(y)
    assert_same(torch.cat(pieces, dim=1), whole)
    assert torch.equal(state, final)


@pytest.mark.parametrize("offsets", [None, [0, 0, 1, 3, 6]], ids=["rows", "packed"])
def test_reference_gradients(offsets):
    x, weight, state, cu_seqlens = random_case(2 if offsets is None else 1, 7, 2, 4, offsets)

    def run(x, weight, state):
        return short_convolution_reference(
            x, weight, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True
        )

    assert torch.autograd.gradcheck(run, [tensor.requires_grad_() for tensor in (x, weight, state)])


def test_streams_equal_separate_calls():
    cases = [random_case(2, 6, channels, 4) for channels in (3, 5, 2)]
    xs, weights, states = (tuple(case[i] for case in cases) for i in range(3))
    ys, finals = short_convolution(xs, weights, initial_state=states, output_final_state=True)
    for i in range(3):
        y, final = short_convolution(xs[i], weights[i], initial_state=states[i], output_final_state=True)
        assert torch.equal(ys[i], y)
        assert torch.equal(finals[i], final)
    ys, finals = short_convolution(xs, weights)
    assert isinstance(ys, tuple)
    assert finals is None


def test_state_in_place():
    x, weight, state, _ = random_case(2, 1, 5, 4)
    y, final = short_convolution(x, weight, initial_state=state, output_final_state=True)
    kept = state.clone()
    y_inplace, returned = short_convolution(x, weight, initial_state=kept, inplace_state=True)
    assert returned is kept
    assert torch.equal(kept, final)
    assert torch.equal(y_inplace, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    """Accumulated in float32: the error is that of rounding the result, half a unit in the last place."""
    x, weight, state, _ = random_case(2, 30, 8, 4, dtype=dtype)
    y, final = short_convolution(x, weight, initial_state=state, output_final_state=True, impl="torch")
    assert y.dtype == final.dtype == dtype
    exact, _ = short_convolution(x.double(), weight.double(), initial_state=state.double())
    half_unit = torch.finfo(dtype).eps / 2
    assert ((y.double() - exact).abs() <= exact.abs() * half_unit * 1.01 + 1e-6).all()


def test_compiles_without_graph_break():
    x, weight, _, cu_seqlens = random_case(1, PACKED_LENGTH, 5, 4, OFFSETS, dtype=torch.float32)

    def run(x):
        return short_convolution(x, weight, cu_seqlens=cu_seqlens)[0]

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


X, WEIGHT = torch.zeros(2, 5, 3), torch.zeros(3, 1, 4)


@pytest.mark.parametrize(
    ("x", "weight", "options", "error", "message"),
    [
        (X[0], WEIGHT, {}, ValueError, r"`x` must have shape \[B, T, D\]"),
        (X.long(), WEIGHT, {}, TypeError, "`x` must be a floating tensor, got torch.int64"),
        (X, WEIGHT[:2], {}, ValueError, r"`weight` must have shape \[D, 1, W\] with D=3, got \[2, 1, 4\]"),
        (X, WEIGHT[:, 0], {}, ValueError, r"`weight` must have shape \[D, 1, W\]"),
        (X, WEIGHT, {"activation": "gelu"}, ValueError, "'silu' or None, got 'gelu'"),
        (X, WEIGHT, {"initial_state": torch.zeros(2, 3, 4)}, ValueError, r"\[N, D, W-1\] = \[2, 3, 3\]"),
        (X, WEIGHT, {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "needs inputs with batch size 1, got 2"),
        (X[:1], WEIGHT, {"cu_seqlens": torch.tensor([0, 6])}, ValueError, "end at or before T=5, got 6"),
        (X, WEIGHT, {"inplace_state": True}, ValueError, "needs an `initial_state` for every stream"),
        (X, WEIGHT, {"impl": "cuda"}, ValueError, "must be one of 'auto', 'triton', 'torch', got 'cuda'"),
        ((X, X), WEIGHT, {}, ValueError, "`weight` must be a tuple of 2 tensors"),
        ((X, X[:, :4]), (WEIGHT, WEIGHT), {}, ValueError, "must share batch size, length, dtype and device"),
        ((X, X), (WEIGHT, WEIGHT[..., 1:]), {}, ValueError, "same number of taps"),
        (
            (X, X),
            (WEIGHT, WEIGHT.half()),
            {},
            ValueError,
            "weights of one dtype, got torch.float16 beside torch.float32",
        ),
        (
            (X, X),
            (WEIGHT, WEIGHT),
            {"initial_state": (torch.zeros(2, 3, 3), torch.zeros(2, 3, 3, dtype=torch.float64))},
            ValueError,
            "of one dtype, got torch.float32, torch.float64",
        ),
        ((), (), {}, ValueError, "at least one stream"),
        (X.double(), WEIGHT, {"impl": "triton"}, TypeError, "take float32, float16 or bfloat16, got torch.float64"),
        (X, WEIGHT.repeat(1, 1, 2), {"impl": "triton"}, ValueError, "take 2 to 4 taps, got 8"),
        ((X,) * 4, (WEIGHT,) * 4, {"impl": "triton"}, ValueError, "up to 3 streams, got 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(x, weight, options, error, message):
    with pytest.raises(error, match=message):
        short_convolution(x, weight, **options)


def test_in_place_state_has_no_gradient():
    with pytest.raises(ValueError, match=r"no gradient: call it under `torch.no_grad\(\)`"):
        short_convolution(X, WEIGHT.clone().requires_grad_(), initial_state=torch.zeros(2, 3, 3), inplace_state=True)


# Triton


def evaluate(impl, tensors, cu_seqlens, activation, dtype=None):
    """Outputs, final states and all gradients of `sum(y*dy) + sum(final*dfinal)`; `dtype` casts everything."""
    xs, weights, states, dys, dfinals = (
        tuple(tensor.detach().clone() if dtype is None else tensor.detach().to(dtype) for tensor in group)
        for group in tensors
    )
    leaves = [tensor.requires_grad_() for tensor in (*xs, *weights, *states)]
    ys, finals = short_convolution(
        xs,
        weights,
        initial_state=states or None,
        cu_seqlens=cu_seqlens,
        output_final_state=bool(dfinals),
        activation=activation,
        impl=impl,
    )
    outputs = [*ys, *(finals or ())]
    grads = torch.autograd.grad(outputs, leaves, [*dys, *dfinals])
    return [*outputs, *grads]


def check_triton(streams, batch_size, total, width, offsets, dtype, with_state, with_final, activation="silu"):
    cases = [random_case(batch_size, total, d, width, offsets, dtype, DEVICE) for d in streams]
    xs, weights, states = (tuple(case[i] for case in cases) for i in range(3))
    cu_seqlens = cases[0][3]
    dys = tuple(torch.randn_like(x) for x in xs)
    dfinals = tuple(torch.randn_like(state) for state in states) if with_final else ()
    tensors = (xs, weights, states if with_state else (), dys, dfinals)
    actual = evaluate("triton", tensors, cu_seqlens, activation)
    plain = evaluate("torch", tensors, cu_seqlens, activation)
    exact = evaluate("torch", tensors, cu_seqlens, activation, dtype=torch.float64)
    for i, triple in enumerate(zip(actual, exact, plain, strict=True)):
        assert_as_exact_as_plain(*triple, f"result {i}")


@needs_triton
@pytest.mark.parametrize("with_final", [False, True], ids=["", "final-state"])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["rows", "packed"])
def test_triton_equals_torch(offsets, with_state, with_final):
    batch_size, total = (1, PACKED_LENGTH) if offsets else (2, 6)
    check_triton((5, 3), batch_size, total, 4, offsets, torch.float32, with_state, with_final)


@needs_triton
@pytest.mark.parametrize("lengths", [(6, 2), (4, 1, 1), (31, 1)], ids=str)
def test_triton_last_documents_end_with_the_row(lengths):
    """Nothing flows back from documents shorter than the window into those before, also without slack behind them."""
    offsets = [0, *itertools.accumulate(lengths)]
    check_triton((3,), 1, offsets[-1], 4, offsets, torch.float32, False, False)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_triton_in_half_precision(dtype):
    check_triton((5, 3, 2), 1, 6, 4, [0, 1, 5], dtype, True, True)


@needs_triton
@pytest.mark.parametrize("width", [2, 3])
def test_triton_with_fewer_taps(width):
    check_triton((3,), 1, 6, width, [0, 1, 5], torch.float32, True, True, activation=None)


@needs_triton
def test_triton_takes_slices_of_a_fused_projection():
    fused = torch.randn(2, 5, 12, device=DEVICE)
    weight = torch.randn(3, 1, 4, device=DEVICE)
    for x in (fused[..., 3:6], fused[:, :, :3].transpose(0, 1), fused[:, :, ::4]):
        y, _ = short_convolution(x, weight, impl="triton")
        torch.testing.assert_close(y, short_convolution(x, weight, impl="torch")[0])


@needs_triton
def test_triton_does_not_touch_other_documents():
    x, weight, _, cu_seqlens = random_case(1, PACKED_LENGTH, 3, 4, OFFSETS, torch.float32, DEVICE)
    y, _ = short_convolution(x, weight, cu_seqlens=cu_seqlens, impl="triton")
    x[:, 1:3] = math.nan
    x[:, OFFSETS[-1] :] = math.nan
    changed, _ = short_convolution(x, weight, cu_seqlens=cu_seqlens, impl="triton")
    changed[:, 1:3] = y[:, 1:3]
    assert torch.equal(changed, y)
    assert not y[:, OFFSETS[-1] :].any()


@needs_triton
def test_unwritten_memory_does_not_reach_triton_results():
    x, weight, state, cu_seqlens = random_case(1, PACKED_LENGTH, 3, 4, OFFSETS, torch.float32, DEVICE)
    tensors = ((x,), (weight,), (state,), (torch.randn_like(x),), (torch.randn_like(state),))
    expected = evaluate("triton", tensors, cu_seqlens, "silu")
    with unwritten_memory_is_nan():
        actual = evaluate("triton", tensors, cu_seqlens, "silu")
    assert all(map(torch.equal, actual, expected))


@needs_triton
@pytest.mark.parametrize("total", [1, 3])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "in-place"])
def test_triton_step_equals_whole(total, inplace):
    cases = [random_case(2, total, d, 4, None, torch.float32, DEVICE) for d in (5, 3)]
    xs, weights, states = (tuple(case[i] for case in cases) for i in range(3))
    expected, expected_final = short_convolution(
        xs, weights, initial_state=states, output_final_state=True, impl="torch"
    )
    kept = tuple(state.clone() for state in states)
    ys, finals = short_convolution(
        xs, weights, initial_state=kept, output_final_state=True, inplace_state=inplace, impl="triton"
    )
    for i in range(2):
        torch.testing.assert_close(ys[i], expected[i])
        assert torch.equal(finals[i], expected_final[i])
        assert (finals[i] is kept[i]) == inplace
        assert torch.equal(kept[i], expected_final[i] if inplace else states[i])


@needs_triton
def test_triton_without_tokens_or_documents():
    x, weight, state, _ = random_case(2, 0, 3, 4, None, torch.float32, DEVICE)
    x.requires_grad_()
    weight.requires_grad_()
    y, final = short_convolution(x, weight, initial_state=state, output_final_state=True, impl="triton")
    assert y.shape == (2, 0, 3)
    assert torch.equal(final, state)
    y.sum().backward()
    assert not weight.grad.any()


@needs_triton
def test_triton_refuses_second_derivatives():
    x, weight, _, _ = random_case(1, 4, 3, 4, None, torch.float32, DEVICE)
    y, _ = short_convolution(x.requires_grad_(), weight, impl="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@needs_triton
def test_triton_under_compile():
    x, weight, _, cu_seqlens = random_case(1, 6, 3, 4, [0, 2, 5], torch.float32, DEVICE)
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def run(x, weight):
        return short_convolution(x, weight, cu_seqlens=cu_seqlens, impl="triton")[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected, actual = run(*leaves), compiled(*leaves)
    assert torch.equal(actual, expected)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@needs_triton
def test_triton_operators_are_registered_consistently():
    """Schema, fake shapes and autograd of the operators that `torch.compile` sees."""
    x, weight, state, cu_seqlens = random_case(1, 4, 3, 4, [0, 2], torch.float32, DEVICE)
    ops = torch.ops.deltalatent
    leaves = [[tensor.requires_grad_()] for tensor in (x, weight, state)]
    torch.library.opcheck(ops.short_conv, (*leaves, cu_seqlens, True, True))
    plain = [[tensor.detach()] for (tensor,) in leaves]
    torch.library.opcheck(ops.short_conv_step, (*plain, True))
    torch.library.opcheck(ops.short_conv_step_, (*plain, [torch.empty_like(x)], True))


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("total", [1, 15, 16, 17, 63, 64, 65, 1500, 4096], ids=lambda total: f"T{total}")
def test_gpu_lengths(total, dtype):
    check_triton((256, 136, 320), 2, total, 4, None, dtype, True, True)


@pytest.mark.gpu
@pytest.mark.parametrize("slack", [0, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_many_documents(dtype, slack):
    lengths = torch.randint(0, 40, (150,), generator=torch.Generator().manual_seed(0))
    lengths[-2:] = 1
    offsets = [0, *lengths.cumsum(0).tolist()]
    check_triton((256, 136, 320), 1, offsets[-1] + slack, 4, offsets, dtype, True, True)


@pytest.mark.gpu
def test_gpu_runs_repeat_bit_for_bit_and_rows_do_not_mix():
    row = torch.randn(1, 700, 384, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(384, 1, 4, device=DEVICE)
    x = row.expand(5, -1, -1).contiguous().requires_grad_()
    weight.requires_grad_()

    def run():
        y, _ = short_convolution(x, weight, impl="triton")
        return y, *torch.autograd.grad(y.float().square().sum(), (x, weight))

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for result in first[:2]:
        assert torch.equal(result, result[:1].expand_as(result))
    future = x.detach().clone()
    future[:, 350:] = 7.0
    assert torch.equal(short_convolution(future, weight, impl="triton")[0][:, :350], first[0][:, :350])


@pytest.mark.gpu
def test_gpu_step_under_a_cuda_graph():
    cases = [random_case(8, 1, d, 4, None, torch.bfloat16, DEVICE) for d in (256, 512)]
    xs, weights, states = (tuple(case[i] for case in cases) for i in range(3))
    expected_states = tuple(state.clone() for state in states)

    def step(into):
        with torch.no_grad():
            return short_convolution(xs, weights, initial_state=into, inplace_state=True, impl="triton")[0]

    step(tuple(state.clone() for state in states))  # compile before capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = step(states)
    for _ in range(3):
        graph.replay()
        expected = step(expected_states)
        assert all(torch.equal(a, b) for a, b in zip((*ys, *states), (*expected, *expected_states), strict=True))
