# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Router: logits as exact as in float32, the choice by its definition → PyTorch → Triton, counts exactly equal."""

import pytest
import torch

from deltalatent.kernels.router import autograd, choose_experts, count_required_biases, router_logits
from tests.kernels.triton_testing import DEVICE, assert_as_exact_as_plain, needs_triton, run_under_interpreter

BINS = 50


def random_case(T, E, dtype=torch.float64, device="cpu"):
    return torch.randn(T, E, dtype=dtype, device=device), 0.1 * torch.randn(E, dtype=dtype, device=device)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (3, 2)])
def test_reference_is_the_definition(groups, kept, renormalize):
    logits, bias = random_case(20, 9)
    choice = choose_experts(
        logits, bias, 2, renormalize=renormalize, scaling_factor=2.5, num_groups=groups, top_groups=kept
    )
    scores = 1 / (1 + torch.exp(-logits))
    torch.testing.assert_close(choice.scores, scores, rtol=1e-12, atol=0)
    size = 9 // groups
    for t in range(20):
        biased = (scores[t] + bias).tolist()
        rank = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        eligible = sorted(range(groups), key=rank.__getitem__)[-kept:]
        ordered = sorted((e for e in range(9) if e // size in eligible), key=biased.__getitem__, reverse=True)
        assert sorted(choice.index[t].tolist()) == sorted(ordered[:2])
        assert abs(choice.cutoff[t].item() - biased[ordered[2]]) < 1e-12
        total = sum(scores[t, e].item() for e in ordered[:2]) if renormalize else 1.0
        for e, weight in zip(choice.index[t].tolist(), choice.weights[t].tolist(), strict=True):
            assert abs(weight - 2.5 * scores[t, e].item() / total) < 1e-12


def test_reference_gradients():
    logits, bias = random_case(5, 6)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: choose_experts(x, bias, 2, scaling_factor=2.5)[:3:2], (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_logits_are_float32_products(dtype):
    x, weight = torch.randn(6, 40).to(dtype), torch.randn(5, 40).to(dtype)
    exact = x.double() @ weight.double().T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router_logits(x, weight)
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def test_counts_are_their_definition():
    logits, bias = random_case(40, 5)
    choice = choose_experts(logits, bias, 2)
    choice.cutoff[3] = float("nan")
    mask = torch.rand(40) < 0.7
    flat = torch.zeros(5 * BINS + 6, dtype=torch.int32)
    count_required_biases(flat, choice.scores, choice.cutoff, bias, mask, choice.index, BINS)
    expected = torch.zeros_like(flat)
    low, width = bias.min() - 1, bias.max() - bias.min() + 2
    for t in range(40):
        if not mask[t] or t == 3:
            continue
        expected[-1] += 1
        for e in range(5):
            bin_ = int((choice.cutoff[t] - choice.scores[t, e] - low) / width * BINS)
            expected[e * BINS + bin_] += 1
            expected[5 * BINS + e] += e in choice.index[t].tolist()
    assert torch.equal(flat, expected)


LOGITS, BIAS = torch.zeros(3, 6), torch.zeros(6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": LOGITS.half()}, TypeError, "`logits` must be float32 or float64, got torch.float16"),
        ({"bias": BIAS.double()}, TypeError, "`bias` must have the dtype of `logits`, torch.float32"),
        ({"logits": LOGITS[0]}, ValueError, r"`logits` must have shape \[T, E\], got \[6\]"),
        ({"bias": BIAS[:5]}, ValueError, r"`bias` must have shape \[E\] = \[6\], got \[5\]"),
        ({"bias": BIAS.to("meta")}, ValueError, "`bias` must be on the device of `logits`, cpu, got meta"),
        ({"top_k": 7}, ValueError, r"`top_k` must lie in \[1, E=6\], got 7"),
        ({"num_groups": 4}, ValueError, "`num_groups` must divide E=6, got 4"),
        ({"num_groups": 2, "top_groups": 3}, ValueError, r"`top_groups` must lie in \[1, num_groups=2\], got 3"),
        ({"num_groups": 2, "impl": "triton"}, ValueError, "knows no expert groups, got 2"),
        ({"impl": "cuda"}, ValueError, "must be one of 'auto', 'triton', 'torch', got 'cuda'"),
    ],
    ids=["dtype", "bias-dtype", "dim", "bias", "device", "top_k", "groups", "top_groups", "triton", "impl"],
)
def test_messages(change, error, message):
    arguments = {"logits": LOGITS, "bias": BIAS, "top_k": 2} | change
    with pytest.raises(error, match=message):
        choose_experts(**arguments)


def test_logits_message():
    with pytest.raises(ValueError, match=r"must have shapes \[T, D\] and \[E, D\], got \[3, 6\] and \[6\]"):
        router_logits(LOGITS, BIAS)


# Triton


def evaluate(impl, logits, bias, top_k, options, dscores, dweights, dtype=None):
    """Scores, cutoff and weights, the latter sorted by expert, and the gradient of the logits."""
    dtype = dtype or logits.dtype
    logits = logits.detach().to(dtype).requires_grad_()
    scores, index, weights, cutoff = choose_experts(logits, bias.to(dtype), top_k, impl=impl, **options)
    order = index.argsort(dim=1)
    weights = weights.gather(1, order)
    total = (weights * dweights.to(dtype)).sum()
    if dscores is not None:
        total = total + (scores * dscores.to(dtype)).sum()
    return index.gather(1, order), [scores, weights, cutoff, *torch.autograd.grad(total, logits)]


def check_triton(T, E, K, with_scores=True, **options):
    logits, bias = random_case(T, E, torch.float32, DEVICE)
    upstream = (torch.randn_like(logits) if with_scores else None, torch.randn(T, K, device=DEVICE))
    (index, actual), (other, plain), (_, exact) = (
        evaluate(impl, logits, bias, K, options, *upstream, dtype)
        for impl, dtype in (("triton", None), ("torch", None), ("torch", torch.float64))
    )
    assert torch.equal(index, other)
    for name, *triple in zip(("scores", "weights", "cutoff", "dlogits"), actual, exact, plain, strict=True):
        if not triple[1].isinf().any():
            assert_as_exact_as_plain(*triple, name)
        else:
            assert torch.equal(triple[0].double(), triple[1])


@needs_triton
@pytest.mark.parametrize(
    ("T", "E", "K", "options"),
    [
        (7, 16, 3, {}),
        (3, 50, 4, {"renormalize": False, "scaling_factor": 2.5}),
        (4, 6, 6, {"with_scores": False}),
        (1, 1, 1, {}),
        (0, 8, 2, {"with_scores": False}),
    ],
    ids=["default", "raw-weights", "all-experts", "one-expert", "no-tokens"],
)
def test_triton_equals_torch(T, E, K, options):
    check_triton(T, E, K, **options)


@needs_triton
def test_triton_takes_the_first_of_equals_and_spoils_no_other_row():
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[1] = float("nan")
    choice = choose_experts(logits, torch.zeros(8, device=DEVICE), 3, impl="triton")
    assert choice.index.tolist() == [[0, 1, 2]] * 3
    assert choice.weights[1].isnan().all() and not choice.weights[::2].isnan().any()
    assert not choice.cutoff[1].isfinite()


@needs_triton
@pytest.mark.parametrize("masked", [True, False])
def test_triton_counts_equal_torch(masked):
    logits, bias = random_case(37, 21, torch.float32, DEVICE)
    choice = choose_experts(logits, bias, 3, impl="torch")
    choice.cutoff[5] = float("nan")
    mask = torch.rand(37, device=DEVICE) < 0.7 if masked else None
    flats = [torch.ones(21 * BINS + 22, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    for flat, impl in zip(flats, ("triton", "torch"), strict=True):
        for _ in range(2):
            count_required_biases(flat, choice.scores, choice.cutoff, bias, mask, choice.index, BINS, impl=impl)
    assert torch.equal(*flats)


@needs_triton
def test_triton_under_compile():
    logits, bias = random_case(6, 12, torch.float32, DEVICE)
    logits.requires_grad_()

    def run(logits, flat):
        choice = choose_experts(logits, bias, 3, impl="triton")
        counted = (choice.scores.detach(), choice.cutoff, bias, None, choice.index, BINS)
        count_required_biases(flat, *counted, impl="triton")
        return choice.weights, choice.index, choice.cutoff

    flats = [torch.zeros(12 * BINS + 13, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    expected = run(logits, flats[0])
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(logits, flats[1])
    assert all(torch.equal(a, b) for a, b in zip((*actual, flats[1]), (*expected, flats[0]), strict=True))
    grads = [torch.autograd.grad(weights.square().sum(), logits)[0] for weights, *_ in (actual, expected)]
    assert torch.equal(*grads)


@needs_triton
def test_triton_operators_are_registered_consistently():
    logits, bias = random_case(4, 12, torch.float32, DEVICE)
    torch.library.opcheck(torch.ops.deltalatent.choose_experts, (logits.requires_grad_(), bias, 3, True, 2.5))


@needs_triton
@pytest.mark.parametrize(("T", "D", "E"), [(3, 300, 7), (66, 192, 5)], ids=["few-tokens", "many-tokens"])
def test_triton_logits(T, D, E):
    from deltalatent.kernels.router.triton_kernels import logits

    x, weight = (torch.randn(n, D, device=DEVICE).half() for n in (T, E))
    exact, plain = (x.to(dtype) @ weight.to(dtype).T for dtype in (torch.float64, torch.float32))
    assert_as_exact_as_plain(logits(x, weight), exact, plain, "logits")


@needs_triton
def test_triton_logits_under_compile():
    """The operator that stands for the logits of bfloat16 tensors; what it computes is tested on GPUs."""
    x, weight = (torch.zeros(n, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for n in (3, 5))
    logits = torch.compile(autograd.router_logits, fullgraph=True, backend="aot_eager")(x, weight)
    assert torch.equal(logits, torch.zeros(3, 5, device=DEVICE))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.deltalatent.router_logits, (x, weight), test_utils=tests)


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "E", "K"), [(8192, 896, 16), (1, 896, 16), (3000, 96, 8), (257, 130, 4), (64, 2500, 3), (9, 4096, 64)]
)
def test_gpu_choice(T, E, K):
    check_triton(T, E, K)


@pytest.mark.gpu
def test_gpu_counts():
    logits, bias = random_case(5000, 896, torch.float32, DEVICE)
    choice = choose_experts(logits, bias, 16)
    flats = [torch.zeros(896 * 1001 + 1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    for flat, impl in zip(flats, ("triton", "torch"), strict=True):
        count_required_biases(flat, choice.scores, choice.cutoff, bias, None, choice.index, 1000, impl=impl)
    assert torch.equal(*flats)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "D", "E"), [(4096, 7168, 896), (1, 512, 96), (1000, 1024, 128), (33, 1000, 100)])
def test_gpu_logits_are_as_exact_as_float32(T, D, E):
    x = torch.randn(T, D, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(E, D, device=DEVICE) * D**-0.5).bfloat16().requires_grad_()
    grad = torch.randn(T, E, device=DEVICE)
    results = []
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        logits = router_logits(*leaves)
        results.append([logits, *torch.autograd.grad(logits, leaves, grad.to(logits.dtype))])
    for name, actual, exact, plain in zip(("logits", "dx", "dweight"), *results, strict=True):
        assert_as_exact_as_plain(actual, exact, plain.to(actual.dtype), name)


@pytest.mark.gpu
def test_gpu_logits_under_compile():
    x = torch.randn(70, 256, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(40, 256, device=DEVICE).bfloat16().requires_grad_()
    expected = router_logits(x, weight)
    actual = torch.compile(router_logits, fullgraph=True, backend="aot_eager")(x, weight)
    assert torch.equal(actual, expected)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), (x, weight)) for y in (actual, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
