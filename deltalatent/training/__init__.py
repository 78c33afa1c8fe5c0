# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Training: load balancing of the routed experts, the optimizer, what LoRA adapts, and resuming."""

from deltalatent.modeling.quantile_balancing import sign_rule_next_bias
from deltalatent.training.balancing import (
    BalancedRouter,
    BalanceReport,
    QuantileBalancingCallback,
    balanced_routers,
    freeze_selection_bias,
    load_selection_bias,
    register_quantile_balancing,
    save_selection_bias,
    update_selection_bias,
)
from deltalatent.training.cuda_graph_trainer import CudaGraphTrainer
from deltalatent.training.distributed import keep_float32
from deltalatent.training.footprint import Footprint, footprint
from deltalatent.training.lora import LoraTargets, lora_targets
from deltalatent.training.model_card import write_model_card
from deltalatent.training.optimizer import MuonAdamW, newton_schulz, parameter_groups
from deltalatent.training.resuming import check_checkpoint, last_complete_checkpoint

__all__ = [
    "BalanceReport",
    "BalancedRouter",
    "CudaGraphTrainer",
    "Footprint",
    "LoraTargets",
    "MuonAdamW",
    "QuantileBalancingCallback",
    "balanced_routers",
    "check_checkpoint",
    "footprint",
    "freeze_selection_bias",
    "keep_float32",
    "last_complete_checkpoint",
    "load_selection_bias",
    "lora_targets",
    "newton_schulz",
    "parameter_groups",
    "register_quantile_balancing",
    "save_selection_bias",
    "sign_rule_next_bias",
    "update_selection_bias",
    "write_model_card",
]
