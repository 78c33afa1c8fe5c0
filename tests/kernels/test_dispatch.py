# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Dispatch: `auto` takes the first that can run and says so once; an explicit name runs or raises."""

import logging

import pytest
import torch

from deltalatent.kernels import dispatch
from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle

CPU = torch.device("cpu")
BUSY = Obstacle("the kernel is away: use 'torch'")


@pytest.fixture(autouse=True)
def fresh_announcements(monkeypatch):
    monkeypatch.setattr(dispatch, "_announced", set())


def test_auto_takes_the_first_that_can_run():
    assert resolve_impl("op", "auto", device=CPU, reasons={"triton": None, "torch": None}) == "triton"
    assert resolve_impl("op", "auto", device=CPU, reasons={"triton": BUSY, "torch": None}) == "torch"


def test_auto_never_takes_third_party_arithmetic():
    assert resolve_impl("op", "auto", device=CPU, reasons={"fla": None, "torch": None}) == "torch"
    assert resolve_impl("op", "fla", device=CPU, reasons={"fla": None, "torch": None}) == "fla"


def test_auto_without_any_candidate_lists_the_reasons():
    with pytest.raises(RuntimeError, match=r"no implementation of op .*triton: the kernel is away"):
        resolve_impl("op", "auto", device=CPU, reasons={"triton": BUSY})


@pytest.mark.parametrize("error", [ValueError, TypeError, ImportError])
def test_explicit_name_raises_with_the_reason(error):
    reasons = {"triton": Obstacle("the kernel is away: use 'torch'", error), "torch": None}
    with pytest.raises(error, match=r"op with impl='triton' cannot run: the kernel is away: use 'torch'\."):
        resolve_impl("op", "triton", device=CPU, reasons=reasons)


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match="`impl` of op must be one of 'auto', 'triton', 'torch', got 'cuda'"):
        resolve_impl("op", "cuda", device=CPU, reasons={"triton": None, "torch": None})


def test_choice_of_auto_is_logged_once_with_what_was_passed_over(caplog):
    caplog.set_level(logging.INFO, logger=dispatch.__name__)
    for _ in range(3):
        resolve_impl("op", "auto", device=CPU, reasons={"triton": BUSY, "torch": None})
    resolve_impl("other", "auto", device=CPU, reasons={"torch": None})
    assert [record.getMessage() for record in caplog.records] == [
        "op: auto chose torch on cpu (triton: the kernel is away: use 'torch')",
        "other: auto chose torch on cpu",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_leaving_an_accelerator_to_plain_pytorch_is_a_warning(caplog):
    resolve_impl("op", "auto", device=torch.device("cuda"), reasons={"triton": BUSY, "torch": None})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_explicit_choice_is_not_logged(caplog):
    caplog.set_level(logging.INFO, logger=dispatch.__name__)
    resolve_impl("op", "torch", device=CPU, reasons={"torch": None})
    assert not caplog.records


def test_choice_compiles_without_graph_break():
    def choose(x):
        reasons = {"triton": triton_obstacle(x.device), "torch": None}
        chosen = resolve_impl("op", "auto", device=x.device, reasons=reasons)
        return x + (1 if chosen == "torch" else 2)

    x = torch.zeros(2)
    assert torch.equal(torch.compile(choose, fullgraph=True, backend="eager")(x), choose(x))


@pytest.fixture
def probe(monkeypatch):
    """The probe without its memory, in an environment of the test's making."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    dispatch._probe_triton.cache_clear()
    yield monkeypatch
    dispatch._probe_triton.cache_clear()


def test_triton_needs_its_package(probe):
    probe.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    obstacle = triton_obstacle(torch.device("cuda", 0))
    assert obstacle.error is ImportError
    assert "pip install deltalatent[kernels]" in obstacle.reason


def test_triton_needs_a_gpu(probe):
    assert "need CUDA tensors, got tensors on 'cpu'" in triton_obstacle(CPU).reason


def test_triton_runs_anywhere_under_its_interpreter(probe):
    probe.setenv("TRITON_INTERPRET", "1")
    assert triton_obstacle(CPU) is None


@pytest.mark.parametrize(("capability", "works"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_triton_needs_compute_capability_8(probe, capability, works):
    probe.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    probe.setattr(torch.version, "hip", None)
    obstacle = triton_obstacle(torch.device("cuda", 0))
    assert (obstacle is None) == works
    if not works:
        assert "need compute capability 8.0, this GPU has 7.5" in obstacle.reason
