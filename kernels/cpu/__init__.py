"""The half-steps in C (float64.c and exact.c), for CPU tensors."""

import ctypes
import importlib.util
import struct
from typing import Any

import torch  # before the library, which shares torch's OpenMP runtime
from torch import Tensor, get_num_threads

from .. import half_step, reference_exact
from ..half_step import Adjoints, Coefficients, Compared, rows_of
from ..radix import Radix

STATE, RELAX, INVERT = struct.Struct("@Pqdddd5i"), struct.Struct("=5i5Q48x"), struct.Struct("=5i11Q")
"""The structure in common.h, in two parts. The first is packed once per state; the second begins with the number of
threads, and has six pointers more for an inverse, which are otherwise NULL."""
CODE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum dtype of common.h


def load(path: str) -> Any:
    """Load the library. Raises if it is of another version."""
    library = ctypes.CDLL(path)
    for function in (library.revdeq_float64, library.revdeq_exact):
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return library


def found() -> tuple[Any, tuple[str, str]]:
    """The library; or None, why there is none, and what to do about it."""
    try:
        spec = importlib.util.find_spec("revdeq.kernels._cpu")
        if spec is None or spec.origin is None:
            return None, ("the C kernel was not built", "install a C compiler and reinstall revdeq")
        return load(spec.origin), ("", "")
    except (OSError, AttributeError, ValueError) as error:  # built on another machine, or for another version
        openmp = "libgomp" in str(error)  # torch's copy may have another name, as on ARM
        remedy = "install GCC's OpenMP runtime (libgomp1)" if openmp else "reinstall revdeq to build it again"
        return None, (f"the C kernel cannot be loaded ({error})", remedy)


library, trouble = found()


def relax(f_z: Tensor, z: Tensor | None, copy: Tensor, sums: Tensor | None, spill: Tensor | None = None) -> bytes:
    """The second part of the structure, for a half-step."""
    pointers = [0 if x is None else x.data_ptr() for x in (f_z, z, copy, sums, spill)]
    return RELAX.pack(get_num_threads(), 0, CODE[f_z.dtype], CODE[copy.dtype], 0, *pointers)


def invert(
    f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared, spill: Tensor | None = None
) -> bytes:
    """The second part of the structure, for an inverse."""
    types = CODE[f_z.dtype], CODE[copy.dtype], 0 if adjoints[3] is None else CODE[adjoints[3].dtype]
    tensors = f_z, z, copy, None, spill, *adjoints, *(compared or (None, None))
    return INVERT.pack(get_num_threads(), 1, *types, *[0 if x is None else x.data_ptr() for x in tensors])


class HalfStep(half_step.HalfStep):
    def __init__(self, state: Tensor, step: Coefficients) -> None:
        super().__init__(state, step)
        n = state.numel()
        self._packed = STATE.pack(state.data_ptr(), n, step.a, step.b, step.c, 1.0, rows_of(n), 0, 0, 0, 0)

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        library.revdeq_float64(self._packed + relax(f_z, z, copy, partial))

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared) -> None:
        library.revdeq_float64(self._packed + invert(f_z, z, copy, adjoints, compared))


class ExactHalfStep(reference_exact.HalfStep):
    def __init__(self, state: Tensor, step: Radix) -> None:
        super().__init__(state, step)
        n = state.numel()
        integers = rows_of(n), step.sign, step.p, step.d, step.fraction_bits
        self._packed = STATE.pack(state.data_ptr(), n, step.a, step.b, step.c, step.gamma, *integers)

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        spill = self._spill()
        if library.revdeq_exact(self._packed + relax(f_z, z, copy, partial, spill)):
            self.alarm[0] = torch.maximum(self.alarm[0], reference_exact.magnitude_bits(f_z).max())

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared) -> None:
        spill = self._take_back() if compared is None else None  # alive until the call returns
        library.revdeq_exact(self._packed + invert(f_z, z, copy, adjoints, compared, spill))
