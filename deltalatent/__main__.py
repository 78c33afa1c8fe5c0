# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m deltalatent sizes` prints the ready-made sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from deltalatent.configuration.sizes import sizes_table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; `arguments` default to those of the process."""
    parser = argparse.ArgumentParser(prog="python -m deltalatent", description="Tools of deltalatent.")
    commands = parser.add_subparsers(dest="command", required=True)
    sizes = commands.add_parser("sizes", help="print the ready-made sizes and how many parameters they have")
    sizes.set_defaults(run=lambda options: print(sizes_table()))
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
