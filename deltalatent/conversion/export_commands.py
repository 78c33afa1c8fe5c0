# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`deltalatent export-remote-code`, `export-serving` and `check-serving`: command lines of the functions so called."""

from __future__ import annotations

import argparse
import sys
from os.path import expanduser
from typing import Any

from deltalatent.conversion.command import add_vision_from, summary


def add_to(commands: Any) -> None:
    """Add the commands to the subparsers of the command line."""
    remote = commands.add_parser(
        "export-remote-code",
        help="put the model's code into its folder, so that Transformers alone can load it",
        description="Put the code of the model, its processor and tokenizer into their folder: "
        "`from_pretrained(folder, trust_remote_code=True)` then needs torch and Transformers only, with Pillow for "
        "images. Weights and vocabulary stay as they are.",
    )
    remote.add_argument("folder", type=expanduser, help="folder that `save_pretrained` wrote")
    remote.set_defaults(run=_export_remote_code)

    serving = commands.add_parser(
        "export-serving",
        help="write the composite layout that servers read, or say which field they cannot represent",
        description="Write the composite layout that servers read. The source is only read; the target appears when "
        "it is complete.",
    )
    serving.add_argument("source", type=expanduser, help="folder with a model and its tokenizer")
    serving.add_argument("target", type=expanduser, help="folder to be made; nothing is overwritten")
    serving.add_argument(
        "--experts",
        choices=("as-is", "bfloat16", "mxfp4"),
        default="as-is",
        help="pack the routed experts to four bits, as released (mxfp4), or unpack them; default: leave them",
    )
    add_vision_from(serving)
    serving.add_argument("--quiet", action="store_true", help="no progress bar")
    serving.set_defaults(run=_export_serving)

    check = commands.add_parser("check-serving", help="compare a folder with what servers read")
    check.add_argument("folder", type=expanduser, help="folder in the composite layout")
    check.set_defaults(run=_check_serving)


def _export_remote_code(options: argparse.Namespace) -> None:
    from deltalatent.conversion.export_remote_code import export_remote_code

    written = export_remote_code(options.folder)
    sources = [file for file in written if file.suffix == ".py"]
    described = ", ".join(file.name for file in written if file not in sources)
    print(f"{options.folder}: {len(sources)} source files, and `auto_map` in {described}")


def _export_serving(options: argparse.Namespace) -> None:
    from deltalatent.conversion.serving import export_serving

    report = export_serving(
        options.source,
        options.target,
        experts=options.experts,
        vision_from=options.vision_from,
        progress=not options.quiet and sys.stderr.isatty(),
    )
    print(summary(report.to_dict()))


def _check_serving(options: argparse.Namespace) -> None:
    from deltalatent.conversion.serving import check_serving

    checked = check_serving(options.folder)
    count = f"{len(checked.text)} tensors of the text model, {len(checked.vision)} others"
    print(f"{options.folder}: {count}, as servers read")
