# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Between the released tensor layout and the model in memory."""
