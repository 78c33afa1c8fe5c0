# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantile estimator: golden numbers, properties, copies, compilation, convergence, refusals."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.testing_utils import CaptureLogger

from deltalatent.kernels.router import reference as router_reference
from deltalatent.modeling import quantile_balancing
from deltalatent.modeling.quantile_balancing import QuantileHistogram, exact_next_bias, sign_rule_next_bias

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "qb"
CONFIG = json.loads((GOLDEN / "config.json").read_text())
CASES = {name: case for name, case in CONFIG["cases"].items() if name != "fig5"}  # fig5 is one step, scores stored
STEPS = 6
EXACT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}  # meta.json of the fixture
DTYPES = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


@functools.cache
def golden_scores(name: str, step: int) -> Tensor:
    """Scores of one step from the fixture's counter-based generator (its config.json), float64 [T, E]."""
    case = CASES[name]
    seed = case["seed"] if case["mode"] == "fixed" else case["seed"] + 10000 * (step + 1)
    noise = golden_uniform(seed, case["m"] * case["n"]).view(case["m"], case["n"])
    popularity = golden_uniform(case["seed"] + 1000003, case["n"])
    return 0.02 + 0.96 * (0.55 * noise + 0.45 * popularity**2).clamp(0, 1)


def golden_uniform(seed: int, count: int) -> Tensor:
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    return torch.from_numpy((z >> np.uint64(11)).astype(np.float64)) / 2**53


