# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What one rank holds, sends and computes, for any number of ranks: plans for models that fit no machine at hand.

The layout is that of `DistributedConfig`: experts are spread over `ep_size` ranks and, like everything else over
`fsdp_size` ranks, cut along their first axis by FSDP2 over the `fsdp_size / ep_size` ranks that hold the same experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from deltalatent.configuration.sizes import count_parameters
from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM

__all__ = ["Footprint", "footprint"]

OPTIMIZER_STATES = {"adamw": 2, "muon": 1}
"""Values of state per element of a matrix that the optimizer steps; `MuonAdamW` keeps two for the rest."""


@dataclass(frozen=True)
class Footprint:
    """Of rank 0, which has no less than the others. Bytes; what is per step is for one forward and backward.

    Attributes:
        parameters, gradients, optimizer: Held all the time (gradients between backward and step). Activations come on
            top, and are not counted.
        gathered: Whole parameters at the worst moment: the largest layer twice (the next one is on its way), and what
            FSDP2 keeps whole from forward to backward (norm and head).
        all_gather, reduce_scatter: Received by FSDP2 per step: parameters in forward and again in backward; gradients.
        all_to_all: Sent to the experts' ranks and back per step, forward and backward, with balanced experts.
        flops: Model FLOPs of this rank's tokens per step, forward and backward, without recomputation.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    all_gather: int
    reduce_scatter: int
    all_to_all: int
    flops: float

    @property
    def held(self) -> int:
        """Parameters, gradients, optimizer state and gathered parameters together."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


def footprint(
    config: KimiK3TextConfig | KimiK3Config,
    *,
    fsdp_size: int = 1,
    ep_size: int = 1,
    tokens: int = 8192,
    context: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: str = "adamw",
) -> Footprint:
    """Plan one rank of `DistributedConfig(fsdp_size=fsdp_size, ep_size=ep_size)`, without building the model.

    Args:
        config: The model; of one with images, the text model in it.
        fsdp_size: Ranks, each with a batch of its own, that share all parameters. 1 or more.
        ep_size: Ranks among them that share the experts; divides `fsdp_size` and the number of experts.
        tokens: Tokens of this rank per step (all micro-batches).
        context: Length of their sequences, for attention; `tokens` if not given.
        dtype: Of the weights and gradients; what the model keeps in float32 is counted as float32.
        optimizer: `"adamw"`, or `"muon"` for `MuonAdamW`; its state is float32 for `"muon"` and of `dtype` for
            `"adamw"`, as PyTorch's is.

    Raises:
        ValueError: The sizes do not divide, or the optimizer is unknown.
    """
    config = cast(KimiK3TextConfig, config.get_text_config())
    if fsdp_size < 1 or ep_size < 1 or fsdp_size % ep_size or (ep_size > 1 and (config.num_experts or 0) % ep_size):
        raise ValueError(
            f"`ep_size` must divide `fsdp_size`={fsdp_size} and the {config.num_experts or 0} experts, got {ep_size}: "
            "choose another divisor."
        )
    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"`optimizer` must be one of {sorted(OPTIMIZER_STATES)}, got {optimizer!r}: choose one.")
    with torch.device("meta"):
        model: Any = KimiK3ForCausalLM(config)
    model = model.to(dtype)
    muon: set[int] = set()
    if optimizer == "muon":
        from deltalatent.training.optimizer import parameter_groups

        groups = parameter_groups(model)
        muon = {id(p) for group in groups if group["algorithm"] == "muon" for p in group["params"]}

    held = states = received = reduced = 0
    whole_layers = [0] * config.num_hidden_layers
    kept_whole = 0
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name
        parts = fsdp_size // ep_size if is_expert else fsdp_size
        owners = ep_size if is_expert else 1
        rows = parameter.shape[0] // owners
        row_bytes = parameter[0].numel() * parameter.element_size()
        share = math.ceil(rows / parts) * row_bytes
        held += share
        width = 4 if optimizer == "muon" else parameter.element_size()
        number = OPTIMIZER_STATES["muon" if id(parameter) in muon else "adamw"]
        states += share // parameter.element_size() * width * number
        if parts > 1:
            is_kept = not name.startswith(("model.embed_tokens.", "model.layers."))
            received += (parts - 1) * share * (1 if is_kept else 2)
            # The gradient of the router travels as float32 (`shard_float32_modules`).
            wire = max(4, parameter.element_size()) if name.endswith(".gate.weight") else parameter.element_size()
            reduced += (parts - 1) * share // parameter.element_size() * wire
            if is_kept:
                kept_whole += parts * share
            elif name.startswith("model.layers."):
                whole_layers[int(name.split(".")[2])] += parts * share

    counts = count_parameters(config)
    sparse = config.mlp_layer_types.count("sparse")
    latent = config.routed_expert_hidden_size or config.hidden_size
    values = 4 * sparse * config.num_experts_per_token * latent * tokens  # there and back, forward and backward
    embedding = config.vocab_size * config.hidden_size
    return Footprint(
        parameters=held,
        gradients=held,
        optimizer=states,
        gathered=2 * max(whole_layers) + kept_whole,
        all_gather=received,
        reduce_scatter=reduced,
        all_to_all=round(values * dtype.itemsize * (1 - 1 / ep_size)),
        flops=3
        * tokens
        * (2 * (counts.active - embedding) + _mixing_flops(config, tokens if context is None else context)),
    )


def _mixing_flops(config: KimiK3TextConfig, context: int) -> float:
    """Forward FLOPs per token of attention itself: half a context of scores and values per MLA layer, and three
    products of a vector with the state per KDA head."""
    mla = config.layer_types.count("full_attention")
    kda = config.layer_types.count("linear_attention")
    widths = config.qk_head_dim + config.v_head_dim
    per_mla = 2 * (context / 2) * config.num_attention_heads * widths
    per_kda = 6 * config.linear_num_heads * config.linear_head_dim**2
    return mla * per_mla + kda * per_kda
