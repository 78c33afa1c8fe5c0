# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Command line: `deltalatent COMMAND ...`, or `python -m deltalatent COMMAND ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from deltalatent.configuration.sizes import sizes_table
from deltalatent.conversion import command as convert
from deltalatent.conversion import export_commands as export


def add_sizes_to(commands: Any) -> None:
    """Add `sizes` to the subparsers of the command line."""
    parser = commands.add_parser("sizes", help="print the ready-made sizes and how many parameters they have")
    parser.set_defaults(run=lambda options: print(sizes_table()))


COMMANDS = (add_sizes_to, convert.add_to, export.add_to)
"""Each adds a parser to the subparsers that it gets, with a default `run`: a function of the parsed options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; `arguments` default to those of the process. What is wrong is printed, with exit status 1."""
    parser = argparse.ArgumentParser(prog="deltalatent", description="Tools of deltalatent.")
    commands = parser.add_subparsers(dest="command", required=True)
    for add_to in COMMANDS:
        add_to(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (OSError, ValueError) as error:
        parser.exit(1, f"deltalatent {options.command}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"deltalatent {options.command}: interrupted\n")


if __name__ == "__main__":
    main()
