# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the kernels run that are written for Hopper alone, in Gluon, Triton's language of explicit layouts."""

import logging

import triton

logger = logging.getLogger(__name__)

GLUON_TRITON = "3.6."
"""Versions of Triton whose Gluon they are written in: the language still changes from one to the next."""


def hopper_kernels_run(operator: str, capability: tuple[int, int]) -> bool:
    """Whether the kernels for Hopper run on a GPU of this compute capability; logs if only the Triton for it lacks."""
    if capability != (9, 0):
        return False
    if not triton.__version__.startswith(GLUON_TRITON):
        logger.info(
            "%s: the kernel for Hopper is written for Triton %sx, found %s: the portable one runs",
            operator,
            GLUON_TRITON,
            triton.__version__,
        )
        return False
    return True
