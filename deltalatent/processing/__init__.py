# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What turns text and media into tensors, and back."""

from deltalatent.processing.chat_template import CHAT_TEMPLATE, IMAGE_PLACEHOLDER, STRUCTURE_TOKENS, VIDEO_PLACEHOLDER
from deltalatent.processing.processing_kimi_k3 import MEDIA_TOKENS

__all__ = ["CHAT_TEMPLATE", "IMAGE_PLACEHOLDER", "MEDIA_TOKENS", "STRUCTURE_TOKENS", "VIDEO_PLACEHOLDER"]
