# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Hybrid delta-attention / latent-attention / latent-MoE models for Hugging Face Transformers.

Importing the package makes the Auto classes of Transformers know its models:

    import deltalatent
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
"""

from typing import TYPE_CHECKING, Any

from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_vision_available

from deltalatent.configuration import auto
from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig
from deltalatent.configuration.sizes import SIZES, count_parameters, size_config
from deltalatent.conversion import mapping
from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3PreTrainedModel, KimiK3TextModel
from deltalatent.modeling.multimodal import KimiK3ForConditionalGeneration, KimiK3Model
from deltalatent.modeling.sequence_classification import KimiK3ForSequenceClassification
from deltalatent.modeling.vision_tower import KimiK3VisionModel
from deltalatent.processing import tokenization_kimi_k3
from deltalatent.processing.image_processing_kimi_k3 import KimiK3ImageProcessor, KimiK3ImageProcessorPil
from deltalatent.processing.processing_kimi_k3 import KimiK3Processor

if TYPE_CHECKING:
    from deltalatent.training import lora_targets

__version__ = "0.1.0"


def register() -> None:
    """Register configurations, models and the tensor layout with Transformers; calling it again changes nothing."""
    auto.register()
    AutoModel.register(KimiK3TextConfig, KimiK3TextModel, exist_ok=True)
    AutoModel.register(KimiK3Config, KimiK3Model, exist_ok=True)
    AutoModel.register(KimiK3VisionConfig, KimiK3VisionModel, exist_ok=True)
    AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3ForCausalLM, exist_ok=True)
    # `register` refuses it because the class is configured by the text part, which the Auto class then hands over.
    AutoModelForCausalLM._model_mapping.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)  # type: ignore[arg-type]
    # Nor does it enter this table of names, by which the Trainer tells language models: without an entry
    # `label_smoothing_factor` compares the logits at a token with that token, not with the next.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(
        {
            KimiK3TextConfig.model_type: KimiK3ForCausalLM.__name__,
            KimiK3Config.model_type: KimiK3ForConditionalGeneration.__name__,
        }
    )
    AutoModelForSequenceClassification.register(KimiK3TextConfig, KimiK3ForSequenceClassification, exist_ok=True)
    for multimodal in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
        multimodal.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
    mapping.register()
    tokenization_kimi_k3.register()
    AutoProcessor.register(KimiK3Config, KimiK3Processor, exist_ok=True)
    if is_vision_available():  # Pillow
        backends: dict[str, type] = {"torchvision": KimiK3ImageProcessor, "pil": KimiK3ImageProcessorPil}
        AutoImageProcessor.register(KimiK3Config, image_processor_classes=backends, exist_ok=True)


def __getattr__(name: str) -> Any:
    """`lora_targets`, on first use: importing what drives training takes as long as importing the models."""
    if name != "lora_targets":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deltalatent.training import lora_targets

    return lora_targets


register()

__all__ = [
    "SIZES",
    "KimiK3Config",
    "KimiK3ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3ForSequenceClassification",
    "KimiK3ImageProcessor",
    "KimiK3Model",
    "KimiK3PreTrainedModel",
    "KimiK3Processor",
    "KimiK3TextConfig",
    "KimiK3TextModel",
    "KimiK3VisionConfig",
    "KimiK3VisionModel",
    "count_parameters",
    "lora_targets",
    "register",
    "size_config",
]
