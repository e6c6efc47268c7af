"""What the tests of Triton kernels share. Import this before `triton`: it decides where the kernels run."""

from kernels.testing.device import DEVICE, INTERPRETED
from kernels.testing.float8 import require_float8
from kernels.testing.guards import Guarded, guarded, guarded_like
from kernels.testing.lazy_pool import lazy_pool
from kernels.testing.tolerance import TOLERANCE, assert_close, relative_error

__all__ = [
    "DEVICE",
    "INTERPRETED",
    "TOLERANCE",
    "Guarded",
    "assert_close",
    "guarded",
    "guarded_like",
    "lazy_pool",
    "relative_error",
    "require_float8",
]
