# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Speed of the operators against their peers and against what the chip allows: `python -m benchmarks.run --help`."""
