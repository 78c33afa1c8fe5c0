# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What `footprint` takes for a configuration; its figures are tested in tests/distributed/test_footprint.py."""

from __future__ import annotations

from deltalatent import KimiK3Config
from deltalatent.training import footprint
from tests.testing_common import tiny_config


def test_a_composite_model_is_planned_by_its_text_part() -> None:
    """`model.config` of a model with images failed for want of `num_hidden_layers`."""
    text = tiny_config()
    layout = {"fsdp_size": 2, "ep_size": 2, "tokens": 64}
    assert footprint(KimiK3Config(text_config=text.to_dict()), **layout) == footprint(text, **layout)
