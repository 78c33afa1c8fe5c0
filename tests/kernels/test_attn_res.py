# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing: the equation in float64 → the PyTorch form → Triton; gradients, precision, what is kept, messages."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltalatent.kernels.attn_res import attention_residual_mix
from tests.kernels.triton_testing import DEVICE, assert_as_exact_as_plain, needs_triton, run_under_interpreter
from tests.testing_common import SavedBytes, assert_close, depth_mix

EPS = 1e-3
NORM_EPS = 1e-2
FORMS = {"bare": (False, False), "key": (True, False), "norm": (False, True), "key and norm": (True, True)}


def random_case(count, shape=(2, 3, 12), dtype=torch.float64, vector_dtype=None, form="key and norm", device="cpu"):
    """Arguments by name; sources of very different size, scores of order 1."""
    has_key, has_norm = FORMS[form]
    vector_dtype = vector_dtype or torch.promote_types(dtype, torch.float32)

    def vector():
        return torch.randn(shape[-1], dtype=vector_dtype, device=device)

    case = {"sources": [(0.3 + i) * torch.randn(shape, dtype=dtype, device=device) for i in range(count)]}
    case |= {"query": vector() / shape[-1] ** 0.5, "eps": EPS}
    if has_key:
        case["key_weight"] = vector()
    if has_norm:
        case |= {"norm_weight": vector(), "norm_eps": NORM_EPS}
    return case


def leaves_of(case):
    vectors = {name: case[name] for name in ("query", "key_weight", "norm_weight") if name in case}
    return vectors | {f"source {i}": source for i, source in enumerate(case["sources"])}


def evaluate(run, case, doutput, dtype=None):
    """Output and all gradients of `sum(output * doutput)`, by name; `dtype` casts everything."""

    def leaf(tensor):
        return tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_()

    case = {name: leaf(value) if isinstance(value, Tensor) else value for name, value in case.items()}
    case["sources"] = [leaf(source) for source in case["sources"]]
    leaves = leaves_of(case)
    output = run(**case)
    grads = torch.autograd.grad(output, list(leaves.values()), doutput.to(output.dtype))
    return {"output": output.detach()} | dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 5, 9, 17], ids=lambda n: f"S{n}")
def test_torch_is_the_depth_mix(count, form):
    case = random_case(count, form=form)
    doutput = torch.randn(2, 3, 12, dtype=torch.float64)
    actual, expected = (evaluate(run, case, doutput) for run in (attention_residual_mix, depth_mix))
    for name, exact in expected.items():
        # Of one source the query's gradient is zero, and the definition's is rounding.
        error = (actual[name] - exact).abs().max().item()
        assert error < 1e-13 * max(1.0, exact.abs().max().item()), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 5], ids=lambda n: f"S{n}")
def test_gradient_against_finite_differences(count, form):
    """S43."""
    case = random_case(count, (2, 5), form=form)
    leaves = {name: tensor.requires_grad_() for name, tensor in leaves_of(case).items()}

    def run(*tensors):
        named = dict(zip(leaves, tensors, strict=True))
        sources = [named.pop(f"source {i}") for i in range(count)]
        return attention_residual_mix(**(case | named | {"sources": sources}))

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


