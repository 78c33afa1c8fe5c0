# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Router, experts and the latent mixture: definitions, ties, precision, what quantile balancing counts."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from deltalatent.kernels import dispatch
from deltalatent.kernels.experts import grouped_experts_reference
from deltalatent.kernels.situ import situ_glu
from deltalatent.modeling import experts_backends
from deltalatent.modeling.latent_moe import KimiK3Experts, KimiK3MLP, KimiK3SparseMoE, KimiK3TopKRouter
from tests.testing_common import assert_close, max_error, random_ids, randomize_, tiny_config, tiny_model

BACKENDS = ["eager", "grouped_mm", "batched_mm"]
MANY = {"num_experts": 64, "num_experts_per_token": 8, "hidden_size": 64}


def router(variant: str = "default", **overrides: Any) -> KimiK3TopKRouter:
    return randomize_(KimiK3TopKRouter(tiny_config(variant, **overrides)))


def moe(variant: str = "default", implementation: str = "eager", **overrides: Any) -> KimiK3SparseMoE:
    config = tiny_config(variant, experts_implementation=implementation, **overrides)
    return randomize_(KimiK3SparseMoE(config))


# ---- router ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["default", "no_latent_norm", "grouped_router", "all_experts"])
def test_router_is_its_definition(variant: str) -> None:
    """Token by token in Python: sigmoid, bias for the choice only, groups, weights without the bias."""
    module = router(variant)
    x = torch.randn(40, 32)
    output = module(x)
    config = tiny_config(variant)
    groups, kept = config.num_expert_group, config.topk_group
    size = config.num_experts // groups
    for t in range(40):
        scores = torch.sigmoid(module.weight.double() @ x[t].double())
        biased = (scores + module.e_score_correction_bias.double()).tolist()
        rank = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        eligible = sorted(range(groups), key=rank.__getitem__)[-kept:]
        candidates = [e for e in range(config.num_experts) if e // size in eligible]
        ordered = sorted(candidates, key=biased.__getitem__, reverse=True)
        chosen = ordered[: config.num_experts_per_token]
        assert sorted(output.top_k_index[t].tolist()) == sorted(chosen)
        total = sum(scores[e].item() for e in chosen) + 1e-20 if config.moe_renormalize else 1.0
        for expert, weight in zip(output.top_k_index[t].tolist(), output.top_k_weights[t].tolist(), strict=True):
            assert abs(weight - config.routed_scaling_factor * scores[expert].item() / total) < 1e-6
        if len(ordered) > len(chosen):
            assert abs(output.cutoff[t].item() - biased[ordered[len(chosen)]]) < 1e-6
        elif len(candidates) == config.num_experts:
            assert output.cutoff[t] == -torch.inf
    assert_close(output.scores, output.router_logits.sigmoid())


def test_selection_bias_chooses_but_does_not_weigh() -> None:
    module = router()
    x = torch.randn(30, 32)
    before = module(x)
    module.e_score_correction_bias.zero_()
    module.e_score_correction_bias[3] = 10.0
    after = module(x)
    assert (after.top_k_index == 3).any(1).all()
    assert not (before.top_k_index == 3).any(1).all()
    assert_close(after.top_k_weights.sum(1), torch.ones(30))
    share = after.scores.gather(1, after.top_k_index)
    assert_close(after.top_k_weights, share / share.sum(1, keepdim=True))


def test_only_the_weights_carry_gradient() -> None:
    module = router()
    x = torch.randn(10, 32, requires_grad=True)
    output = module(x)
    assert output.top_k_weights.requires_grad and output.router_logits.requires_grad
    assert not output.top_k_index.requires_grad and not output.cutoff.requires_grad
    output.top_k_weights[:, 0].sum().backward()
    assert x.grad.any() and module.weight.grad.any()


@pytest.mark.parametrize("tokens", [1, 8, 300])
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_experts_do_not_depend_on_the_dtype_of_the_model(how: str, tokens: int) -> None:
    """S31, S36: a router in bf16 sends one token in twenty elsewhere; a bias in bf16 nearly all of them."""
    exact = router(**MANY)
    exact.e_score_correction_bias.copy_(6.8 + 1e-3 * torch.arange(64))  # one value in bf16
    with torch.no_grad():
        exact.weight.copy_(exact.weight.to(torch.bfloat16))
    x = torch.randn(tokens, 64).to(torch.bfloat16)
    expected = exact(x.float())
    if how == "bf16":
        actual = copy.deepcopy(exact).to(torch.bfloat16)(x)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = exact(x)
    assert torch.equal(actual.top_k_index, expected.top_k_index)
    for name in ("router_logits", "top_k_weights", "scores", "cutoff"):
        assert getattr(actual, name).dtype == torch.float32, name
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def test_a_router_in_bf16_would_choose_others() -> None:
    """The test above can fail: what it guards against does happen at this size."""
    exact = router(**MANY)
    x = torch.randn(300, 64).to(torch.bfloat16)
    logits = nn.functional.linear(x, exact.weight.to(torch.bfloat16))
    chosen = (logits.sigmoid() + exact.e_score_correction_bias.to(torch.bfloat16)).topk(8).indices.sort().values
    expected = exact(x.float()).top_k_index.sort().values
    assert (chosen != expected).any(1).float().mean() > 0.05


def test_one_path_for_all_batch_sizes() -> None:
    """S36: the fault there showed on one token count only."""
    module = router(**MANY)
    x = torch.randn(300, 64)
    whole = module(x)
    for start, end in [(0, 1), (1, 9), (9, 300)]:
        part = module(x[start:end])
        assert torch.equal(part.top_k_index, whole.top_k_index[start:end])
        assert_close(part.top_k_weights, whole.top_k_weights[start:end])


def test_ties_are_decided_the_same_way_every_time() -> None:
    """S35: experts with equal weights and bias."""
    module = router()
    with torch.no_grad():
        module.weight[1:4] = module.weight[0]
        module.e_score_correction_bias.zero_()
    x = torch.randn(64, 32)
    first = module(x).top_k_index
    assert all(torch.equal(module(x).top_k_index, first) for _ in range(5))
    assert all(len(set(row)) == 2 for row in first.tolist()), "an expert twice"


# ---- experts --------------------------------------------------------------------------------------------------------


def test_situ_is_its_definition() -> None:
    gate, up = 6 * torch.randn(50, dtype=torch.float64), 40 * torch.randn(50, dtype=torch.float64)
    expected = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
    assert_close(situ_glu(gate, up, 4.0, 25.0), expected, 1e-14)
    assert situ_glu(1e6 * gate.abs(), 1e6 * up, 4.0, 25.0).abs().max() <= 100
    gate, up = gate.requires_grad_(), up.requires_grad_()
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, 4.0, 25.0), (gate, up))


