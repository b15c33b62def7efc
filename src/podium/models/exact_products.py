# SPDX-License-Identifier: Apache-2.0
"""Makes each row of a matrix product on an x86 CPU the same to the last bit, whatever the number of rows.

On x86 torch multiplies with Intel's MKL. It takes other kernels for few rows than for many (below 16 with AVX-512, up
to hundreds with AVX2), and these add up in another order. In its strict mode of numerical reproducibility it does not,
at almost the same speed. OpenBLAS, with which torch is built for ARM, needs no such mode."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)
# Of MKL's interface: nothing has been chosen; the instructions that it would take by itself; strict mode.
_OFF, _AUTO, _STRICT = 0x1, 0x2, 0x10000
_WHOLE_SETTING = -1


@functools.cache
def make_products_exact() -> bool:
    """Whether rows of products do not depend on their number from now on, in this process. MKL has to be told before it
    multiplies for the first time; where that is too late, a warning is logged. What the environment's MKL_CBWR says is
    kept."""
    if not torch.backends.mkl.is_available():
        return True
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        mkl = ctypes.CDLL(str(library))
        choose, setting = mkl.mkl_serv_cbwr_set, mkl.mkl_serv_cbwr_get
    except (OSError, AttributeError) as error:
        _LOG.warning("%s MKL's strict mode is not to be found: %s", _CONSEQUENCE, error)
        return False
    if setting(_WHOLE_SETTING) == _OFF:
        choose(_AUTO | _STRICT)
    is_strict = bool(setting(_WHOLE_SETTING) & _STRICT)
    if not is_strict:
        _LOG.warning(
            "%s MKL is not in strict mode: it has multiplied in this process before, or MKL_CBWR or the processor rule "
            "that mode out. Set MKL_CBWR=AUTO,STRICT in the environment.",
            _CONSEQUENCE,
        )
    return is_strict


_CONSEQUENCE = "The last bits of a token's log-prob will depend on how many tokens are computed with it."
