# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The text model with a score for a whole text: reward models and classifiers."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.modeling.modeling_kimi_k3 import KimiK3PreTrainedModel, KimiK3TextModel


class KimiK3ForSequenceClassification(GenericForSequenceClassification, KimiK3PreTrainedModel):
    """The text model with a linear head, `num_labels` scores from the last token of each row.

    The last token is the last one that is not `config.pad_token_id`, so rows may be padded on either side, and a
    batch needs that field. `labels` are classes int64 [B], numbers [B] if `num_labels` is 1, or as
    `config.problem_type` says.

    From a checkpoint of a language model everything but the head, `score`, is loaded, and the head starts at random:
    a reward model begins as `from_pretrained(folder, num_labels=1)`. Of a composite checkpoint it takes the text part.
    """

    trained_later = ("score.",)
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 - what the checkpoint was trained with before

    def __init__(self, config: KimiK3TextConfig) -> None:
        # Not Transformers' own `__init__`, which asks `AutoModel`: it does not know code that came with a folder.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = KimiK3TextModel(config)
        self.score = nn.Linear(config.hidden_size, cast(int, config.num_labels), bias=False)
        self.post_init()


__all__ = ["KimiK3ForSequenceClassification"]
