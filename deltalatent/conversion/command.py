# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`deltalatent convert`: the command line of `deltalatent.conversion.convert`."""

from __future__ import annotations

import argparse
import json
import sys
from os.path import expanduser
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint folder: layouts, text or composite, MXFP4, fewer layers or experts",
        description="Convert a checkpoint folder. The source is only read; the target appears when it is complete. A "
        "conversion that was interrupted continues when the same command runs again.",
    )
    parser.add_argument("source", type=expanduser, help="folder with config.json and safetensors files")
    parser.add_argument("target", type=expanduser, help="folder to be made; nothing is overwritten")
    parser.add_argument(
        "--to",
        choices=("same", "text", "composite", "predecessor"),
        default="same",
        help="layout of the target: the text model alone, the text model behind `language_model.` as servers read it, "
        "the predecessor's (`kimi_linear`), or that of the source (default)",
    )
    parser.add_argument(
        "--experts",
        choices=("as-is", "bfloat16", "mxfp4"),
        default="as-is",
        help="pack the routed experts to four bits (mxfp4) or unpack them (bfloat16); default: leave them",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N layers")
    parser.add_argument("--keep-experts", type=int, metavar="N", help="keep the N most used experts of each layer")
    parser.add_argument(
        "--usage",
        type=expanduser,
        metavar="FILE",
        help="how often tokens chose each expert: layer -> counts (.json, .safetensors)",
    )
    add_vision_from(parser)
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="bytes per file (default: 5GB)")
    parser.add_argument("--dry-run", action="store_true", help="check and plan only, write nothing")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def add_vision_from(parser: argparse.ArgumentParser) -> None:
    """Add `--vision-from` to a command that writes composites."""
    parser.add_argument(
        "--vision-from",
        type=expanduser,
        metavar="FOLDER",
        help="composite whose vision part completes a text model",
    )


def run(options: argparse.Namespace) -> None:
    """Convert and print what was done."""
    from deltalatent.conversion import convert

    report = convert(
        options.source,
        options.target,
        to=options.to,
        experts=options.experts,
        layers=options.layers,
        keep_experts=options.keep_experts,
        usage=options.usage,
        vision_from=options.vision_from,
        max_shard_size=options.max_shard_size,
        dry_run=options.dry_run,
        progress=not options.quiet and sys.stderr.isatty(),
    )
    content = report.to_dict()
    print(json.dumps(content, indent=2) if options.json else summary(content))


def summary(report: dict[str, Any]) -> str:
    """A few lines for people, of what `ConversionReport.to_dict` returns."""
    left_out = ", ".join(f"{count} of {reason}" for reason, count in report["tensors_left_out"].items())
    files = "1 file" if report["shards"] == 1 else f"{report['shards']} files"
    lines = [
        f"{report['source']} ({report['source_kind']}) -> {report['target']} ({report['target_kind']})"
        + (", dry run: nothing is written" if report["dry_run"] else ""),
        f"tensors: {report['tensors_read']} read, {report['tensors_written']} written"
        + (f", left out: {left_out}" if left_out else ""),
        f"weights: {report['parameters']:,} numbers, {report['total_bytes']:,} bytes in {files} ("
        + ", ".join(f"{count} {dtype}" for dtype, count in report["dtypes"].items())
        + ")",
    ]
    if report["experts"]:
        shares = [entry["share_of_choices"] for entry in report["experts"].values()]
        kept = report["options"]["keep_experts"]
        lines.append(
            f"experts: {kept} per layer kept, which had {min(shares):.1%} to {max(shares):.1%} of all choices"
        )
    for matrix in sorted({row["matrix"] for row in report["packing_error"]}):
        rows = [row for row in report["packing_error"] if row["matrix"] == matrix]
        worst = max(rows, key=lambda row: row["error"])
        mean = sum(row["error"] for row in rows) / len(rows)
        lines.append(
            f"packing: {matrix} error {mean:.1%} (worst {worst['error']:.1%}, layer {worst['layer']}), "
            f"{sum(row['zeros'] for row in rows) / len(rows):.1%} zero"
        )
    lines += [f"note: {note}" for note in report["notes"]]
    return "\n".join(lines)
