# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear head: all logits in float64 → chunks in PyTorch → Triton; gradients, memory, messages."""

import pytest
import torch

from deltalatent.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from deltalatent.kernels.linear_cross_entropy.api import choose_chunk_size
from tests.kernels.triton_testing import DEVICE, assert_as_exact_as_plain, needs_triton, run_under_interpreter
from tests.testing_common import assert_close


def random_case(tokens=11, width=8, words=37, dtype=torch.float64, device="cpu"):
    """Some tokens without a target, logits of order 1."""
    hidden_states = torch.randn(tokens, width, dtype=dtype, device=device)
    weight = torch.randn(words, width, dtype=dtype, device=device) / width**0.5
    targets = torch.randint(words, (tokens,), device=device)
    targets[::4] = -100
    return {"hidden_states": hidden_states, "weight": weight, "targets": targets}


def evaluate(run, case, dtype=None, **options):
    """Loss and gradients of three times the loss, by name; `dtype` casts the inputs."""
    leaves = {
        name: case[name].detach().clone().to(dtype or case[name].dtype).requires_grad_()
        for name in ("hidden_states", "weight")
    }
    loss = run(**(case | leaves), **options)
    grads = torch.autograd.grad(3 * loss, list(leaves.values()))
    return {"loss": loss.detach()} | dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("num_items", [None, 23, torch.tensor(23)], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 4, 11, None], ids=str)
def test_chunks_are_the_definition(chunk_size, num_items):
    case = random_case()
    expected = evaluate(linear_cross_entropy_reference, case, num_items=num_items)
    actual = evaluate(linear_cross_entropy, case, num_items=num_items, chunk_size=chunk_size)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, 1e-13, name)


def test_shapes_alone():
    """On "meta", which knows no autocast, models are traced without memory."""
    loss = linear_cross_entropy(X.to("meta"), W.to("meta"), T.to("meta"))
    assert loss.is_meta and loss.shape == () and loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("tokens", "words", "expected"),
    [
        (8192, 163840, 1408),  # 1638 at most: five chunks and one of two tokens, were they not equal
        (16384, 32000, 8192),
        (100, 32000, 128),  # one chunk
        (0, 32000, 128),
        (1000, 2**28 // 3, 3),  # too large a vocabulary for whole tiles
        (5, 2**28, 1),
    ],
)
def test_chunks_are_equal(tokens, words, expected):
    assert choose_chunk_size(tokens, words) == expected


def test_gradients_against_finite_differences():
    case = random_case(5, 3, 7)
    leaves = [case[name].requires_grad_() for name in ("hidden_states", "weight")]
    assert torch.autograd.gradcheck(
        lambda hidden, weight: linear_cross_entropy(hidden, weight, case["targets"], chunk_size=2), leaves
    )


def test_any_leading_axes_and_another_ignored_index():
    case = random_case(12)
    case["targets"][case["targets"] == -100] = 5
    case = {name: tensor if name == "weight" else tensor.unflatten(0, (3, 4)) for name, tensor in case.items()}
    expected = evaluate(linear_cross_entropy_reference, case, ignore_index=5)
    actual = evaluate(linear_cross_entropy, case, ignore_index=5, chunk_size=5)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, 1e-13, name)


@pytest.mark.parametrize("needs", ["hidden_states", "weight"])
def test_only_wanted_gradients_are_computed(needs):
    case = random_case()
    expected = evaluate(linear_cross_entropy_reference, case)
    case[needs].requires_grad_()
    loss = linear_cross_entropy(**case, chunk_size=4)
    (kept,) = [tensor for tensor in loss.grad_fn.next_functions[0][0].saved_tensors if tensor.numel()]
    assert kept.shape == case[needs].shape
    loss.backward()
    assert_close(3 * case[needs].grad, expected[needs], 1e-13)


def test_no_gradient_no_graph():
    case = random_case()
    expected = linear_cross_entropy_reference(**case)
    case["weight"].requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(**case, chunk_size=4)
    assert not loss.requires_grad
    assert_close(loss, expected, 1e-14)


