# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates of an autotuned kernel are compiled together, timed briefly, and only inside the context."""

import pytest

from benchmarks.tuning import REPEAT_MS, quick_tuning

triton = pytest.importorskip("triton")


class Kernel:
    """Stands for a compiled function; records what it is asked to compile."""

    arg_names = ("x",)

    def __init__(self):
        self.compiled = []

    @staticmethod
    def fn(x):
        """The function itself, of which the tuner wants the name."""

    def warmup(self, *arguments, grid, **options):
        self.compiled.append((arguments, grid, options["BLOCK"], options["num_warps"]))


def test_all_candidates_are_compiled_before_one_is_timed():
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.prune_configs
    candidates = [triton.Config({"BLOCK": 16}, num_warps=warps) for warps in (1, 2, 4)]
    kernel = Kernel()
    tuner = Autotuner(kernel, kernel.arg_names, candidates, [], None, None)
    tuner.nargs = {"x": 3}
    launch = {"grid": (7,), "warmup": False}
    with quick_tuning():
        assert tuner.prune_configs(launch) == candidates
    assert kernel.compiled == [((3,), (7,), 16, warps) for warps in (1, 2, 4)]
    assert tuner.do_bench.keywords["rep"] == REPEAT_MS
    assert Autotuner.prune_configs is original
    assert tuner.prune_configs(launch) == candidates and len(kernel.compiled) == 3
