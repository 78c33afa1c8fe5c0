# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What turns text and media into tensors, and back."""