def test_graph_may_be_walked_twice():
    case = random_case()
    case["weight"].requires_grad_()
    loss = linear_cross_entropy(**case)
    first, second = (torch.autograd.grad(loss, case["weight"], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_no_targets():
    """As PyTorch has it: the mean of nothing is NaN, the sum is zero."""
    case = random_case()
    case["targets"].fill_(-100)
    assert linear_cross_entropy(**case).isnan()
    results = evaluate(linear_cross_entropy, case, num_items=7, chunk_size=4)
    assert not any(tensor.any() for tensor in results.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_with_all_logits(dtype):
    case = random_case(40, 32, 50, dtype)
    exact = evaluate(linear_cross_entropy_reference, case, torch.float64)
    plain = evaluate(linear_cross_entropy_reference, case)
    actual = evaluate(linear_cross_entropy, case, chunk_size=16)
    for name, tensor in actual.items():
        assert_as_exact_as_plain(tensor, exact[name], plain[name], name)


def test_autocast_casts_the_inputs():
    case = random_case(dtype=torch.float32)
    half = {name: tensor if name == "targets" else tensor.bfloat16() for name, tensor in case.items()}
    expected = evaluate(linear_cross_entropy, half)
    with torch.autocast("cpu", torch.bfloat16):
        actual = evaluate(linear_cross_entropy, case)
    assert actual["weight"].dtype == torch.float32
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.float()), name


def test_extreme_logits():
    case = random_case(dtype=torch.float32)
    case["weight"] = 1e4 * case["weight"]
    results, exact = (
        evaluate(run, case, dtype)
        for run, dtype in ((linear_cross_entropy, None), (linear_cross_entropy_reference, torch.float64))
    )
    for name, tensor in results.items():
        assert_close(tensor, exact[name], 1e-4, name)


def test_target_outside_of_the_vocabulary():
    case = random_case()
    case["targets"][3] = 37
    with pytest.raises(RuntimeError, match="index 37 is out of bounds"):
        linear_cross_entropy(**case)


def test_compiles_without_graph_break():
    case = random_case(dtype=torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    expected, actual = (evaluate(run, case, chunk_size=4) for run in (linear_cross_entropy, compiled))
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, 1e-6, name)
    case["weight"].requires_grad_()
    with torch.no_grad():
        assert_close(compiled(**case, chunk_size=4), expected["loss"], 1e-6)


def test_operator_is_registered_consistently():
    case = random_case(dtype=torch.float32)
    leaves = [case[name].requires_grad_() for name in ("hidden_states", "weight")]
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            torch.ops.deltalatent.linear_cross_entropy, ("torch", *leaves, case["targets"], -100, 4, *needs)
        )


X, W, T = torch.zeros(2, 3, 4), torch.zeros(7, 4), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, W[0], T), {}, ValueError, r"`weight` must be a floating matrix \[V, D\], got \[4\]"),
        ((X[..., :3], W, T), {}, ValueError, r"shape \[..., D\] with D=4, got \[2, 3, 3\]"),
        ((X.double(), W, T), {}, TypeError, "one dtype, got torch.float64 and torch.float32"),
        ((X, W, T[:, :2]), {}, ValueError, r"`targets` must have shape \[2, 3\].*got \[2, 2\]"),
        ((X, W, T.float()), {}, TypeError, "`targets` must be integers, got torch.float32"),
        ((X, W, T.to("meta")), {}, ValueError, "`targets` must be on the device of `hidden_states`, cpu, got meta"),
        ((X, W, T), {"chunk_size": 0}, ValueError, "`chunk_size` must be at least 1, got 0"),
        ((X, W, T), {"impl": "cuda"}, ValueError, "must be one of 'auto', 'triton', 'torch', got 'cuda'"),
        ((X.double(), W.double(), T), {"impl": "triton"}, TypeError, "float32, float16 or bfloat16, got torch.fl"),
    ],
    ids=["vector", "width", "dtypes", "targets", "float targets", "device", "chunk", "impl", "float64"],
)
def test_messages(arguments, options, error, message):
    with pytest.raises(error, match=message):
        linear_cross_entropy(*arguments, **options)


# Triton


def check_triton(tokens, width, words, dtype, chunk_size):
    case = random_case(tokens, width, words, dtype, DEVICE)
    exact = evaluate(linear_cross_entropy_reference, case, torch.float64)
    plain = evaluate(linear_cross_entropy_reference, case)
    actual = evaluate(linear_cross_entropy, case, impl="triton", chunk_size=chunk_size)
    for name, tensor in actual.items():
        assert_as_exact_as_plain(tensor, exact[name], plain[name], name)


@needs_triton
@pytest.mark.parametrize("words", [5, 64, 5000], ids=lambda n: f"V{n}")
def test_triton_equals_torch(words):
    check_triton(9, 8, words, torch.float32, 4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_triton_in_half_precision(dtype):
    check_triton(9, 8, 300, dtype, 9)


@needs_triton
def test_triton_says_nan_for_a_target_outside_of_the_vocabulary():
    case = random_case(dtype=torch.float32, device=DEVICE)
    for outside in (37, -1):
        case["targets"][3] = outside
        assert linear_cross_entropy(**case, impl="triton").isnan()


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1000, 128, 32000), (300, 256, 163840), (77, 72, 10007)], ids=str)
def test_gpu_shapes(shape, dtype):
    check_triton(*shape, dtype, 256)


@pytest.mark.gpu
def test_gpu_never_holds_the_logits():
    """Beyond the inputs: logits of a chunk, both gradients waiting, and the weight's in its own dtype."""
    tokens, width, words, chunk_size = 4096, 256, 50000, 512
    case = random_case(tokens, width, words, torch.bfloat16, DEVICE)
    leaves = [case[name].requires_grad_() for name in ("hidden_states", "weight")]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(linear_cross_entropy(**case, chunk_size=chunk_size), leaves)
    allowed = 2 * chunk_size * words + (2 + 2) * tokens * width + (4 + 2) * words * width
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * allowed + 2**25
    assert allowed < 2 * tokens * words, "the bound says nothing"


@pytest.mark.gpu
def test_gpu_runs_repeat_bit_for_bit():
    case = random_case(2000, 256, 32000, torch.bfloat16, DEVICE)
    first, second = (evaluate(linear_cross_entropy, case, chunk_size=512) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
