# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Peers that tune their kernels at the first call, in seconds instead of minutes.

Triton's autotuner compiles and times one candidate after the other. Compiled side by side, and timed for as long as it
takes to tell them apart, the same candidates are ready before a time limit is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

WARMUP_MS, REPEAT_MS = 4, 16


@contextmanager
def quick_tuning() -> Iterator[None]:
    """Context in which autotuned Triton kernels have all their candidates compiled at once; nothing without Triton."""
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:
        yield
        return
    prune = Autotuner.prune_configs

    def prune_and_compile(tuner: Any, options: dict[str, Any]) -> list[Any]:
        configs = list(prune(tuner, options))
        tuner._do_bench = partial(do_bench, warmup=WARMUP_MS, rep=REPEAT_MS)
        options = {name: value for name, value in options.items() if name != "warmup"}
        # What does not compile is left to the tuner, which passes it over.
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                tuner.fn.warmup(*tuner.nargs.values(), **options, **config.all_kwargs())
        return configs

    Autotuner.prune_configs = prune_and_compile
    try:
        yield
    finally:
        Autotuner.prune_configs = prune
