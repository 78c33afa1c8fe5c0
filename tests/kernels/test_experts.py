# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts: the definition in float64 → the loop in PyTorch → Triton; gradients, routing, messages."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deltalatent.kernels.experts import grouped_experts
from tests.kernels.triton_testing import (
    DEVICE,
    assert_as_exact_as_plain,
    needs_launches,
    needs_triton,
    run_under_interpreter,
)

OUTPUTS = ("output", "dhidden_states", "dgate_up_proj", "ddown_proj", "dtop_k_weights")


def spread(T, K, E, device):
    """K different experts per token, all of them in use where T K is large."""
    return torch.rand(T, E, device=device).topk(K, dim=1).indices


def one_takes_all(T, K, E, device):
    return torch.full((T, K), E // 2, device=device)


def few_in_use(T, K, E, device):
    """Most experts are without a token, one has half of all pairs."""
    return torch.where(
        torch.rand(T, K, device=device) < 0.5, E - 1, torch.randint(0, E, (T, K), device=device) // 3 * 3
    )


def with_sentinels(T, K, E, device):
    """Ids of no expert here: E and beyond, as of other ranks, and negative ones; the first token has nothing else."""
    index = torch.randint(-E, 2 * E, (T, K), device=device)
    index[:1] = E
    return index


ROUTINGS = {f.__name__: f for f in (spread, one_takes_all, few_in_use, with_sentinels)}


def random_case(T, K, E, Z, F, dtype=torch.float64, routing=spread, device="cpu"):
    """Arguments of `grouped_experts`, with values of order 1 everywhere, and an upstream gradient."""

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(shape, device=device, dtype=torch.float32)).to(dtype)

    x = normal(T, Z, scale=2.0)
    gate_up, down = normal(E, 2 * F, Z, scale=Z**-0.5), normal(E, Z, F, scale=F**-0.5)
    weights = torch.rand(T, K, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return (x, gate_up, down, routing(T, K, E, device), weights), normal(T, Z)


def evaluate(impl, inputs, dy, dtype=None, activation="situ"):
    """Output and all gradients of `sum(output * dy)`; `dtype` casts everything."""
    x, gate_up, down, index, weights = inputs
    leaves = [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in (x, gate_up, down, weights)]
    x, gate_up, down, weights = leaves
    y = grouped_experts(x, gate_up, down, index, weights, activation=activation, impl=impl)
    return [y, *torch.autograd.grad(y, leaves, dy.to(dtype or dy.dtype))]


def check_triton(*dims, dtype=torch.float32, routing=spread, activation="situ"):
    inputs, dy = random_case(*dims, dtype=dtype, routing=routing, device=DEVICE)
    results = [
        evaluate("triton", inputs, dy, activation=activation),
        evaluate("torch", inputs, dy, torch.float64, activation),
        evaluate("torch", inputs, dy, activation=activation),
    ]
    for name, *triple in zip(OUTPUTS, *results, strict=True):
        assert_as_exact_as_plain(*triple, name)
    return inputs, results[0]


# The loop in PyTorch


@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference_is_the_definition(routing, activation):
    (x, gate_up, down, index, weights), _ = random_case(7, 3, 5, 4, 6, routing=ROUTINGS[routing])
    y = grouped_experts(x, gate_up, down, index, weights, activation=activation)
    for t in range(7):
        expected = torch.zeros(4, dtype=torch.float64)
        for j in range(3):
            if 0 <= (e := int(index[t, j])) < 5:
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                if activation == "situ":
                    hidden = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
                else:
                    hidden = gate / (1 + torch.exp(-gate)) * up
                expected += weights[t, j] * (down[e] @ hidden)
        torch.testing.assert_close(y[t], expected, rtol=1e-12, atol=1e-12)


def test_reference_gradients():
    (x, gate_up, down, index, weights), _ = random_case(4, 2, 3, 4, 3, routing=with_sentinels)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    assert torch.autograd.gradcheck(lambda x, g, d, w: grouped_experts(x, g, d, index, w), leaves)


X, GATE_UP, DOWN = torch.zeros(3, 8), torch.zeros(4, 12, 8), torch.zeros(4, 8, 6)
INDEX, WEIGHTS = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_states": X.long()}, TypeError, "`hidden_states` must be a floating tensor, got torch.int64"),
        ({"down_proj": DOWN.half()}, TypeError, "`down_proj` must have the dtype of `hidden_states`, torch.float32"),
        ({"top_k_index": WEIGHTS}, TypeError, "`top_k_index` must be int32 or int64, got torch.float32"),
        ({"hidden_states": X[None]}, ValueError, r"`hidden_states` must have shape \[T, Z\], got \[1, 3, 8\]"),
        ({"gate_up_proj": GATE_UP[:, :11]}, ValueError, r"`gate_up_proj` must have shape \[E, 2I, Z=8\]"),
        ({"down_proj": DOWN[:3]}, ValueError, r"`down_proj` must have shape \[E, Z, I\] = \[4, 8, 6\], got \[3, 8"),
        ({"top_k_index": INDEX[:2]}, ValueError, r"`top_k_index` must have shape \[T=3, K\], got \[2, 2\]"),
        ({"top_k_weights": WEIGHTS[:, :1]}, ValueError, r"must have the shape \[3, 2\] of `top_k_index`"),
        ({"down_proj": DOWN.to("meta")}, ValueError, "`down_proj` must be on the device of `hidden_states`, cpu"),
        ({"activation": "gelu"}, ValueError, "`activation` must be one of 'situ', 'silu', got 'gelu'"),
        ({"beta": 0.0}, ValueError, "`beta` and `linear_beta` must be positive, got 0.0 and 25.0"),
        ({"impl": "cuda"}, ValueError, "must be one of 'auto', 'triton', 'torch', got 'cuda'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_messages(change, error, message):
    arguments = dict(hidden_states=X, gate_up_proj=GATE_UP, down_proj=DOWN, top_k_index=INDEX, top_k_weights=WEIGHTS)
    with pytest.raises(error, match=message):
        grouped_experts(**(arguments | change))


def test_float64_has_no_kernel():
    arguments = (t.double() if t.is_floating_point() else t for t in (X, GATE_UP, DOWN, INDEX, WEIGHTS))
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch.float64"):
        grouped_experts(*arguments, impl="triton")


# Triton


@needs_triton
@pytest.mark.parametrize("routing", ROUTINGS)
def test_triton_equals_torch(routing):
    inputs, (_, dx, dgate_up, ddown, dweights) = check_triton(9, 3, 6, 24, 20, routing=ROUTINGS[routing])
    index = inputs[3]
    for e in range(6):
        used = bool((index == e).any())
        assert bool(dgate_up[e].any()) == bool(ddown[e].any()) == used, f"expert {e}"
    elsewhere = (index < 0) | (index >= 6)
    assert not dweights[elsewhere].any()
    assert not dx[elsewhere.all(1)].any()


@needs_triton
def test_triton_swiglu_in_half_precision():
    check_triton(24, 3, 4, 16, 24, dtype=torch.float16, activation="silu")


@needs_triton
def test_triton_sorts_many_pairs():
    """Past 1024 pairs another sort makes the plan, and an expert's rows fill several tiles."""
    check_triton(180, 6, 4, 16, 16, routing=few_in_use)


@needs_triton
@pytest.mark.parametrize("num_tokens", [30, 350], ids=["few-pairs", "many-pairs"])
def test_triton_plan_sorts_stably_and_leaves_out_who_is_elsewhere(num_tokens):
    from deltalatent.kernels.experts.triton_plan import make_plan

    index = with_sentinels(num_tokens, 3, 6, DEVICE)
    _, plan = make_plan(index, 6, 16, 0)
    expert = torch.where((index >= 0) & (index < 6), index, 6).flatten()
    here = int((expert < 6).sum())
    order = torch.argsort(expert, stable=True)
    assert torch.equal(plan.order.long(), order)
    assert torch.equal(plan.inverse.long(), torch.where(expert < 6, torch.argsort(order), -1))
    assert plan.offsets.tolist() == [0, *torch.bincount(expert, minlength=7).cumsum(0)[:6].tolist()]
    covered = []
    for number, first, rows in zip(*plan.tiles.tolist(), strict=True):
        assert rows <= 16
        assert (expert[order[first : first + rows]] == number).all()
        covered += range(first, first + rows)
    assert sorted(covered) == list(range(here))


@needs_triton
@pytest.mark.parametrize("gather_left", [True, False], ids=["gather-left", "gather-right"])
@pytest.mark.parametrize("panel", [True, False], ids=["panel", "tiles"])
def test_triton_weight_gradients_of_any_number_of_rows(panel, gather_left):
    """Each way to sum over the rows of an expert; sorted rows of pairs that are elsewhere are never read."""
    from deltalatent.kernels.experts import triton_launch
    from deltalatent.kernels.experts.triton_plan import make_plan

    rows, K, M, N = (0, 5, 128, 150, 180, 200), 3, 72, 136
    expert = torch.cat([torch.full((n,), e) for e, n in enumerate((*rows, 9))]).to(DEVICE)
    index = expert[torch.randperm(len(expert), device=DEVICE)].view(-1, K)
    _, plan = make_plan(index, len(rows), 16, 0)
    of_tokens = torch.randn(len(index), M if gather_left else N, device=DEVICE).half()
    of_pairs = torch.randn(index.numel(), N if gather_left else M, device=DEVICE).half()
    of_pairs[sum(rows) :] = float("nan")
    config = triton_launch.choose_config(index.numel(), len(rows), torch.float16, DEVICE)
    config = config._replace(gradient=triton_launch.GradientTile(64, 128, 64, 4, 3, panel))
    left, right = (of_tokens, of_pairs) if gather_left else (of_pairs, of_tokens)
    like = torch.empty(len(rows), M, N, dtype=torch.float16, device=DEVICE)
    actual = triton_launch.weight_gradient(left, right, like, plan, config, top_k=K, gather_left=gather_left)
    gathered = of_tokens[plan.order.long() // K]
    left, right = (gathered, of_pairs) if gather_left else (of_pairs, gathered)
    for e, (first, last) in enumerate(zip(plan.offsets.tolist(), plan.offsets.tolist()[1:], strict=False)):
        exact, plain = (left[first:last].to(t).T @ right[first:last].to(t) for t in (torch.float64, torch.float32))
        assert_as_exact_as_plain(actual[e], exact, plain.half(), f"expert {e}")


@needs_triton
def test_triton_takes_any_layout_and_no_tokens():
    (x, gate_up, down, index, weights), _ = random_case(6, 2, 3, 16, 16, torch.float32, device=DEVICE)
    expected = grouped_experts(x, gate_up, down, index, weights, impl="torch")
    mixed = (x.T.contiguous().T, gate_up.mT.contiguous().mT, down, index.int().T.contiguous().T, weights.half())
    actual = grouped_experts(*mixed, impl="triton")
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)  # half-precision weights
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    empty = grouped_experts(x[:0], gate_up, down, index[:0], weights[:0], impl="triton")
    assert empty.shape == (0, 16)
    assert not any(grad.any() for grad in torch.autograd.grad(empty.sum(), leaves))


@needs_triton
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,)], ids=["tokens", "experts", "routing"])
def test_triton_gives_only_the_gradients_asked_for(frozen):
    (x, gate_up, down, index, weights), dy = random_case(5, 2, 3, 16, 16, torch.float32, device=DEVICE)
    results = []
    for impl in ("triton", "torch"):
        leaves = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate((x, gate_up, down, weights))]
        grouped_experts(*leaves[:3], index, leaves[3], impl=impl).backward(dy)
        results.append([leaf.grad for leaf in leaves])
    for i, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert (actual is None) == (expected is None) == (i in frozen)
        if actual is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_triton_frees_the_hidden_values_before_it_makes_weight_gradients(monkeypatch):
    """Unless the graph is retained: then a second backward pass finds them as they were."""
    from deltalatent.kernels.experts import triton_launch

    hidden, alive = [], []
    gated_unit_backward, weight_gradient = triton_launch.gated_unit_backward, triton_launch.weight_gradient

    def watch_hidden(v, values, *rest):
        hidden.append(weakref.ref(values))
        return gated_unit_backward(v, values, *rest)

    def watch_weight(*arguments, **options):
        alive.append(hidden[-1]() is not None)
        return weight_gradient(*arguments, **options)

    monkeypatch.setattr(triton_launch, "gated_unit_backward", watch_hidden)
    monkeypatch.setattr(triton_launch, "weight_gradient", watch_weight)
    (x, gate_up, down, index, weights), dy = random_case(5, 2, 3, 16, 16, torch.float32, device=DEVICE)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    y = grouped_experts(x, gate_up, down, index, weights, impl="triton")
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert alive == [True, True, False, False]


