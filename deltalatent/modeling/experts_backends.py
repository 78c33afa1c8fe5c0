# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Our ways to compute routed experts, under the names by which Transformers chooses them.

`experts_implementation="deltalatent"`: our Triton kernels, for SiTU-GLU and for any experts of Transformers with
SwiGLU. `experts_implementation="auto"`: these where they can run, else the default of Transformers.

Shapes: T tokens, K experts per token, E experts, Z width in which they work, I their inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from deltalatent.kernels.autocast import is_autocasting
from deltalatent.kernels.dispatch import Obstacle, resolve_impl
from deltalatent.kernels.experts import experts_obstacle, grouped_experts

GROUPED_MM_MULTIPLE = 8
"""Grouped matrix products want rows of a multiple of 16 bytes: 8 half-precision values."""


def deltalatent_experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_implementation="deltalatent"`.

    Args:
        experts: has `gate_up_proj` [E, 2I, Z] and `down_proj` [E, Z, I].
        hidden_states: [T, Z].
        top_k_index: int64 [T, K]. Ids >= E (experts of other ranks under expert parallelism) contribute nothing.
        top_k_weights: [T, K].

    Returns:
        [T, Z] in the dtype of `hidden_states`, computed in that of autocast where it is on, else in the weights'.

    Raises:
        ValueError: Triton cannot run on these tensors, or the experts compute something else.
        TypeError: Triton cannot run in this dtype.
        ImportError: Triton is not installed.
    """
    options = _gated_unit_options(experts)
    if isinstance(options, Obstacle):
        raise options.error(f'`experts_implementation="deltalatent"` cannot run: {options.reason}.')
    dtype = _compute_dtype(experts, hidden_states)
    return _run_triton(experts, hidden_states, top_k_index, top_k_weights, dtype, options)


def _run_triton(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> Tensor:
    x, gate_up, down = (tensor.to(dtype) for tensor in (hidden_states, experts.gate_up_proj, experts.down_proj))
    output = grouped_experts(x, gate_up, down, top_k_index, top_k_weights, **options, impl="triton")
    return output.to(hidden_states.dtype)


def automatic_experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_implementation="auto"`; arguments and result as above. The choice is logged once."""
    dtype = _compute_dtype(experts, hidden_states)
    options = _gated_unit_options(experts)
    reasons = {
        "deltalatent": options if isinstance(options, Obstacle) else experts_obstacle(hidden_states.device, dtype),
        "grouped_mm": _grouped_mm_obstacle(experts.gate_up_proj),
        "eager": None,
    }
    choice = resolve_impl("experts_implementation", "auto", device=hidden_states.device, reasons=reasons)
    if choice == "deltalatent":
        return _run_triton(experts, hidden_states, top_k_index, top_k_weights, dtype, cast(dict[str, Any], options))
    if choice == "eager":  # the forward that the decorator of Transformers has wrapped
        return type(experts).forward.__wrapped__(experts, hidden_states, top_k_index, top_k_weights)
    return ALL_EXPERTS_FUNCTIONS[choice](experts, hidden_states, top_k_index, top_k_weights)


ExpertsFunction = Callable[[Any, Tensor, Tensor, Tensor], Tensor]

EXPERTS_FUNCTIONS: dict[str, ExpertsFunction] = {
    "deltalatent": deltalatent_experts_forward,
    "auto": automatic_experts_forward,
}


def register_experts_backends() -> None:
    """Make both names known to Transformers; once or more often."""
    for name in EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(name, _of_the_same_code(name))


def _of_the_same_code(name: str) -> ExpertsFunction:
    """Transformers has one table for all code in a process: the package, and folders that brought their own. Experts
    of each have as `functions` what was written with them; those of Transformers take ours."""

    def forward(experts: Any, *tensors: Tensor) -> Tensor:
        return getattr(experts, "functions", EXPERTS_FUNCTIONS)[name](experts, *tensors)

    return forward


def _compute_dtype(experts: Any, hidden_states: Tensor) -> torch.dtype:
    device = hidden_states.device
    if is_autocasting(device):
        return torch.get_autocast_dtype(device.type)
    return experts.gate_up_proj.dtype


def _gated_unit_options(experts: Any) -> dict[str, Any] | Obstacle:
    """Arguments of `grouped_experts` that say which gated unit the experts apply, or why it knows none such."""
    if hasattr(experts, "gated_unit_options"):
        return experts.gated_unit_options
    if (
        experts.has_gate
        and experts.is_concatenated
        and not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
        and type(experts)._apply_gate is _default_apply_gate
        and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
    ):
        return {"activation": "silu"}
    name = type(experts).__name__
    return Obstacle(f'it needs SwiGLU experts without bias or norm, gate rows first, got {name}: use "grouped_mm"')


def _grouped_mm_obstacle(gate_up_proj: Tensor) -> Obstacle | None:
    _, rows, width = gate_up_proj.shape
    if rows // 2 % GROUPED_MM_MULTIPLE or width % GROUPED_MM_MULTIPLE:
        return Obstacle(
            f"grouped products need multiples of {GROUPED_MM_MULTIPLE} as widths, got {width}, {rows // 2}"
        )
    if gate_up_proj.dtype == torch.float64:
        return Obstacle("there are no grouped products in float64")
    return None