@pytest.mark.parametrize("variant", ["default", "silu"])
def test_dense_mixer_is_its_definition(variant: str) -> None:
    config = tiny_config(variant)
    mlp = randomize_(KimiK3MLP(config, 64)).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    hidden = situ_glu(gate, up, 4.0, 25.0) if variant == "default" else gate * torch.sigmoid(gate) * up
    assert_close(mlp(x), hidden @ mlp.down_proj.weight.T, 1e-14)


def expert_sum(experts: KimiK3Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of experts, one token and expert at a time, in float64."""
    output = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, weight in zip(index[t].tolist(), weights[t].double(), strict=True):
            if expert < experts.num_experts:
                gate, up = (experts.gate_up_proj[expert].double() @ x[t].double()).chunk(2)
                hidden = situ_glu(gate, up, 4.0, 25.0)
                output[t] += weight * (experts.down_proj[expert].double() @ hidden)
    return output


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_experts_are_their_definition(implementation: str, tokens: int) -> None:
    experts = moe(implementation=implementation).experts
    x = torch.randn(tokens, 24)
    index, weights = torch.rand(tokens, 8).topk(2).indices, torch.rand(tokens, 2)
    assert_close(experts(x, index, weights), expert_sum(experts, x, index, weights))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_one_expert_per_row_with_weight_one(implementation: str) -> None:
    """How expert parallelism calls them: weights are applied elsewhere."""
    experts = moe(implementation=implementation).experts
    x, index = torch.randn(9, 24), torch.randint(0, 8, (9, 1))
    weights = torch.ones(9, 1)
    assert_close(experts(x, index, weights), expert_sum(experts, x, index, weights))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_experts_of_other_ranks_contribute_nothing(implementation: str) -> None:
    """Under expert parallelism an id that is not on this rank is the number of local experts."""
    experts = moe(implementation=implementation).experts
    experts._is_expert_parallel = True
    x = torch.randn(12, 24, requires_grad=True)
    index, weights = torch.randint(0, 8, (12, 2)), torch.rand(12, 2)
    index[::2, 0] = 8
    index[3] = 8
    output = experts(x, index, weights)
    assert_close(output, expert_sum(experts, x, index, weights))
    assert not output[3].any()
    output.square().sum().backward()
    assert torch.isfinite(x.grad).all() and not x.grad[3].any()
    assert torch.isfinite(experts.gate_up_proj.grad).all()


@pytest.mark.parametrize("implementation", BACKENDS)
def test_an_expert_without_tokens_has_gradient_zero(implementation: str) -> None:
    experts = moe(implementation=implementation).experts
    x, weights = torch.randn(6, 24), torch.rand(6, 2)
    experts(x, torch.tensor([[0, 5]] * 6), weights).sum().backward()
    for name, parameter in experts.named_parameters():
        for expert in range(8):
            assert parameter.grad[expert].any() == (expert in (0, 5)), f"{name} of expert {expert}"


@pytest.mark.parametrize(("width", "expected"), [(16, "grouped_mm"), (20, "eager")])
def test_auto_without_a_gpu_is_the_default_of_transformers(
    width: int, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_announced", set())
    experts = moe(implementation="auto", moe_intermediate_size=width).experts
    x, index, weights = torch.randn(9, 24), torch.randint(0, 8, (9, 2)), torch.rand(9, 2)
    with caplog.at_level("INFO", logger="deltalatent"):
        assert_close(experts(x, index, weights), expert_sum(experts, x, index, weights))
    assert f"experts_implementation: auto chose {expected} on cpu (deltalatent: " in caplog.text


def test_our_kernels_say_why_they_cannot_run() -> None:
    experts = moe(implementation="deltalatent").experts
    arguments = torch.randn(3, 24), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    with pytest.raises((ValueError, ImportError), match=r"cannot run: .*(got tensors on 'cpu'|pip install)"):
        experts(*arguments)
    with pytest.raises(TypeError, match=r"cannot run: .*float16 or bfloat16, got torch\.float64"):
        experts.double()(arguments[0].double(), *arguments[1:])


@use_experts_implementation
class ForeignExperts(nn.Module):
    """SwiGLU experts as models of Transformers have them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 32, 24))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, 24, 16))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
            return self.act_fn(gate) * up

        weights = self.gate_up_proj, self.down_proj
        return grouped_experts_reference(hidden_states, *weights, top_k_index, top_k_weights, gated_unit)


