# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose config says that their experts are packed as MXFP4, for `from_pretrained`.

The conversion mapping unpacks what it finds packed, so the model in memory is not quantised. If its config still said
so, Transformers would want the package compressed-tensors, and a saved model would claim what is not in its files.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

# Arguments of `from_pretrained` that say where the config is.
LOCATION = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Arguments that are not overrides of fields, although the config has attributes of these names.
NOT_OVERRIDES = ("dtype", "torch_dtype", "quantization_config", "name_or_path")


def is_mxfp4(quantization_config: dict[str, Any] | QuantizationConfigMixin | None) -> bool:
    """Whether a `quantization_config` says: weights packed by compressed-tensors as MXFP4."""
    if isinstance(quantization_config, QuantizationConfigMixin):
        quantization_config = quantization_config.to_dict()
    return quantization_config is not None and (
        quantization_config.get("quant_method") == "compressed-tensors"
        and quantization_config.get("format") == "mxfp4-pack-quantized"
    )


def without_mxfp4_claim(
    config_class: type[PreTrainedConfig], pretrained_model_name_or_path: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of `PreTrainedModel.from_pretrained` that load an MXFP4 checkpoint as an ordinary one.

    For any other checkpoint they are returned as they are; so are those of an adapter's folder, which has no config.

    Args:
        config_class: Of the model.
        pretrained_model_name_or_path: Folder or Hub repository.
        kwargs: What the caller passed; overrides of config fields among them.

    Returns:
        The same, or a copy with a `config` that makes no claim; overrides are then in the config.
    """
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return kwargs | {"config": _unclaimed(config)} if _claims(config) else kwargs
    source = pretrained_model_name_or_path if config is None else config
    if source is None or kwargs.get("gguf_file") is not None:
        return kwargs
    location = {name: kwargs[name] for name in LOCATION if name in kwargs}
    try:
        config = config_class.from_pretrained(source, **location)
    except OSError:
        return kwargs  # no config here: Transformers says what is wrong, or finds the base model of an adapter
    if not _claims(config):
        return kwargs
    overrides = {
        name: value
        for name, value in kwargs.items()
        if hasattr(config, name) and not name.startswith("_") and name not in NOT_OVERRIDES
    }
    config = config_class.from_pretrained(source, **location, **overrides)
    return {name: value for name, value in kwargs.items() if name not in overrides} | {"config": _unclaimed(config)}


def _claims(config: PreTrainedConfig) -> bool:
    return any(is_mxfp4(getattr(part, "quantization_config", None)) for part in (config, config.get_text_config()))


def _unclaimed(config: PreTrainedConfig) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        if is_mxfp4(getattr(part, "quantization_config", None)):
            del part.quantization_config
    return config
