# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Time the operators of `registry.py` on this machine, side by side with their peers, in one process.

    python -m benchmarks.run --op kda --op short_conv --out benchmarks/results/operators.json
    python -m benchmarks.run --plot benchmarks/results/operators.json

An operator is timed only after its tests have passed on this very machine; otherwise it is refused, and the command
fails. The command runs them itself, or reads the JUnit report of a run that has just been made (`--report`). The
result is a JSON file with the device, the driver, the versions, the ceilings measured in the same run, the outcome of
the tests, and for every shape, implementation and pass the median time, the peak memory beyond the inputs, and the
share of the floor. Decode steps, whose eager time is mostly the host's, are also replayed from a CUDA graph. An
implementation that cannot run a shape is recorded with its error.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib.metadata
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import FORWARD, OPERATORS, Case, Operator, Work

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core")
WARMUP_MS, REPEAT_MS = 20, 100
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TestsFailedError(RuntimeError):
    """The tests of an operator do not pass on this machine, so that its speed means nothing."""


@functools.cache
def check_tests(files: tuple[str, ...], report: Path | None = None) -> dict[str, int]:
    """Run the tests of an operator in a process of their own, once, or read the JUnit report of a run on this machine.

    Returns:
        How many passed and were skipped.

    Raises:
        TestsFailedError: a test fails, or none of a file has passed (skipped tests prove nothing).
    """
    output, status = "", 0
    with tempfile.TemporaryDirectory() as folder:
        if report is None:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            output, status = f"{done.stdout[-2000:]}{done.stderr[-1000:]}", done.returncode
        counts = count_tests(report, files)
    if status != 0 or counts["failed"] or not counts["passed"]:
        raise TestsFailedError(
            f"the tests {', '.join(files)} must pass on this machine, got {counts} and exit status {status}: "
            f"repair them first.\n{output}"
        )
    return {"passed": counts["passed"], "skipped": counts["skipped"]}


def count_tests(report: Path, files: tuple[str, ...]) -> dict[str, int]:
    """Outcomes of the tests of some files in a JUnit report; those of a file that is not in it count as failed."""
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    for file in files:
        of_file = [case for case in cases if case.get("classname", "").split(".")[-1] == Path(file).stem]
        for case in of_file:
            tags = {child.tag for child in case}
            counts["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
        counts["failed"] += not of_file
    return counts


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call: device events with a cold L2 cache on a GPU, the wall clock on a CPU."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=WARMUP_MS, rep=REPEAT_MS, quantiles=[0.5])
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < REPEAT_MS and len(times) < 20):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def graph_milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a call replayed from a CUDA graph: without the host, and with what fits in a warm L2 cache."""
    from triton.testing import do_bench_cudagraph

    with torch.no_grad():
        return do_bench_cudagraph(call, rep=REPEAT_MS, quantiles=[0.5])


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """Copy bandwidth (bytes read and written per second) and rate of a large bf16 matrix product (per second)."""
    size, width = (2**31, 8192) if device.type == "cuda" else (2**24, 512)
    source, target = (torch.randint(255, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    copy_ms = milliseconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = milliseconds(lambda: a @ b, device)
    return {"bytes_per_s": 2e3 * size / copy_ms, "flops_per_s": 2e3 * width**3 / product_ms}


def floor_ms(work: Work, mode: str, ceilings: dict[str, float]) -> float:
    """The least time of a pass: bytes or operations, whichever takes longer; a backward pass adds to its forward."""

    def least(moved: float, done: float) -> float:
        return 1e3 * max(moved / ceilings["bytes_per_s"], done / ceilings["flops_per_s"])

    forward = least(work.forward_bytes, work.forward_flops)
    return forward if mode == FORWARD else forward + least(work.backward_bytes, work.backward_flops)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds."""

    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_call(run: Callable[[Case], Any], case: Case, mode: str) -> Callable[[], Any]:
    """The function to time: `run` alone without gradients, or with those of all differentiable inputs."""
    leaves = case.leaves()
    for leaf in leaves:
        leaf.requires_grad_(mode != FORWARD)
    if mode == FORWARD:

        def forward() -> Any:
            with torch.no_grad():
                return run(case)

        return forward
    # Gradients of unit size arrive from above; made once, they are not part of the time.
    upstream = [torch.randn_like(output) for output in run(case)]
    return lambda: torch.autograd.grad(run(case), leaves, upstream)