def test_gradient_reaches_only_what_needs_it():
    case = random_case(3)
    case["sources"][0].requires_grad_()
    case["norm_weight"].requires_grad_()
    attention_residual_mix(**case).sum().backward()
    assert [name for name, tensor in leaves_of(case).items() if tensor.grad is not None] == ["norm_weight", "source 0"]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_rounds_once(dtype, scale):
    """Scores and average are float32 inside: half a unit in the last place, plus the float32 error of the scores."""
    sources = [(scale * torch.randn(4, 6, 64)).to(dtype) for _ in range(5)]
    query = torch.randn(64)
    output = attention_residual_mix(sources, query, 1e-5)
    assert output.dtype == dtype
    expected = depth_mix([s.double() for s in sources], query.double(), 1e-5)
    largest = torch.stack(sources).double().abs().amax(0)
    # A score is a sum of 64 products, each of size 1: float32 leaves 64 * 6e-8 of it at the very worst.
    bound = torch.finfo(dtype).eps / 2 * 1.01 * expected.abs() + 64 * 6e-8 * 4 * largest
    assert ((output.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mix_is_not_rounded_before_the_norm(dtype):
    case = random_case(4, (3, 64), dtype)
    doutput = torch.zeros(3, 64, dtype=dtype)
    exact = evaluate(depth_mix, case, doutput, torch.float64)["output"]
    error = (attention_residual_mix(**case).double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * 1.01 * exact.abs() + 1e-5).all()


def test_autocast_leaves_the_arithmetic_alone():
    case = random_case(4, (2, 3, 32), torch.float32)
    doutput = torch.randn(2, 3, 32)
    expected = evaluate(attention_residual_mix, case, doutput)
    with torch.autocast("cpu", torch.bfloat16):
        actual = evaluate(attention_residual_mix, case, doutput)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("factor", [1e3, -1e3])
def test_large_scores_do_not_overflow(factor):
    case = random_case(4, (2, 3, 8), torch.float32)
    case["query"] = factor * torch.randn(8)
    results = evaluate(attention_residual_mix, case, torch.ones(2, 3, 8))
    exact = evaluate(depth_mix, case, torch.ones(2, 3, 8), torch.float64)
    assert_close(results["output"], exact["output"], 1e-3)
    assert all(tensor.isfinite().all() for tensor in results.values())


def test_zero_query_is_the_plain_average():
    """S43: what a new model does."""
    case = random_case(4, form="bare")
    case["query"].zero_()
    assert_close(attention_residual_mix(**case), torch.stack(case["sources"]).mean(0), 1e-14)


def test_one_source_is_returned_as_it_is():
    case = random_case(1, form="bare")
    results = evaluate(attention_residual_mix, case, torch.ones(2, 3, 12))
    assert torch.equal(results["output"], case["sources"][0])
    assert not results["query"].any() and torch.equal(results["source 0"], torch.ones(2, 3, 12, dtype=torch.float64))


def test_nan_stays_in_its_token():
    case = random_case(3, (4, 8), torch.float32)
    clean = attention_residual_mix(**case)
    case["sources"][1][2, 5] = torch.nan
    output = attention_residual_mix(**case)
    assert output[2].isnan().all() and torch.equal(output[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_numbers_per_token_and_source_are_kept(dtype):
    """S43, S45: the definition keeps the stack and float32 copies of it."""
    case = random_case(6, (4, 16, 32), dtype)
    leaves = [tensor.requires_grad_() for tensor in leaves_of(case).values()]
    with SavedBytes(leaves) as saved:
        output = attention_residual_mix(**case)
    assert output.requires_grad and saved.total == 4 * 16 * (2 * 6 + 1) * 4
    with SavedBytes(leaves) as saved:
        output = depth_mix(**(case | {"sources": [source.float() for source in case["sources"]]}))
    assert saved.total > 6 * 4 * 16 * 32 * 4, "the measurement sees nothing"


@pytest.mark.parametrize("pass_on", [False, True])
def test_compiles_without_graph_break(pass_on):
    case = random_case(3, (2, 5, 8), torch.float32)
    leaves = [tensor.requires_grad_() for tensor in leaves_of(case).values()]

    def run(**case):
        output = attention_residual_mix(**case, pass_on=pass_on)
        return output[0] + sum(output[1]) if pass_on else output

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(**case), run(**case), 1e-6)
    outputs = [form(**case) for form in (compiled, run)]
    for grads in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in outputs), strict=True):
        assert_close(*grads, 1e-5)


def three_mixes(sources, query, key_weight, norm_weight, pass_on, impl="auto"):
    """Two readers of all sources, one of two of them; an update between, as in a layer."""
    weights = {"key_weight": key_weight, "norm_weight": norm_weight, "norm_eps": NORM_EPS, "impl": impl}

    def mix(sources, query):
        if pass_on:
            return attention_residual_mix(sources, query, EPS, **weights, pass_on=True)
        return attention_residual_mix(sources, query, EPS, **weights), list(sources)

    first, (*closed, stream) = mix(sources, query)
    second, (*closed, stream) = mix([*closed, stream + first], -query)
    third, _ = mix([closed[0], stream + second], 2 * query)
    return third + stream


def check_chain(run, case, doutput):
    """Results with sources passed on, without, and without in float64."""
    case = {name: value for name, value in case.items() if name not in ("eps", "norm_eps")}
    chained, apart = (evaluate(partial(run, pass_on=on), case, doutput) for on in (True, False))
    return chained, apart, evaluate(partial(three_mixes, pass_on=False), case, doutput, torch.float64)


def test_sources_that_are_passed_on_carry_the_same_gradients():
    case, doutput = random_case(4), torch.randn(2, 3, 12, dtype=torch.float64)
    chained, apart, _ = check_chain(three_mixes, case, doutput)
    for name, tensor in apart.items():
        assert_close(chained[name], tensor, 1e-12, name)


def test_gradients_that_arrive_are_added_before_rounding():
    case, doutput = random_case(4, (5, 64), torch.bfloat16), torch.randn(5, 64, dtype=torch.bfloat16)
    chained, apart, exact = check_chain(three_mixes, case, doutput)
    for name, tensor in chained.items():
        assert_as_exact_as_plain(tensor, exact[name], apart[name], name)


@pytest.mark.parametrize(("pass_on", "expected"), [(False, 4), (True, 1)])
def test_autograd_adds_nothing_to_sources_that_are_passed_on(pass_on, expected):
    """Edges of the graph that lead to a source: autograd adds what they bring."""
    sources = [torch.randn(2, 8, requires_grad=True) for _ in range(3)]
    total, streams = torch.zeros(2, 8), sources
    for _ in range(4):
        output = attention_residual_mix(streams, torch.ones(8), EPS, pass_on=pass_on)
        output, streams = output if pass_on else (output, streams)
        total = total + output
    nodes, seen, edges = [total.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        following = [node for node, _ in node.next_functions if node is not None] if node not in seen else []
        seen.add(node)
        edges += [node.variable for node in following if hasattr(node, "variable")]
        nodes += following
    assert [sum(leaf is source for leaf in edges) for source in sources] == [expected] * 3


@pytest.mark.parametrize("reads", [(), (0, 2)], ids=str)
def test_a_mix_that_nothing_reads_lets_gradients_pass(reads):
    case = random_case(3)
    sources = [source.requires_grad_() for source in case["sources"]]
    case["query"].requires_grad_()
    _, passed = attention_residual_mix(**case, pass_on=True)
    total = sum(passed[i].sum() * (i + 1) for i in reads) + 0 * sources[1].sum()
    grads = torch.autograd.grad(total, [*sources, case["query"]], allow_unused=True)
    expected = [i + 1 if i in reads else 0 for i in range(3)]
    assert all((grad == value).all() for grad, value in zip(grads, expected, strict=False) if grad is not None)
    assert [i for i in range(4) if grads[i] is not None] == sorted({*reads, 1})


def test_sources_are_passed_on_as_they_are():
    case = random_case(3)
    case["sources"][0].requires_grad_()
    output, passed = attention_residual_mix(**case, pass_on=True)
    assert torch.equal(output, attention_residual_mix(**case))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(passed, case["sources"], strict=True))
    assert [source.requires_grad for source in passed] == [True, False, False]
    with torch.no_grad():
        _, passed = attention_residual_mix(**case, pass_on=True)
    assert all(a is b for a, b in zip(passed, case["sources"], strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_passing_on_under_activation_checkpointing(use_reentrant):
    sources, query = [torch.randn(3, 12, dtype=torch.float64) for _ in range(3)], torch.randn(12, dtype=torch.float64)

    def layer(query, *streams):
        mixed, streams = attention_residual_mix(streams, query, EPS, pass_on=True)
        return *streams[:-1], streams[-1] + mixed

    def grads(checkpointed):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, *sources)]
        streams = leaves[1:]
        for _ in range(2):
            if checkpointed:
                streams = checkpoint(layer, leaves[0], *streams, use_reentrant=use_reentrant)
            else:
                streams = layer(leaves[0], *streams)
        sum(streams).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for actual, expected in zip(grads(True), grads(False), strict=True):
        assert torch.equal(actual, expected)


X, V = torch.zeros(2, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("sources", "query", "options", "error", "message"),
    [
        ([], V, {}, ValueError, "at least one tensor, got none"),
        ([X[0, 0]], V, {}, ValueError, r"shape \[..., D\] with D > 0, got \(\)"),
        ([X.long()], V, {}, TypeError, "`sources` must be floating tensors, got torch.int64"),
        ([X, torch.zeros(3, 4)], V, {}, ValueError, r"one shape, got \(2, 4\) at 0 and \(3, 4\) at 1"),
        ([X, X.double()], V, {}, TypeError, "one dtype, got torch.float32 at 0 and torch.float64 at 1"),
        ([X, X.to("meta")], V, {}, ValueError, "one device, got cpu at 0 and meta at 1"),
        ([X], X[:1], {}, ValueError, r"`query` must have shape \(4,\), got \(1, 4\)"),
        ([X], V.long(), {}, TypeError, "`query` must be a floating tensor, got torch.int64"),
        ([X], V, {"key_weight": V[:3]}, ValueError, r"`key_weight` must have shape \(4,\), got \(3,\)"),
        ([X], V, {"norm_weight": V.to("meta"), "norm_eps": 1.0}, ValueError, "`norm_weight` must be on the device"),
        ([X], V, {"norm_weight": V}, ValueError, "given together, got a tensor and None"),
        ([X], V, {"norm_eps": 1e-5}, ValueError, "given together, got None and 1e-05"),
        ([X], V, {"eps": -1.0}, ValueError, "`eps` must be at least 0, got -1.0"),
        ([X], V, {"norm_weight": V, "norm_eps": float("nan")}, ValueError, "`norm_eps` must be at least 0, got nan"),
        ([X], V, {"impl": "cuda"}, ValueError, "must be one of 'auto', 'triton', 'torch', got 'cuda'"),
        ([X.double()], V, {"impl": "triton"}, TypeError, "float32, float16 or bfloat16, got torch.float64"),
        ([X] * 17, V, {"impl": "triton"}, ValueError, "up to 16 sources, got 17"),
        (
            [X[:, :1].expand(2, 20000)],
            V[:1].expand(20000),
            {"impl": "triton"},
            ValueError,
            "16384 channels, got 20000",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_messages(sources, query, options, error, message):
    with pytest.raises(error, match=message):
        attention_residual_mix(sources, query, **({"eps": EPS} | options))


# Triton


def check_triton(count, shape, dtype, vector_dtype=None, form="key and norm"):
    case = random_case(count, shape, dtype, vector_dtype, form, DEVICE)
    doutput = torch.randn(shape, dtype=dtype, device=DEVICE)

    def run(**case):
        return attention_residual_mix(**case, impl="triton")

    def plain(**case):
        return attention_residual_mix(**case, impl="torch")

    actual = evaluate(run, case, doutput)
    exact, reference = evaluate(plain, case, doutput, torch.float64), evaluate(plain, case, doutput)
    for name, tensor in actual.items():
        assert_as_exact_as_plain(tensor, exact[name], reference[name], name)


@needs_triton
@pytest.mark.parametrize(
    ("count", "shape", "form"),
    [
        (1, (3, 16), "key and norm"),
        (3, (2, 3, 20), "bare"),
        (4, (2, 17), "norm"),
        (5, (1, 7), "key"),
        (16, (2, 5), "key and norm"),
    ],
    ids=str,
)
def test_triton_equals_torch(count, shape, form):
    check_triton(count, shape, torch.float32, form=form)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "vector_dtype"),
    [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_triton_in_half_precision(dtype, vector_dtype):
    check_triton(3, (3, 12), dtype, vector_dtype)


@needs_triton
@pytest.mark.parametrize(
    ("count", "shape", "dtype", "form"),
    [
        (1, (3, 16), torch.float32, "key and norm"),
        (3, (2, 3, 20), torch.float32, "bare"),
        (4, (2, 300), torch.float32, "norm"),
        (5, (1, 7), torch.float32, "key"),
        (10, (3, 24), torch.float32, "key and norm"),
        (3, (3, 12), torch.float16, "key and norm"),
    ],
    ids=str,
)
def test_triton_in_two_launches_equals_torch(monkeypatch, count, shape, dtype, form):
    """The backward pass of wide streams, with narrow ones; three tokens in two groups."""
    from deltalatent.kernels.attn_res import triton_kernels, triton_wide

    monkeypatch.setattr(triton_kernels, "WIDE_CHANNELS", 0)
    monkeypatch.setattr(triton_wide, "MAX_GROUPS", 2)
    check_triton(count, shape, dtype, form=form)


@needs_triton
def test_triton_takes_any_layout_and_no_rows():
    case = random_case(2, (3, 2, 8), torch.float32, device=DEVICE)
    case["sources"] = [case["sources"][0].transpose(0, 1).contiguous().transpose(0, 1), case["sources"][1]]
    case["query"] = case["query"].repeat_interleave(2)[::2]
    results = [attention_residual_mix(**case, impl=impl) for impl in ("triton", "torch")]
    torch.testing.assert_close(*results)
    case["query"].requires_grad_()
    case["sources"] = [source[:0] for source in case["sources"]]
    empty = attention_residual_mix(**case, impl="triton")
    assert empty.shape == (0, 2, 8)
    assert not torch.autograd.grad(empty.sum(), case["query"])[0].any()


@needs_triton
def test_triton_refuses_second_derivatives():
    case = random_case(2, (2, 8), torch.float32, device=DEVICE)
    source = case["sources"][0].requires_grad_()
    output = attention_residual_mix(**case, impl="triton")
    (grad,) = torch.autograd.grad(output.square().sum(), source, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@needs_triton
@pytest.mark.parametrize("pass_on", [False, True])
def test_triton_under_compile(pass_on):
    case = random_case(2, (2, 8), torch.float32, device=DEVICE)
    leaves = [tensor.requires_grad_() for tensor in leaves_of(case).values()]

    def run(**case):
        output = attention_residual_mix(**case, impl="triton", pass_on=pass_on)
        return output[0] + sum(output[1]) if pass_on else output

    outputs = [run(**case), torch.compile(run, fullgraph=True, backend="aot_eager")(**case)]
    assert torch.equal(*outputs)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in outputs), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@needs_triton
@pytest.mark.parametrize("wide", [False, True])
def test_triton_adds_gradients_that_arrive(monkeypatch, wide):
    """In the first mix for all sources, in the second for some, in the third for none."""
    if wide:
        from deltalatent.kernels.attn_res import triton_kernels

        monkeypatch.setattr(triton_kernels, "WIDE_CHANNELS", 0)
    case, doutput = random_case(4, (3, 20), torch.float32, device=DEVICE), torch.randn(3, 20, device=DEVICE)
    chained, apart, exact = check_chain(partial(three_mixes, impl="triton"), case, doutput)
    for name, tensor in chained.items():
        assert_as_exact_as_plain(tensor, exact[name], apart[name], name)


@needs_triton
@pytest.mark.parametrize("form", ["bare", "key and norm"])
def test_triton_operator_is_registered_consistently(form):
    case = random_case(2, (2, 8), torch.float32, form=form, device=DEVICE)
    leaves = {name: tensor.requires_grad_() for name, tensor in leaves_of(case).items()}
    vectors = [leaves.get(name) for name in ("query", "key_weight", "norm_weight")]
    torch.library.opcheck(torch.ops.deltalatent.attn_res, (case["sources"], *vectors, EPS, NORM_EPS))


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


GPU_SHAPES = {
    "released": (9, (1, 300, 7168)),
    "released, ragged": (4, (3, 1111, 7168)),
    "base": (5, (8, 1024, 1024)),
    "odd width": (3, (2, 700, 1001)),
    "all sources": (16, (5000, 512)),
    "narrow": (7, (2, 2001, 40)),
    "one token": (9, (1, 1, 2048)),
    "widest": (2, (17, 16384)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_gpu_shapes(name, dtype):
    check_triton(*GPU_SHAPES[name], dtype, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_gpu_forms(form):
    check_triton(6, (1500, 768), torch.bfloat16, form=form)


@pytest.mark.gpu
def test_gpu_runs_repeat_bit_for_bit():
    case = random_case(9, (3000, 1024), torch.bfloat16, device=DEVICE)
    doutput = torch.randn(3000, 1024, dtype=torch.bfloat16, device=DEVICE)
    first, second = (evaluate(attention_residual_mix, case, doutput) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
def test_gpu_peak_memory_is_outputs_and_gradients():
    """Forward and backward allocate the mix, the gradients, two numbers per token and source, and partial sums."""
    count, shape = 9, (4096, 2048)
    case = random_case(count, shape, torch.bfloat16, torch.bfloat16, device=DEVICE)
    leaves = [tensor.requires_grad_() for tensor in leaves_of(case).values()]
    doutput = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    stream = doutput.numel() * 2
    before = torch.cuda.memory_allocated()
    output = attention_residual_mix(**case, impl="triton")
    assert torch.cuda.memory_allocated() - before <= stream + 4 * 4096 * (2 * count + 1) + 2**20
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(output, leaves, doutput)
    assert torch.cuda.max_memory_allocated() - before <= (1 + count) * stream + 2 * 4 * 1024 * 2048 + 2**21
