# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Channel mixers: the dense gated MLP, the router, the routed experts, and the latent mixture of experts around them.

Sources: Kimi K3 report (arXiv 2607.24653), DeepSeek-V3 (arXiv 2412.19437, auxiliary-loss-free routing), golden README
"Channel mixers".
Shapes: T tokens (rows and sequence flattened), D model width, Z width in which experts work, I expert width, E
experts, K experts per token.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import use_experts_implementation

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.kernels.experts import GatedUnit, grouped_experts_reference
from deltalatent.kernels.router import choose_experts, router_logits
from deltalatent.kernels.situ import situ_glu
from deltalatent.modeling.experts_backends import EXPERTS_FUNCTIONS, register_experts_backends
from deltalatent.modeling.norms import KimiK3RMSNorm
from deltalatent.modeling.precision import KeepFloat32
from deltalatent.modeling.quantile_balancing import QuantileHistogram

register_experts_backends()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, [..., I]."""
    return F.silu(gate) * up


def situ_caps(config: KimiK3TextConfig) -> dict[str, Any]:
    """The two soft caps of the configured SiTU-GLU, by the names that our operators have for them."""
    return {"beta": config.activation_situ_beta, "linear_beta": config.activation_situ_linear_beta}


def gated_unit_of(config: KimiK3TextConfig) -> GatedUnit:
    """The configured function of two branches [..., I]: SiTU-GLU, or SwiGLU for `hidden_act="silu"`."""
    if config.hidden_act != "situ":
        return swiglu
    return functools.partial(situ_glu, **situ_caps(config))


class KimiK3MLP(nn.Module):
    """`W_down act(W_gate x, W_up x)`, [..., D] -> [..., D]."""

    def __init__(self, config: KimiK3TextConfig, intermediate_size: int) -> None:
        super().__init__()
        self.gated_unit = gated_unit_of(config)
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.gated_unit(self.gate_proj(hidden_states), self.up_proj(hidden_states)))


class RouterOutput(NamedTuple):
    """What the router says of T tokens; everything but `top_k_index` is float32.

    Attributes:
        router_logits: [T, E], before the sigmoid.
        top_k_index: int64 [T, K], chosen experts, in no particular order.
        top_k_weights: [T, K], their weights.
        scores: [T, E], after the sigmoid, without bias.
        cutoff: [T], the (K+1)-th largest score plus bias (-inf if every expert is chosen), no gradient.
    """

    router_logits: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    scores: Tensor
    cutoff: Tensor


class RoutingStatistics(NamedTuple):
    """What quantile balancing counts of one layer: scores [T, E] (detached), cutoff [T], chosen experts [T, K]."""

    scores: Tensor
    cutoff: Tensor
    top_k_index: Tensor


class KimiK3TopKRouter(KeepFloat32):
    r"""Chooses K of E experts for each token.

    .. math::
        s = \sigma(W x), \quad \text{choose the K largest of } s + b, \quad
        w = \lambda\, s_{chosen} / (\textstyle\sum s_{chosen} + 10^{-20})

    The bias b (`e_score_correction_bias`, float32 buffer) decides who is chosen but not the weights; quantile
    balancing writes it between optimizer steps. With expert groups, groups are ranked by the sum of their two best
    biased scores, and only experts of the best `topk_group` groups are eligible. The whole router runs in float32
    whatever the dtype of the model or autocast: in bf16 one token in twenty gets other experts.
    """

    float32_tensors = ("e_score_correction_bias",)
    e_score_correction_bias: Tensor

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.num_experts = config.num_experts or 0
        self.num_expert_group = config.num_expert_group
        self.topk_group = config.topk_group
        self.renormalize = config.moe_renormalize
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(self.num_experts, dtype=torch.float32))
        self.balance = QuantileHistogram(self.num_experts, self.top_k)

    def forward(self, hidden_states: Tensor) -> RouterOutput:
        """[T, D] -> `RouterOutput`."""
        logits = router_logits(hidden_states, self.weight)
        choice = choose_experts(
            logits,
            self.e_score_correction_bias.to(logits.dtype),
            self.top_k,
            renormalize=self.renormalize,
            scaling_factor=self.routed_scaling_factor,
            num_groups=self.num_expert_group,
            top_groups=self.topk_group,
        )
        return RouterOutput(logits, choice.index, choice.weights, choice.scores, choice.cutoff)


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """E gated MLPs in two 3-D parameters, `gate_up_proj` [E, 2I, Z] (gate rows first) and `down_proj` [E, Z, I]."""

    config: KimiK3TextConfig  # set by the decorator
    functions = EXPERTS_FUNCTIONS  # what was registered by other code under these names is not for these experts

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts or 0
        self.hidden_dim = config.routed_expert_hidden_size or config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gated_unit = gated_unit_of(config)
        self.gated_unit_options: dict[str, Any] = {"activation": "silu"}
        """Arguments of `grouped_experts` that say which gated unit this is; our experts backend reads it."""
        if config.hidden_act == "situ":
            self.gated_unit_options = {"activation": "situ"} | situ_caps(config)
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """[..., 2I] -> [..., I]; the experts backends of Transformers call this."""
        return self.gated_unit(*gate_up.chunk(2, dim=-1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts, one expert after the other (`experts_implementation="eager"`).

        Args:
            hidden_states: [T, Z].
            top_k_index: int64 [T, K]. Ids >= E (experts of other ranks under expert parallelism) contribute nothing.
            top_k_weights: [T, K], float32.

        Returns:
            [T, Z] in the dtype of `hidden_states`; products with the weights and the sum are float32.
        """
        return grouped_experts_reference(
            hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights, self.gated_unit
        )


class KimiK3SparseMoE(nn.Module):
    r"""Latent mixture of experts with shared experts.

    .. math::
        z = W_\downarrow x, \quad
        y = W_\uparrow\, \mathrm{RMSNorm}\big(\textstyle\sum_{e \in \mathrm{top}(x)} w_e\, \mathrm{expert}_e(z)\big)
        + \mathrm{shared}(x)

    The router sees the full width. With `routed_expert_hidden_size` null the experts work on x itself and there is no
    projection; with `latent_moe_use_norm` false there is no norm.
    """

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.gate = KimiK3TopKRouter(config)
        self.experts = KimiK3Experts(config)
        self.is_latent = config.routed_expert_hidden_size is not None
        latent = config.routed_expert_hidden_size or config.hidden_size
        if self.is_latent:
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, config.hidden_size, bias=False)
        self.routed_expert_norm = (
            KimiK3RMSNorm(latent, config.rms_norm_eps) if self.is_latent and config.latent_moe_use_norm else None
        )
        self.shared_experts = (
            KimiK3MLP(config, config.num_shared_experts * config.moe_intermediate_size)
            if config.num_shared_experts
            else None
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, RoutingStatistics]:
        """[B, T, D] -> [B, T, D] and what quantile balancing counts."""
        tokens = hidden_states.flatten(0, -2)
        routing = self.gate(tokens)
        routed = self.routed_expert_down_proj(tokens) if self.is_latent else tokens
        routed = self.experts(routed, routing.top_k_index, routing.top_k_weights)
        if self.routed_expert_norm is not None:
            routed = self.routed_expert_norm(routed)
        if self.is_latent:
            routed = self.routed_expert_up_proj(routed)
        output = routed.view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output, RoutingStatistics(routing.scores.detach(), routing.cutoff, routing.top_k_index)