def time_implementation(
    run: Callable[[Case], Any], case: Case, mode: str, device: torch.device, seconds: int
) -> dict[str, float | str]:
    """Median milliseconds, seconds of the first call (compilation), and peak bytes beyond what was there before."""
    try:
        with time_limit(seconds):
            return _time_implementation(run, case, mode, device)
    except Exception as error:  # a peer may be absent, out of memory, refuse the shape or compile for too long
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def _time_implementation(
    run: Callable[[Case], Any], case: Case, mode: str, device: torch.device
) -> dict[str, float | str]:
    start = time.perf_counter()
    call = make_call(run, case, mode)
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    result: dict[str, float | str] = {"first_call_s": time.perf_counter() - start}
    if device.type == "cuda":
        gc.collect()  # what compiling left behind may hold results of the first call
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    result["ms"] = milliseconds(call, device)
    if device.type == "cuda" and not case.differentiable:
        result["graph_ms"] = graph_milliseconds(call)
    return result


def time_operator(
    name: str,
    operator: Operator,
    shapes: dict[str, Any],
    implementations: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    ceilings: dict[str, float],
    seconds: int,
) -> list[dict[str, Any]]:
    """One record for every shape, pass and implementation."""
    records = []
    for shape, dims in shapes.items():
        case = operator.make(dims, dtype, device)
        for mode in operator.modes:
            floor = floor_ms(operator.work(dims, dtype.itemsize), mode, ceilings)
            for implementation, run in operator.implementations.items():
                if implementation not in implementations:
                    continue
                record: dict[str, Any] = {"op": name, "shape": shape, "dims": dict(dims), "dtype": str(dtype)}
                record |= {"mode": mode, "impl": implementation, "floor_ms": floor}
                record |= time_implementation(run, case, mode, device, seconds)
                if "ms" in record:
                    record["share_of_floor"] = floor / record["ms"]
                records.append(record)
                print(describe(record), flush=True)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        del case
    return records


def describe(record: dict[str, Any]) -> str:
    """One line of the table."""
    where = f"{record['op']:<16} {record['shape']:<22} {record['mode']:<17} {record['impl']:<14}"
    if "error" in record:
        return f"{where} {record['error']}"
    memory = f"{record['peak_bytes'] / 2**20:9.0f} MiB" if "peak_bytes" in record else ""
    graph = f"  {record['graph_ms']:.4f} ms in a graph" if "graph_ms" in record else ""
    return f"{where} {record['ms']:9.4f} ms  {record['share_of_floor']:6.1%} of the floor {memory}{graph}"


def _output_of(command: Sequence[str]) -> str:
    """First line that a command prints, or "unknown" if it cannot."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, commit and date."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["torch"] = torch.__version__  # with its build, as in 2.11.0+cu130
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": platform.processor() or platform.machine(),
        "commit": _output_of(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
        "versions": versions,
    }
    if device.type == "cuda":
        about["device"] = torch.cuda.get_device_name(device)
        about["cuda"] = torch.version.cuda or torch.version.hip
        about["driver"] = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return about


def write(report: dict[str, Any], out: Path | None) -> None:
    """Save what there is so far: a run that is stopped keeps the shapes it has finished."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