def foreign_experts(implementation: str, hidden_act: str) -> nn.Module:
    config = tiny_config("silu", experts_implementation=implementation)
    config.hidden_act = hidden_act
    return randomize_(ForeignExperts(config))


def test_our_kernels_refuse_other_gated_units() -> None:
    arguments = torch.randn(3, 24), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    with pytest.raises(ValueError, match="needs SwiGLU experts without bias or norm, gate rows first, got ForeignExp"):
        foreign_experts("deltalatent", "gelu")(*arguments)
    assert foreign_experts("auto", "gelu")(*arguments).shape == (3, 24)
    with pytest.raises((ValueError, ImportError), match=r"cannot run: .*(got tensors on 'cpu'|pip install)"):
        foreign_experts("deltalatent", "silu")(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["default", "silu", "foreign"])
def test_gpu_our_kernels_agree_with_the_loop(variant: str, dtype: torch.dtype) -> None:
    """Output and gradients against float64; the loop in the same precision is the measure of what is allowed."""

    def run(implementation: str, dtype: torch.dtype) -> list[Tensor]:
        if variant == "foreign":
            experts = foreign_experts(implementation, "silu")
        else:
            experts = moe(variant, implementation).experts
        experts = experts.to("cuda", dtype)
        leaves = [x.to("cuda", dtype).requires_grad_(), weights.cuda().requires_grad_(), *experts.parameters()]
        output = experts(leaves[0], index.cuda(), leaves[1])
        return [output, *torch.autograd.grad(output, leaves, grad.to("cuda", dtype))]

    x, grad = torch.randn(100, 24).to(dtype), torch.randn(100, 24).to(dtype)
    index, weights = torch.randint(0, 8, (100, 2)), torch.rand(100, 2)
    exact = run("eager", torch.float64)
    for actual, expected, plain in zip(run("auto", dtype), exact, run("eager", dtype), strict=True):
        error, allowed = (typical_size(other.double() - expected) for other in (actual, plain))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * typical_size(expected)


