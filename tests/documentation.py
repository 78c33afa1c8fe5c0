# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs what a page shows."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A fenced block: its language and its content."""


def run_blocks(page: Path, run_line: Callable[[str], None] | None = None) -> set[str]:
    """Blocks share a namespace, as for a reader who types along; a block of text is what the one before it prints.

    `run_line` runs a line of a bash block, in this process. Returns the languages that occur.
    """
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for language, code in blocks:
        if language == "text":
            assert printed.rstrip() == code.rstrip()
            continue
        assert language in ("python", "bash"), f"what is a block of {language!r}?"
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            if language == "python":
                exec(compile(code, page.name, "exec"), namespace)
            else:
                assert run_line is not None, f"{page.name} has commands"
                for line in code.splitlines():
                    run_line(line)
        printed = output.getvalue()
    return {language for language, _ in blocks}