def route(scores: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Cutoff [T] and selected ids [T, K]."""
    values, ids = (scores + bias).topk(top_k + 1, dim=1)
    return values[:, top_k], ids[:, :top_k]


def histogram_step(scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None = None) -> QuantileHistogram:
    histogram = QuantileHistogram(scores.shape[1], top_k)
    cutoff, selected = route(scores, bias, top_k)
    histogram.add(scores, cutoff, bias, mask, selected)
    return histogram


def loads_under(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    return torch.bincount(route(scores, bias, top_k)[1].reshape(-1), minlength=scores.shape[1])


def bin_width(bias: Tensor) -> float:
    return (bias.max() - bias.min() + 2).item() / quantile_balancing.DEFAULT_NUM_BINS


# Golden numbers


def test_golden_eight_by_four_example_is_balanced_in_one_update(golden: dict[str, Tensor]) -> None:
    scores, zero = golden["fig5.scores"], torch.zeros(4, dtype=torch.float64)
    cutoff, _ = route(scores, zero, 1)
    torch.testing.assert_close(cutoff, golden["fig5.cutoff"], rtol=0, atol=1e-15)
    torch.testing.assert_close(scores - cutoff[:, None], golden["fig5.margins"], rtol=0, atol=1e-15)
    assert loads_under(scores, zero, 1).tolist() == golden["fig5.loads_before"].tolist() == [4, 3, 1, 0]

    bias = exact_next_bias(scores, zero, 1)
    torch.testing.assert_close(bias, golden["fig5.bias_next"], rtol=0, atol=1e-12)
    uncentred = golden["fig5.bias_next_uncentred"]
    torch.testing.assert_close(bias, uncentred - uncentred.mean(), rtol=0, atol=1e-12)
    assert loads_under(scores, bias, 1).tolist() == golden["fig5.loads_after"].tolist() == [2, 2, 2, 2]

    histogram = histogram_step(scores, zero, 1)
    assert histogram.loads.tolist() == [4, 3, 1, 0]
    after = loads_under(scores, histogram.next_bias(zero), 1)
    assert (after - 2).abs().max() <= 1  # the fixture's bound for the histogram form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_golden_six_exact_updates(golden: dict[str, Tensor], name: str, dtype: torch.dtype) -> None:
    top_k = CASES[name]["k"]
    bias = golden[f"{name}.bias_start"].to(dtype)
    for step in range(STEPS):
        scores64 = golden_scores(name, step)
        torch.testing.assert_close(scores64.sum(), golden[f"{name}.scores_checksum"][step], rtol=1e-13, atol=0)
        scores = scores64.to(dtype)
        before = loads_under(scores, bias, top_k)
        bias = exact_next_bias(scores, bias, top_k)
        after = loads_under(scores, bias, top_k)
        torch.testing.assert_close(
            bias.double(), golden[f"{name}.exact_bias"][step], rtol=0, atol=EXACT_TOLERANCE[dtype]
        )
        # After an exact update some tokens sit on the cutoff up to rounding (meta.json); before the first none does.
        assert (before - golden[f"{name}.exact_loads_before"][step]).abs().max() <= (3 if step else 0)
        assert (after - golden[f"{name}.exact_loads_after"][step]).abs().max() <= 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_golden_six_histogram_updates(golden: dict[str, Tensor], name: str, dtype: torch.dtype) -> None:
    top_k = CASES[name]["k"]
    bias = golden[f"{name}.bias_start"].to(dtype)
    for step in range(STEPS):
        expected = golden[f"{name}.hist_bias"][step]
        if dtype == torch.float32 and step:
            # Rounding may move a value to the next bin, and a later step would inherit that: check steps one by one.
            bias = golden[f"{name}.hist_bias"][step - 1].to(dtype)
        tolerance = 1e-9 if dtype == torch.float64 else bin_width(bias)
        scores = golden_scores(name, step).to(dtype)
        histogram = histogram_step(scores, bias, top_k)
        bias = histogram.next_bias(bias)
        assert bias.dtype == dtype
        torch.testing.assert_close(bias.double(), expected, rtol=0, atol=tolerance)
        assert (histogram.loads - golden[f"{name}.hist_loads_before"][step]).abs().max() <= (1 if step else 0)
        after = loads_under(scores, bias, top_k)
        assert (after - golden[f"{name}.hist_loads_after"][step]).abs().max() <= 1


@pytest.mark.parametrize("name", ["small", "medium"])
def test_golden_bins_of_the_first_step(golden: dict[str, Tensor], name: str) -> None:
    case, stored = CASES[name], golden[f"{name}.step0_hist_nonzero"]
    expected = torch.zeros(case["n"], 1000, dtype=torch.int32)
    expected[stored[:, 0], stored[:, 1]] = stored[:, 2].int()
    histogram = histogram_step(golden[f"{name}.scores_step0"], golden[f"{name}.bias_start"], case["k"])
    assert torch.equal(histogram.counts, expected)
    assert histogram.tokens == case["m"]


@pytest.mark.parametrize("name", CASES)
def test_golden_exact_bias_lies_in_its_bracket(golden: dict[str, Tensor], name: str) -> None:
    """The exact estimate is the upper end of the biases that give the target load; the histogram's is one bin away."""
    bias = golden[f"{name}.bias_start"]
    scores, top_k = golden_scores(name, 0), CASES[name]["k"]
    low, high = golden[f"{name}.step0_bracket_low"], golden[f"{name}.step0_bracket_high"]
    torch.testing.assert_close(exact_next_bias(scores, bias, top_k), high - high.mean(), rtol=0, atol=1e-12)
    uncentred = golden[f"{name}.step0_hist_uncentred"]
    assert ((uncentred >= low - bin_width(bias)) & (uncentred <= high + bin_width(bias))).all()
    estimate = histogram_step(scores, bias, top_k).next_bias(bias)
    torch.testing.assert_close(estimate, uncentred - uncentred.mean(), rtol=0, atol=1e-9)


# Properties


@st.composite
def routing(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Scores [T, E] and bias [E] in float64, and K < E; scores on a coarse grid half of the time, so that they tie."""
    num_experts = draw(st.integers(2, 12))
    top_k = draw(st.integers(1, num_experts - 1))
    num_tokens = draw(st.integers(1, 40))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.rand(num_tokens, num_experts, generator=rng, dtype=torch.float64)
    if draw(st.booleans()):
        scores = (scores * 4).round() / 4
    bias = draw(st.sampled_from([0.0, 0.1, 3.0])) * torch.randn(num_experts, generator=rng, dtype=torch.float64)
    return scores, bias, top_k


@given(routing(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_order_of_tokens_does_not_matter(case: tuple[Tensor, Tensor, int], random) -> None:
    scores, bias, top_k = case
    order = list(range(scores.shape[0]))
    random.shuffle(order)
    assert torch.equal(
        histogram_step(scores[order], bias, top_k).next_bias(bias), histogram_step(scores, bias, top_k).next_bias(bias)
    )
    assert torch.equal(exact_next_bias(scores[order], bias, top_k), exact_next_bias(scores, bias, top_k))


@given(routing(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_experts_renumbered_is_bias_renumbered(case: tuple[Tensor, Tensor, int], random) -> None:
    scores, bias, top_k = case
    order = list(range(scores.shape[1]))
    random.shuffle(order)
    whole, shuffled = histogram_step(scores, bias, top_k), histogram_step(scores[:, order], bias[order], top_k)
    assert torch.equal(shuffled.counts, whole.counts[order])
    # Only the mean is summed in another order: E additions of values below max|b| + 1.
    rounding = 2 * scores.shape[1] * torch.finfo(torch.float64).eps * (bias.abs().max().item() + 2)
    torch.testing.assert_close(shuffled.next_bias(bias[order]), whole.next_bias(bias)[order], rtol=0, atol=rounding)
    torch.testing.assert_close(
        exact_next_bias(scores[:, order], bias[order], top_k),
        exact_next_bias(scores, bias, top_k)[order],
        rtol=0,
        atol=rounding,
    )


@given(routing())
@settings(deadline=None, max_examples=60)
def test_bias_is_centred_and_finite(case: tuple[Tensor, Tensor, int]) -> None:
    scores, bias, top_k = case
    for estimate in (histogram_step(scores, bias, top_k).next_bias(bias), exact_next_bias(scores, bias, top_k)):
        assert torch.isfinite(estimate).all()
        rounding = scores.shape[1] * torch.finfo(torch.float64).eps * (bias.abs().max().item() + 2)
        assert estimate.mean().abs() <= rounding


@given(routing())
@settings(deadline=None, max_examples=100)
def test_every_expert_gets_its_share_at_fixed_cutoffs(case: tuple[Tensor, Tensor, int]) -> None:
    """An expert's bias is the order statistic of its required biases that admits T K / E tokens."""
    scores, bias, top_k = case
    num_tokens, num_experts = scores.shape
    cutoff, _ = route(scores, bias, top_k)
    required = (cutoff[:, None] - scores).sort(dim=0).values  # ascending

    exact = required[num_tokens * top_k // num_experts]  # just not admitted: floor(q) tokens are strictly below
    rounding = num_experts * torch.finfo(torch.float64).eps * (bias.abs().max().item() + 2)
    torch.testing.assert_close(exact_next_bias(scores, bias, top_k), exact - exact.mean(), rtol=0, atol=rounding)
    last_admitted = required[-(-num_tokens * top_k // num_experts) - 1]  # the ceil(q)-th
    estimate = histogram_step(scores, bias, top_k).next_bias(bias)
    # The two share a bin, so they differ by at most its width; centring takes off the mean of E such differences.
    assert (estimate - (last_admitted - last_admitted.mean())).abs().max() <= 2 * bin_width(bias) + rounding


@given(routing(), st.data())
@settings(deadline=None, max_examples=60)
def test_masking_tokens_is_dropping_them(case: tuple[Tensor, Tensor, int], data: st.DataObject) -> None:
    scores, bias, top_k = case
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    masked, dropped = histogram_step(scores, bias, top_k, mask), histogram_step(scores[mask], bias, top_k)
    assert torch.equal(masked.counts, dropped.counts)
    assert torch.equal(masked.loads, dropped.loads)
    assert torch.equal(masked.tokens, dropped.tokens)
    assert torch.equal(masked.next_bias(bias), dropped.next_bias(bias))


@given(routing(), st.integers(0, 40), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_micro_batches_are_one_batch_and_replicas_change_nothing(
    case: tuple[Tensor, Tensor, int], cut: int, replicas: int
) -> None:
    scores, bias, top_k = case
    whole, parts = histogram_step(scores, bias, top_k), QuantileHistogram(scores.shape[1], top_k)
    for _ in range(replicas):
        for part in (scores[:cut], scores[cut:]):  # one of them may be empty
            cutoff, selected = route(part, bias, top_k)
            parts.add(part, cutoff, bias, None, selected)
    assert torch.equal(parts.counts, replicas * whole.counts)
    assert torch.equal(parts.loads, replicas * whole.loads)
    assert parts.tokens == replicas * whole.tokens
    assert torch.equal(parts.next_bias(bias), whole.next_bias(bias))


@given(routing())
@settings(deadline=None, max_examples=60)
def test_loads_without_ids_count_experts_above_the_cutoff(case: tuple[Tensor, Tensor, int]) -> None:
    scores, bias, top_k = case
    cutoff, _ = route(scores, bias, top_k)
    histogram = QuantileHistogram(scores.shape[1], top_k)
    histogram.add(scores, cutoff, bias)
    above = scores + bias > cutoff[:, None]
    assert torch.equal(histogram.loads, above.sum(dim=0, dtype=torch.int32))
    if (above.sum(dim=1) == top_k).all():  # no tie at any cutoff
        assert torch.equal(histogram.loads, histogram_step(scores, bias, top_k).loads)


@pytest.mark.parametrize("bias_value", [0.0, 7.0], ids=["zero_bias", "bias_7"])
def test_all_experts_tied_leaves_them_equal(bias_value: float) -> None:
    scores, bias = torch.full((10, 8), 0.5), torch.full((8,), bias_value)
    histogram = histogram_step(scores, bias, 2)
    if not bias_value:  # r = 0 is the lower edge of the middle bin, exactly
        assert histogram.counts[:, 500].tolist() == [10] * 8
    assert histogram.next_bias(bias).abs().max() <= 8 * torch.finfo(torch.float32).eps * (bias_value + 1)
    assert exact_next_bias(scores, bias, 2).abs().max() <= 8 * torch.finfo(torch.float32).eps * (bias_value + 1)


def test_a_single_token() -> None:
    scores, bias = torch.tensor([[0.9, 0.5, 0.2, 0.1]], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    required = 0.5 - scores[0]
    torch.testing.assert_close(exact_next_bias(scores, bias, 1), required - required.mean(), rtol=0, atol=1e-15)
    estimate = histogram_step(scores, bias, 1).next_bias(bias)
    torch.testing.assert_close(estimate, required - required.mean(), rtol=0, atol=2 * bin_width(bias))


def test_no_counted_token_keeps_the_bias() -> None:
    bias = torch.tensor([0.5, -0.25, 0.125])  # not centred: it must not be centred either
    empty = QuantileHistogram(3, 1)
    assert torch.equal(empty.next_bias(bias), bias)
    scores = torch.rand(5, 3)
    assert torch.equal(histogram_step(scores, bias, 1, torch.zeros(5, dtype=torch.bool)).next_bias(bias), bias)
    assert torch.equal(histogram_step(scores[:0], bias, 1).next_bias(bias), bias)


def test_tokens_with_nan_are_not_counted() -> None:
    scores, bias = torch.rand(6, 5), torch.zeros(5)
    spoiled = scores.clone()
    spoiled[2] = torch.nan
    kept = [0, 1, 3, 4, 5]
    histogram, expected = histogram_step(spoiled, bias, 2), histogram_step(scores[kept], bias, 2)
    assert torch.equal(histogram.counts, expected.counts)
    assert torch.equal(histogram.loads, expected.loads)
    assert histogram.tokens == 5


def test_every_expert_selected_has_nothing_to_balance() -> None:
    histogram, bias = QuantileHistogram(4, 4), torch.tensor([0.1, 0.2, 0.3, 0.4])
    histogram.add(torch.rand(7, 4), torch.full((7,), -torch.inf), bias)
    assert histogram.tokens == 0
    assert torch.equal(histogram.next_bias(bias), bias)


def test_a_tiny_update_of_a_large_bias_lands() -> None:
    """float32 resolves 1e-4 at 7.0 where bfloat16 (steps of 0.03) and float16 (0.004) do not."""
    bias = torch.tensor([7.0, 7.0 + 1e-4])
    width = (bias[1] - bias[0] + 2).item() / (1 << 16)
    cutoff = torch.full((1000,), 7.0 + 0.5)
    scores = torch.stack((torch.full((1000,), 0.5), torch.full((1000,), 0.5 - 1e-4)), dim=1)
    histogram = QuantileHistogram(2, 1, num_bins=1 << 16)  # bins of 3e-5
    histogram.add(scores, cutoff, bias)
    estimate = histogram.next_bias(bias)
    assert (estimate[1] - estimate[0]).item() == pytest.approx(1e-4, abs=2 * width)


# The object


def test_pieces_of_the_index_give_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, bias = torch.rand(50, 6), 0.1 * torch.randn(6)
    mask = torch.rand(50) > 0.3
    cutoff, _ = route(scores, bias, 2)
    whole, pieces = QuantileHistogram(6, 2), QuantileHistogram(6, 2)
    whole.add(scores, cutoff, bias, mask)
    monkeypatch.setattr(router_reference, "_INDEX_ELEMENTS", 20)  # three tokens at a time
    pieces.add(scores, cutoff, bias, mask)
    assert torch.equal(whole.allocate("cpu"), pieces.allocate("cpu"))


@pytest.mark.parametrize(
    "clone",
    [pytest.param(copy.deepcopy, id="deepcopy"), pytest.param(lambda x: pickle.loads(pickle.dumps(x)), id="pickle")],
)
def test_copies_carry_the_counts_and_are_independent(clone) -> None:
    scores, bias = torch.rand(9, 4), torch.zeros(4)
    original = histogram_step(scores, bias, 1)
    duplicate = clone(original)
    assert repr(duplicate) == repr(original) == "QuantileHistogram(num_experts=4, top_k=1, num_bins=1000)"
    assert torch.equal(duplicate.counts, original.counts)
    duplicate.reset()
    assert duplicate.tokens == 0
    assert original.tokens == 9
    assert clone(QuantileHistogram(4, 1)).next_bias(bias).tolist() == [0, 0, 0, 0]  # also before the first add


def test_reset_keeps_the_memory_and_forgets_the_counts() -> None:
    scores, bias = torch.rand(9, 4), torch.zeros(4)
    histogram = histogram_step(scores, bias, 1)
    address = histogram.counts.data_ptr()
    histogram.reset()
    assert histogram.allocate("cpu").sum() == 0
    cutoff, selected = route(scores, bias, 1)
    histogram.add(scores, cutoff, bias, None, selected)
    assert histogram.counts.data_ptr() == address
    assert torch.equal(histogram.counts, histogram_step(scores, bias, 1).counts)


def test_disabled_collects_nothing() -> None:
    histogram = QuantileHistogram(4, 1)
    histogram.enabled = False
    histogram.add(torch.rand(3, 4), torch.rand(3), torch.zeros(4))
    with pytest.raises(ValueError, match="histogram is empty"):
        _ = histogram.counts


class NoHostRead(TorchDispatchMode):
    """Fails on an operation that waits for the device to tell the host a value or a shape."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::bincount", "aten::is_nonzero", "aten::equal"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device() -> None:
    scores, bias, mask = torch.rand(9, 4), torch.zeros(4), torch.rand(9) > 0.5
    cutoff, selected = route(scores, bias, 2)
    histogram = QuantileHistogram(4, 2)
    with NoHostRead():
        histogram.add(scores, cutoff, bias, mask, selected)
        histogram.add(scores, cutoff, bias)
        histogram.next_bias(bias)
        histogram.reset()


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(8, 16, bias=False)
        self.register_buffer("e_score_correction_bias", torch.zeros(16))
        self.balance = QuantileHistogram(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.weight(x).sigmoid()
        cutoff, selected = route(scores, self.e_score_correction_bias, 2)
        self.balance.add(scores.detach(), cutoff.detach(), self.e_score_correction_bias, None, selected)
        return scores.gather(1, selected).sum()


def test_a_compiled_forward_is_one_graph_and_counts_the_same() -> None:
    eager = Router()
    eager.balance.allocate("cpu")
    eager.balance.has_reader = True
    compiled_module = copy.deepcopy(eager)
    counter = CompileCounter()
    compiled = torch.compile(compiled_module, backend=counter, fullgraph=True)
    for _ in range(6):
        x = torch.randn(20, 8)
        for _ in range(2):  # two micro-batches
            eager(x).backward()
            compiled(x).backward()
        assert torch.equal(compiled_module.balance.counts, eager.balance.counts)
        for module in (eager, compiled_module):
            module.e_score_correction_bias.copy_(module.balance.next_bias(module.e_score_correction_bias))
            module.balance.reset()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_statistics_that_nobody_reads_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantile_balancing, "_UNREAD_FORWARDS", 3)
    quantile_balancing.logger.warning_once.cache_clear()
    scores, bias = torch.rand(2, 4), torch.zeros(4)
    cutoff, _ = route(scores, bias, 1)

    def forwards(count: int, *, read_every: int | None = None, has_reader: bool = False) -> str:
        histogram = QuantileHistogram(4, 1)
        histogram.has_reader = has_reader
        with CaptureLogger(quantile_balancing.logger) as captured:
            for i in range(count):
                histogram.add(scores, cutoff, bias)
                if read_every and i % read_every == 0:
                    histogram.reset()
        return captured.out

    assert forwards(20, read_every=2) == ""
    assert forwards(20, has_reader=True) == ""
    assert forwards(2) == ""
    assert forwards(9).count("QuantileBalancingCallback") == 1
    assert forwards(9) == ""  # once per process


# Convergence


def random_router_scores(num_experts: int, num_tokens: int, width: int = 32, seed: int = 0) -> Tensor:
    """Sigmoid scores of a random router whose tokens share a direction, so that some experts are far ahead."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_experts, width, generator=rng) / width**0.5
    tokens = 0.5 * torch.randn(width, generator=rng) + torch.randn(num_tokens, width, generator=rng)
    return torch.sigmoid(tokens @ weight.T)


def test_896_experts_are_balanced_within_ten_steps_where_the_sign_rule_is_not() -> None:
    num_experts, top_k, num_tokens = 896, 16, 8192
    scores = random_router_scores(num_experts, num_tokens)

    def max_violation(loads: Tensor) -> float:
        return loads.max().item() * num_experts / (num_tokens * top_k) - 1

    quantile, sign = torch.zeros(num_experts), torch.zeros(num_experts)
    start = max_violation(loads_under(scores, quantile, top_k))
    for _ in range(10):
        quantile = histogram_step(scores, quantile, top_k).next_bias(quantile)
        sign = sign_rule_next_bias(sign, loads_under(scores, sign, top_k), step_size=1e-3)
    assert start > 5
    assert max_violation(loads_under(scores, quantile, top_k)) < 0.1
    assert max_violation(loads_under(scores, sign, top_k)) > 0.9 * start


def test_sign_rule_moves_against_the_load() -> None:
    bias = sign_rule_next_bias(torch.zeros(3), torch.tensor([4, 2, 0]), step_size=0.5)
    assert bias.tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_counts_are_the_cpu_counts_and_follow_the_scores() -> None:
    scores, bias = random_router_scores(64, 500), 0.1 * torch.randn(64)
    cutoff, selected = route(scores, bias, 4)
    mask = torch.rand(500) > 0.2
    on_cpu, on_gpu = QuantileHistogram(64, 4), QuantileHistogram(64, 4)
    on_cpu.add(scores, cutoff, bias, mask, selected)
    on_gpu.add(scores, cutoff, bias, mask, selected)  # begins on the CPU, then moves
    for histogram, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
        histogram.add(*(x.to(device) for x in (scores, cutoff, bias, mask, selected)))
    assert on_gpu.counts.is_cuda
    assert torch.equal(on_gpu.loads.cpu(), on_cpu.loads)
    assert torch.equal(on_gpu.tokens.cpu(), on_cpu.tokens)
    # Same float32 operations up to the rounding of one product: at most a neighbouring bin.
    estimate = on_gpu.next_bias(bias.cuda()).cpu()
    torch.testing.assert_close(estimate, on_cpu.next_bias(bias), rtol=0, atol=bin_width(bias))


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 0, "top_k": 1}, "`num_experts` must be at least 1, got 0"),
        ({"num_experts": 4, "top_k": 0}, r"`top_k` must lie in \[1, num_experts=4\], got 0"),
        ({"num_experts": 4, "top_k": 5}, r"`top_k` must lie in \[1, num_experts=4\], got 5"),
        ({"num_experts": 4, "top_k": 1, "num_bins": 1}, "`num_bins` must be at least 2, got 1"),
    ],
    ids=["no_experts", "top_k_0", "top_k_above_experts", "one_bin"],
)
def test_histogram_sizes_are_checked(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantileHistogram(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": torch.rand(5, 4).bfloat16()}, TypeError, "must be float32 or float64, got torch.bfloat16"),
        ({"scores": torch.rand(5, 3)}, ValueError, r"`scores` must be \[T, num_experts=4\], got \(5, 3\)"),
        ({"scores": torch.rand(1, 5, 4)}, ValueError, "flatten batch and sequence"),
        ({"cutoff": torch.rand(5, 1)}, ValueError, r"`cutoff` must be \[T=5\], got \(5, 1\)"),
        ({"selection_bias": torch.zeros(3)}, ValueError, r"bias must be \[num_experts=4\], got \(3,\)"),
        ({"selection_bias": torch.zeros(4).half()}, TypeError, "must be float32 .*got torch.float16"),
        ({"mask": torch.ones(5)}, TypeError, "`mask` must be bool .*got torch.float32"),
        ({"mask": torch.ones(1, 5, dtype=torch.bool)}, ValueError, r"`mask` must be \[T=5\], got \(1, 5\)"),
        ({"selected": torch.zeros(5, 1, dtype=torch.long)}, ValueError, r"`selected` must be \[T=5, top_k=2\]"),
    ],
    ids=[
        "scores_bf16",
        "scores_experts",
        "scores_3d",
        "cutoff_2d",
        "bias_experts",
        "bias_fp16",
        "mask_float",
        "mask_2d",
        "selected_top_k",
    ],
)
def test_add_is_checked(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    arguments = {"scores": torch.rand(5, 4), "cutoff": torch.rand(5), "selection_bias": torch.zeros(4)} | change
    with pytest.raises(error, match=message):
        QuantileHistogram(4, 2).add(**arguments)


def test_estimators_refuse_what_they_cannot_estimate() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        exact_next_bias(torch.rand(0, 4), torch.zeros(4), 1)
    with pytest.raises(ValueError, match="nothing to balance"):
        exact_next_bias(torch.rand(3, 4), torch.zeros(4), 4)
    with pytest.raises(TypeError, match="keep `e_score_correction_bias` in float32"):
        QuantileHistogram(4, 1).next_bias(torch.zeros(4, dtype=torch.bfloat16))
