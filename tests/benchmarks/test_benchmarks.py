# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's registry builds and runs on a CPU, and nothing whose tests fail is timed."""

import json

import pytest
import torch

from benchmarks import run
from benchmarks.registry import FORWARD, OPERATORS, Operator, Work

CPU = torch.device("cpu")
CEILINGS = {"bytes_per_s": 2e9, "flops_per_s": 4e9}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_runs_in_all_passes(name):
    operator = OPERATORS[name]
    case = operator.make(operator.tiny, torch.float32, CPU)
    for mode in operator.modes:
        results = run.make_call(operator.implementations["torch"], case, mode)()
        assert all(result.isfinite().all() for result in results)
        if mode != FORWARD:
            assert [result.shape for result in results] == [leaf.shape for leaf in case.leaves()]


@pytest.mark.parametrize("name", OPERATORS)
def test_floor_counts_at_least_the_tensors(name):
    """Every input and output, once; the floor of a larger shape is larger."""
    operator = OPERATORS[name]
    case = operator.make(operator.tiny, torch.float32, CPU)
    tensors = [t for value in case.tensors.values() for t in (value if isinstance(value, tuple) else (value,))]
    large = sum(t.numel() * 4 for t in tensors if t is not None and t.dim() > 2 and t.shape[0] == operator.tiny["B"])
    work = operator.work(operator.tiny, 4)
    assert work.forward_bytes >= large
    assert (work.backward_bytes > work.forward_bytes) == (len(operator.modes) == 2)
    for dims in operator.shapes.values():
        assert operator.work(dims, 2).forward_bytes > work.forward_bytes
        assert not dims.get("documents") or dims["T"] % dims["documents"] == 0


def test_floor_is_the_slower_of_bytes_and_operations():
    work = Work(forward_bytes=4e6, forward_flops=4e6, backward_bytes=2e6, backward_flops=8e6)
    assert run.floor_ms(work, FORWARD, CEILINGS) == pytest.approx(2.0)
    assert run.floor_ms(work, "forward+backward", CEILINGS) == pytest.approx(2.0 + 2.0)


def write_test(folder, body):
    file = folder / "test_something.py"
    file.write_text(f"import pytest\n\n\ndef test_it():\n    {body}\n")
    return (str(file),)


@pytest.mark.parametrize("body", ["assert False", "pytest.skip('no GPU')"], ids=["failing", "skipped"])
def test_failing_or_skipped_tests_are_refused(tmp_path, body):
    with pytest.raises(run.TestsFailedError, match=r"the tests .*test_something.py must pass on this machine"):
        run.check_tests(write_test(tmp_path, body))


def test_reports_of_earlier_runs(tmp_path):
    """Counted by file; a file without tests in the report is refused."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.kernels.test_a" name="x"/>'
        '<testcase classname="tests.kernels.test_a" name="y"><skipped/></testcase>'
        '<testcase classname="tests.kernels.test_b" name="z"><failure/></testcase></testsuite></testsuites>'
    )
    assert run.check_tests(("tests/kernels/test_a.py",), report) == {"passed": 1, "skipped": 1}
    for file in ("tests/kernels/test_b.py", "tests/kernels/test_c.py"):
        with pytest.raises(run.TestsFailedError, match="must pass on this machine"):
            run.check_tests(("tests/kernels/test_a.py", file), report)


@pytest.fixture
def one_operator(monkeypatch, tmp_path):
    """A registry of one operator, with a peer that is absent."""

    def absent(case):
        raise ImportError("no such package")

    norm = OPERATORS["gated_rms_norm"]
    operator = Operator(
        tests=write_test(tmp_path, "pass"),
        make=norm.make,
        work=norm.work,
        implementations={"torch": norm.implementations["torch"], "peer": absent},
        shapes={"tiny": norm.tiny},
        tiny=norm.tiny,
    )
    monkeypatch.setattr(run, "OPERATORS", {"norm": operator})
    monkeypatch.setattr(run, "measure_ceilings", lambda device: CEILINGS)
    return operator


def test_report_holds_times_errors_and_surroundings(one_operator, tmp_path, capsys):
    out = tmp_path / "results" / "norm.json"
    assert run.main(["--out", str(out), "--device", "cpu", "--dtype", "float32"]) == 0
    report = json.loads(out.read_text())
    assert report["tests"] == {"norm": {"passed": 1, "skipped": 0}}
    assert report["environment"]["versions"]["torch"] == torch.__version__
    times = [record for record in report["results"] if record["impl"] == "torch"]
    assert [record["mode"] for record in times] == ["forward", "forward+backward"]
    for record in times:
        assert record["ms"] > 0
        assert record["share_of_floor"] == pytest.approx(record["floor_ms"] / record["ms"])
    assert {r["error"] for r in report["results"] if r["impl"] == "peer"} == {"ImportError: no such package"}
    assert "of the floor" in capsys.readouterr().out
    assert run.plot(out).read_bytes().startswith(b"\x89PNG")


def test_refused_operator_is_not_timed_and_fails_the_command(one_operator, tmp_path, monkeypatch, capsys):
    def fail(files, report):
        raise run.TestsFailedError(f"the tests {files} fail")

    monkeypatch.setattr(run, "check_tests", fail)
    monkeypatch.setattr(run, "time_operator", lambda *arguments: pytest.fail("timed all the same"))
    out = tmp_path / "norm.json"
    assert run.main(["--out", str(out), "--device", "cpu"]) == 1
    assert "refused" in json.loads(out.read_text())["tests"]["norm"]
    assert "norm is not timed: the tests" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--op", "nothing"], ["--shape", "nothing"], ["--impl", "nothing"]], ids=str)
def test_unknown_names_list_the_known_ones(arguments, capsys):
    with pytest.raises(SystemExit):
        run.main(arguments)
    assert "must be" in capsys.readouterr().err