def typical_size(tensor: Tensor) -> float:
    return tensor.detach().square().mean().sqrt().item()


@pytest.mark.gpu
def test_gpu_the_default_runs_our_kernels(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_announced", set())
    model = tiny_model().cuda()
    assert model.config._experts_implementation == "auto"
    ids = random_ids(model.config).cuda()
    with caplog.at_level("INFO", logger="deltalatent"):
        logits = model(ids).logits
    assert "experts_implementation: auto chose deltalatent on cuda" in caplog.text
    model.set_experts_implementation("eager")
    assert_close(logits, model(ids).logits, 1e-4)
    assert torch.isfinite(model.cpu()(ids.cpu()).logits).all()


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gpu_training_step_under_compile(checkpointing: bool) -> None:
    """Loss and counts of an eager step."""
    results = []
    for compiled in (False, True):
        model = tiny_model().cuda().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        run = torch.compile(model, backend="aot_eager", fullgraph=not checkpointing) if compiled else model
        ids = random_ids(model.config).cuda()
        loss = run(ids, labels=ids).loss
        loss.backward()
        counts = torch.stack([balance.allocate("cuda") for balance in balances(model)])
        results.append((loss.detach(), counts, model.model.layers[1].mlp.gate.weight.grad))
    (loss, counts, grad), (other_loss, other_counts, other_grad) = results
    assert_close(other_loss, loss)
    assert torch.equal(counts, other_counts)
    assert (counts[:, -1] == 2 * 19).all()
    assert_close(other_grad, grad, 1e-4)


# ---- the mixture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["default", "no_latent_moe", "no_latent_norm", "predecessor"])
def test_mixture_is_its_definition(variant: str) -> None:
    """Down, experts, norm, up, plus the shared experts on the full width."""
    module = moe(variant).double()
    config = tiny_config(variant)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    output, statistics = module(x)
    tokens = x.flatten(0, 1)
    routing = module.gate(tokens)
    routed = tokens
    if config.routed_expert_hidden_size is not None:
        routed = routed @ module.routed_expert_down_proj.weight.T
    if config.hidden_act == "situ":
        routed = expert_sum(module.experts, routed, routing.top_k_index, routing.top_k_weights)
    else:
        routed = module.experts(routed, routing.top_k_index, routing.top_k_weights)
    if config.routed_expert_hidden_size is not None:
        if config.latent_moe_use_norm:
            norm = (routed.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
            routed = routed / norm * module.routed_expert_norm.weight
        routed = routed @ module.routed_expert_up_proj.weight.T
    shared = module.shared_experts(tokens) if config.num_shared_experts else 0
    assert_close(output.flatten(0, 1), routed + shared, 1e-12)
    assert (module.shared_experts is None) == (variant == "no_latent_moe")
    assert torch.equal(statistics.top_k_index, routing.top_k_index)
    assert not statistics.scores.requires_grad and not statistics.cutoff.requires_grad


@pytest.mark.parametrize("implementation", BACKENDS)
def test_896_experts_top_16(implementation: str) -> None:
    """The numbers of the released size, at toy width: experts without tokens and experts with many."""
    module = moe(implementation=implementation, num_experts=896, num_experts_per_token=16)
    x = torch.randn(3, 32)
    routing = module.gate(x)
    assert all(len(set(row)) == 16 for row in routing.top_k_index.tolist())
    latent = module.routed_expert_down_proj(x)
    actual = module.experts(latent, routing.top_k_index, routing.top_k_weights)
    assert_close(actual, expert_sum(module.experts, latent, routing.top_k_index, routing.top_k_weights))


# ---- what is counted ------------------------------------------------------------------------------------------------


def balances(model: nn.Module) -> list[Any]:
    return [module.balance for module in model.modules() if isinstance(module, KimiK3TopKRouter)]


def test_training_forwards_count_every_token_once() -> None:
    model = tiny_model().train()
    ids = random_ids(model.config, 2, 9)
    for _ in range(3):
        model(ids)
    for balance in balances(model):
        assert int(balance.tokens) == 3 * 18
        assert int(balance.loads.sum()) == 3 * 18 * 2
        assert (balance.counts.sum(1) == 3 * 18).all()


def test_nothing_is_counted_outside_training() -> None:
    """S33: neither in eval mode, nor without gradients."""
    model = tiny_model()
    ids = random_ids(model.config, 2, 9)
    model(ids)
    with torch.no_grad():
        model.train()(ids)
    assert all(balance._flat is None for balance in balances(model))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(side: str) -> None:
    model = tiny_model().train()
    ids = random_ids(model.config, 2, 9)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :4] = 0
    else:
        mask[0, 5:] = 0
    model(ids, attention_mask=mask)
    padded = [(int(b.tokens), b.loads.clone()) for b in balances(model)]
    for balance in balances(model):
        balance.reset()
    row = ids[:1, 4:] if side == "left" else ids[:1, :5]
    model(row)
    model(ids[1:])
    for (tokens, loads), balance in zip(padded, balances(model), strict=True):
        assert tokens == int(balance.tokens) == 14
        assert torch.equal(loads, balance.loads)


def test_counting_does_not_change_the_result() -> None:
    model = tiny_model().train()
    ids = random_ids(model.config)
    training = model.model(ids).last_hidden_state
    assert max_error(model.eval().model(ids).last_hidden_state, training) == 0


def test_experts_keep_to_their_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another copy of the code, as folders bring their own, registers its functions under the same names."""
    model = tiny_model(experts_implementation="auto").eval()
    ids = random_ids(model.config)
    expected = model(ids).logits
    for name in ("auto", "deltalatent"):  # put back at the end
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, ALL_EXPERTS_FUNCTIONS[name])
    spec = importlib.util.spec_from_file_location("another_copy", experts_backends.__file__)
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    calls = []
    another.EXPERTS_FUNCTIONS["auto"] = lambda *arguments: calls.append(arguments)
    another.register_experts_backends()
    assert torch.equal(model(ids).logits, expected)
    assert not calls
    ALL_EXPERTS_FUNCTIONS["auto"](object(), *expected)  # experts of neither: whoever came last
    assert calls
