# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Text files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write under another name, then rename, so that nobody ever reads half a file; returns `path`."""
    temporary = path.with_name(path.name + ".incomplete")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path
