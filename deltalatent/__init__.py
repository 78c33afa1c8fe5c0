# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Hybrid delta-attention / latent-attention / latent-MoE models for Hugging Face Transformers.

Importing the package makes the Auto classes of Transformers know its models:

    import deltalatent
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
"""

from transformers import AutoModel, AutoModelForCausalLM

from deltalatent.configuration import auto
from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig
from deltalatent.configuration.sizes import SIZES, count_parameters, size_config
from deltalatent.conversion import mapping
from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3PreTrainedModel, KimiK3TextModel

__version__ = "0.1.0"


def register() -> None:
    """Register configurations, models and the tensor layout with Transformers; calling it again changes nothing."""
    auto.register()
    AutoModel.register(KimiK3TextConfig, KimiK3TextModel, exist_ok=True)
    AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3ForCausalLM, exist_ok=True)
    mapping.register()


register()

__all__ = [
    "SIZES",
    "KimiK3Config",
    "KimiK3ForCausalLM",
    "KimiK3PreTrainedModel",
    "KimiK3TextConfig",
    "KimiK3TextModel",
    "KimiK3VisionConfig",
    "count_parameters",
    "register",
    "size_config",
]
