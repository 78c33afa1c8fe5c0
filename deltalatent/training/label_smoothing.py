# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`label_smoothing_factor` of the Trainer, which tells language models from others by a table of class names."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig

__all__ = ["register"]

CAUSAL_LANGUAGE_MODELS = {
    KimiK3TextConfig.model_type: "KimiK3ForCausalLM",
    KimiK3Config.model_type: "KimiK3ForConditionalGeneration",
}


def register() -> None:
    """Enter our language models into the table; calling it again changes nothing.

    `AutoModelForCausalLM.register` does not. Without an entry the Trainer's smoothed loss compares the logits at a
    token with that token instead of the next one, and says nothing. Done by importing `deltalatent.training`.
    """
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(CAUSAL_LANGUAGE_MODELS)
