# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Which configuration class a `config.json` means."""

from __future__ import annotations

import copyreg
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

from deltalatent.configuration.configuration_kimi_k3 import (
    KimiK3Config,
    KimiK3TextConfig,
    KimiK3VisionConfig,
    has_fields_of_this_architecture,
)


class _PredecessorByDefault(type):
    """Class whose attributes, where it does not have its own, are those of `KimiLinearConfig`."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(KimiLinearConfig, name)


class KimiLinearFile(metaclass=_PredecessorByDefault):
    """What `model_type: kimi_linear` stands for: released text folders of this architecture carry the predecessor's
    type.

    Not a configuration but a choice between two: a file with a field that only this architecture has becomes a
    `KimiK3TextConfig`, any other the predecessor's `KimiLinearConfig`, as without this package.
    """

    # `AutoConfig` lets `trust_remote_code=True` win over built-in types only; a predecessor's folder must keep that.
    __module__ = KimiLinearConfig.__module__
    model_type = KimiLinearConfig.model_type

    def __new__(cls, **kwargs) -> KimiLinearConfig:  # type: ignore[misc]
        return KimiLinearConfig(**kwargs)

    @staticmethod
    def from_dict(config_dict: dict[str, Any], **kwargs):
        """Build the configuration that the parsed file means; arguments as in `PreTrainedConfig.from_dict`."""
        is_ours = has_fields_of_this_architecture(config_dict)
        return (KimiK3TextConfig if is_ours else KimiLinearConfig).from_dict(config_dict, **kwargs)


def _kimi_linear_file() -> type[KimiLinearFile]:
    return KimiLinearFile


# Pickle looks a class up by its `__module__`, where this one is not; `CONFIG_MAPPING` must stay picklable.
copyreg.pickle(_PredecessorByDefault, lambda cls: (_kimi_linear_file, ()))


def register() -> None:
    """Make `AutoConfig` know our types, ahead of any that Transformers may ship; calling it again changes nothing."""
    for config_class in (KimiK3Config, KimiK3TextConfig, KimiK3VisionConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    CONFIG_MAPPING.register(KimiLinearFile.model_type, KimiLinearFile, exist_ok=True)  # type: ignore[arg-type]