def plot(source: Path) -> Path:
    """Draw time and share of the floor of every record of a result file, beside it as PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("`--plot` needs matplotlib: `pip install deltalatent[train]`.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    report = json.loads(source.read_text())
    records = [record for record in report["results"] if "ms" in record]
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        group = f"{record['op']} {record['shape']}\n{record['mode']}"
        groups.setdefault(group, {})[record["impl"]] = record
    implementations = list(dict.fromkeys(record["impl"] for record in records))
    figure, (times, shares) = pyplot.subplots(
        1, 2, figsize=(13, 1.2 + 0.55 * len(groups)), sharey=True, layout="constrained"
    )
    height = 0.8 / len(implementations)
    for i, implementation in enumerate(implementations):
        rows = [row for row, group in enumerate(groups.values()) if implementation in group]
        entries = [group[implementation] for group in groups.values() if implementation in group]
        places = [row + (i + 0.5) * height - 0.4 for row in rows]
        times.barh(places, [entry["ms"] for entry in entries], height, label=implementation)
        shares.barh(places, [100 * entry["share_of_floor"] for entry in entries], height, label=implementation)
    times.set_xscale("log")
    times.set_xlabel("median time in ms (logarithmic)")
    times.set_yticks(range(len(groups)), groups.keys(), fontsize=7)
    times.invert_yaxis()
    shares.set_xlabel("floor / time in %")
    shares.axvline(100, color="black", linewidth=0.8)
    shares.legend(fontsize=8)
    figure.suptitle(f"{report['environment']['device']}, {report['environment']['date'][:10]}", fontsize=10)
    target = source.with_suffix(".png")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return target


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--op", action="append", help="operator or beginning of its name; repeatable (default: all)")
    parser.add_argument("--shape", action="append", help="name of a shape; repeatable (default: all)")
    parser.add_argument("--impl", action="append", help="implementation; repeatable (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the activations (default: bfloat16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--seconds", type=int, default=300, help="time limit of one measurement (default: 300)")
    parser.add_argument("--out", type=Path, help="result file (default: only print)")
    parser.add_argument("--report", type=Path, help="JUnit report of the tests, run on this machine just now")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw this result file")
    options = parser.parse_args(arguments)
    options.ops = [name for name in OPERATORS if not options.op or name.startswith(tuple(options.op))]
    if not options.ops:
        parser.error(f"--op must be the beginning of one of {', '.join(OPERATORS)}, got {', '.join(options.op)}")
    for asked, name, known in (
        (options.shape, "--shape", {shape for op in options.ops for shape in OPERATORS[op].shapes}),
        (options.impl, "--impl", {impl for op in options.ops for impl in OPERATORS[op].implementations}),
    ):
        unknown = sorted(set(asked or ()) - known)
        if unknown:
            parser.error(f"{name} must be one of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if an operator was refused."""
    options = parse(arguments)
    if options.plot:
        print(plot(options.plot))
        return 0
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    torch.manual_seed(0)
    ceilings = measure_ceilings(device)
    report: dict[str, Any] = {"environment": environment(device), "ceilings": ceilings, "tests": {}, "results": []}
    print(f"{report['environment']['device']}: {ceilings['bytes_per_s'] / 1e12:.2f} TB/s copied, ", end="")
    print(f"{ceilings['flops_per_s'] / 1e12:.0f} TFLOP/s in a bf16 matrix product")
    refused = False
    for name in options.ops:
        operator = OPERATORS[name]
        try:
            report["tests"][name] = check_tests(operator.tests, options.report)
        except TestsFailedError as error:
            print(f"{name} is not timed: {error}", file=sys.stderr)
            report["tests"][name] = {"refused": str(error).splitlines()[0]}
            refused = True
            write(report, options.out)
            continue
        shapes = {name: dims for name, dims in operator.shapes.items() if name in (options.shape or operator.shapes)}
        implementations = options.impl or list(operator.implementations)
        for shape, dims in shapes.items():
            one = {shape: dims}
            report["results"] += time_operator(
                name, operator, one, implementations, dtype, device, ceilings, options.seconds
            )
            write(report, options.out)
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