@needs_triton
def test_triton_under_compile():
    (x, gate_up, down, index, weights), _ = random_case(6, 2, 3, 16, 16, torch.float32, device=DEVICE)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]

    def run(x, gate_up, down, weights):
        return grouped_experts(x, gate_up, down, index, weights, impl="triton")

    expected = run(*leaves)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(actual, expected)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    with torch.no_grad():
        assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), expected)


@needs_triton
def test_triton_operators_are_registered_consistently():
    (x, gate_up, down, index, weights), _ = random_case(4, 2, 3, 16, 16, torch.float32, device=DEVICE)
    leaves = [t.requires_grad_() for t in (x, gate_up, down)]
    arguments = (*leaves, index, weights.requires_grad_(), True, 4.0, 25.0, True)
    # Places of a plan that no tile uses are not written, so that two runs differ there.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.deltalatent.grouped_experts, arguments, test_utils=tests)


@needs_triton
def test_triton_refuses_second_derivatives():
    (x, gate_up, down, index, weights), _ = random_case(4, 2, 3, 16, 16, torch.float32, device=DEVICE)
    y = grouped_experts(x.requires_grad_(), gate_up, down, index, weights, impl="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


RAGGED = {
    "decode-1": (1, 16, 64, 256, 192),
    "decode-64": (64, 16, 300, 128, 320),
    "odd-widths": (333, 5, 7, 104, 72),
    "odd-widths-2": (130, 3, 9, 36, 20),
    "one-tile": (128, 1, 1, 128, 128),
    "tails": (1200, 4, 32, 192, 160),
    "many-rows": (3000, 8, 16, 256, 128),
    "many-experts": (2048, 16, 896, 64, 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", RAGGED)
def test_gpu_shapes(shape, dtype):
    check_triton(*RAGGED[shape], dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation", ["situ", "silu"])
def test_gpu_routings(routing, activation):
    check_triton(900, 6, 24, 128, 192, dtype=torch.bfloat16, routing=ROUTINGS[routing], activation=activation)


def launches_of_many_experts(monkeypatch, device):
    """Of a forward and a backward pass with 150 rows an expert; nothing runs."""
    from tests.kernels.test_compiled import record, run_experts

    return record(monkeypatch, device, lambda: run_experts(tokens=4800, count=64))


@needs_launches
def test_kernels_for_hopper_are_taken_where_they_can_run(monkeypatch):
    from deltalatent.kernels.experts.triton_launch import hopper_kernels

    assert hopper_kernels((8, 0)) is None
    assert hopper_kernels((10, 0)) is None
    products, gradients = hopper_kernels((9, 0))
    x, w = torch.zeros(9, 64, dtype=torch.bfloat16), torch.zeros(3, 256, 64, dtype=torch.bfloat16)
    assert products.takes(x, w, transposed=False)
    assert not products.takes(x, w, transposed=True)  # 64 channels are no block
    assert products.takes(x, w.mT.contiguous(), transposed=True)
    assert not products.takes(x, w[:, :, :32].contiguous(), transposed=False)
    assert not products.takes(x.float(), w.float(), transposed=False)
    assert not products.takes(x.flatten()[1:65].view(1, 64), w, transposed=False)
    left, right, w = (torch.zeros(shape, dtype=torch.float16) for shape in ((9, 128), (9, 256), (3, 128, 256)))
    assert gradients.takes(left, right, w)
    assert not gradients.takes(left, right, w[:, :64])
    assert not gradients.takes(left, right, w[:, :, :64])
    assert not gradients.takes(left.float(), right.float(), w.float())
    assert not gradients.takes(left.flatten()[1:129].view(1, 128), right, w)
    for device, expected in (("sm90", (4, 2)), ("sm86", (0, 0))):
        names = [launch.kernel.fn.__name__ for launch in launches_of_many_experts(monkeypatch, device)]
        assert tuple(map(names.count, ("hopper_product_kernel", "hopper_gradient_kernel"))) == expected


@needs_launches
def test_products_of_the_kernels_for_hopper_run_in_the_background(monkeypatch, tmp_path):
    """They fit the device, and `ptxas` has not put a wait behind every product, as it does where it sees a hazard."""
    from tests.kernels.test_compiled import build

    for launch in launches_of_many_experts(monkeypatch, "sm90"):
        if launch.kernel.fn.__name__.startswith("hopper"):
            compiled, listing = build(launch, "sm90", tmp_path)
            assert "HGMMA" in listing
            assert listing.count("WARPGROUP.DEPBAR") <= compiled.asm["ptx"].count("wgmma.wait_group")


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu_few_rows_of_many_experts(monkeypatch, routing, dtype, hopper):
    """About 150 rows an expert: tiles with a tail; or experts of several tiles and panels, and without any."""
    from deltalatent.kernels.experts import triton_launch

    if not hopper:
        monkeypatch.setattr(triton_launch, "hopper_kernels", lambda capability: None)
    elif triton_launch.hopper_kernels(torch.cuda.get_device_capability()) is None:
        pytest.skip("needs a Hopper GPU and the version of Triton that the kernels are written for")
    check_triton(1200, 8, 64, 256, 512, dtype=dtype, routing=ROUTINGS[routing])


@pytest.mark.gpu
def test_gpu_runs_repeat_bit_for_bit():
    inputs, dy = random_case(2048, 8, 64, 256, 256, torch.bfloat16, few_in_use, DEVICE)
    first, second = evaluate("triton", inputs, dy), evaluate("triton", inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_gpu_is_first_to_use_the_device_in_a_thread():
    """As in the first backward pass of a process: autograd's thread has no CUDA context yet."""
    inputs, _ = random_case(512, 8, 32, 128, 128, torch.bfloat16, device=DEVICE)
    with ThreadPoolExecutor(1) as pool:
        actual = pool.submit(grouped_experts, *inputs, impl="triton").result()
    assert torch.equal(actual, grouped_experts(*inputs, impl="triton"))


@pytest.mark.gpu
def test_gpu_addresses_past_32_bits():
    """More than 2^31 elements in a weight: the last expert is reached."""
    E, Z, F = 600, 1024, 1792
    x = torch.randn(40, Z, dtype=torch.bfloat16, device=DEVICE)
    gate_up = torch.empty(E, 2 * F, Z, dtype=torch.bfloat16, device=DEVICE).normal_(std=Z**-0.5)
    down = torch.empty(E, Z, F, dtype=torch.bfloat16, device=DEVICE).normal_(std=F**-0.5)
    index = torch.arange(E - 80, E, device=DEVICE).view(40, 2)
    weights = torch.ones(40, 2, device=DEVICE)
    actual = grouped_experts(x, gate_up, down, index, weights, impl="triton")
    part = slice(E - 80, E)
    plain = grouped_experts(x, gate_up[part], down[part], index - (E - 80), weights, impl="torch")
    exact = grouped_experts(
        *(t.double() for t in (x, gate_up[part], down[part])), index - (E - 80), weights.double(), impl="torch"
    )
    assert_as_exact_as_plain(actual, exact, plain, "output")


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_device():
    inputs, dy = random_case(512, 8, 32, 128, 128, torch.bfloat16, device=DEVICE)
    evaluate("triton", inputs, dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluate("triton", inputs, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
