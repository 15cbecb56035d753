"""The half-steps in C (float64.c and exact.c), for CPU tensors."""

import ctypes
import importlib.util
import struct
from ctypes import c_char_p, c_int, c_void_p
from typing import Any

import torch  # before the library, which shares torch's OpenMP runtime
from torch import Tensor, get_num_threads

from .. import half_step, reference_exact
from ..half_step import Adjoints, Coefficients, rows_of
from ..radix import Radix

CODE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum dtype of common.h
BOUND, COMPARED = struct.Struct("@Pqddddiiiii"), struct.Struct("@PP")  # half_step and comparison of common.h

CALL = [c_char_p, c_int, c_void_p, c_int, c_void_p, c_void_p, c_int]
"""The half-step, the number of threads, f, its dtype, z, the copy or the initial value, and its dtype."""
BACK = [*CALL, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_char_p]
"""And the adjoint, the product, the other adjoint, the seed, its dtype, and the comparison."""
ARGUMENTS = {
    "revdeq_relax": [*CALL, c_void_p],
    "revdeq_invert": BACK,
    "revdeq_exact_relax": [*CALL, c_void_p, c_void_p],
    "revdeq_exact_invert": [*BACK, c_void_p],
}


def load(path: str) -> Any:
    """Load the library. Raises if it is of another version."""
    library = ctypes.CDLL(path)
    for name, arguments in ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int if name == "revdeq_exact_relax" else None
    return library


def _found() -> Any:
    spec = importlib.util.find_spec("revdeq.kernels._cpu")
    if spec is None or spec.origin is None:
        return None  # built without a C compiler
    return load(spec.origin)


def remedy(trouble: str) -> str:
    if "libgomp" in trouble:  # torch's copy may have another name, as on ARM
        return "install GCC's OpenMP runtime (libgomp1)"
    return "reinstall revdeq to build it again"


try:
    library, trouble = _found(), ""
except (OSError, AttributeError, ValueError) as error:  # built on another machine, or for another version
    library, trouble = None, str(error)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def addresses(adjoints: Adjoints) -> tuple[int | None, ...]:
    """Their addresses, and the dtype of the seed."""
    adjoint, vjp, other, seed = adjoints
    if adjoint is None or vjp is None:
        return None, None, None, None, 0
    first = adjoint.data_ptr(), vjp.data_ptr(), None if other is None else other.data_ptr()
    return (*first, None, 0) if seed is None else (*first, seed.data_ptr(), CODE[seed.dtype])


def call(function: Any, h: Any, f_z: Tensor, z: Tensor | None, copy: Tensor, *more: int | None) -> Any:
    """Call a function for a bound half-step. Around 1 us, of which the conversion of arguments is half."""
    read = None if z is None else z.data_ptr()
    f, f_type, copy_type = f_z.data_ptr(), CODE[f_z.dtype], CODE[copy.dtype]
    return function(h.bound, get_num_threads(), f, f_type, read, copy.data_ptr(), copy_type, *more)


class HalfStep(half_step.HalfStep):
    def __init__(self, state: Tensor, step: Coefficients) -> None:
        super().__init__(state, step)
        n = state.numel()
        self.bound = BOUND.pack(state.data_ptr(), n, step.a, step.b, step.c, 1.0, rows_of(n), 0, 0, 0, 0)

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        call(library.revdeq_relax, self, f_z, z, copy, address(partial))

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints) -> None:
        call(library.revdeq_invert, self, f_z, z, copy, *addresses(adjoints), None)

    def _compare(
        self, f_z: Tensor, z: Tensor | None, initial: Tensor, adjoints: Adjoints, floor: Tensor, maxima: Tensor
    ) -> None:
        compared = COMPARED.pack(floor.data_ptr(), maxima.data_ptr())
        call(library.revdeq_invert, self, f_z, z, initial, *addresses(adjoints), compared)


class ExactHalfStep(reference_exact.HalfStep):
    def __init__(self, state: Tensor, step: Radix) -> None:
        super().__init__(state, step)
        n = state.numel()
        integers = rows_of(n), step.sign, step.p, step.d, step.fraction_bits
        self.bound = BOUND.pack(state.data_ptr(), n, step.a, step.b, step.c, step.gamma, *integers)

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        spill = self._spill()
        if call(library.revdeq_exact_relax, self, f_z, z, copy, address(partial), address(spill)):
            self.alarm[0] = torch.maximum(self.alarm[0], reference_exact.magnitude_bits(f_z).max())

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints) -> None:
        spill = self._take_back()  # alive until the call returns
        call(library.revdeq_exact_invert, self, f_z, z, copy, *addresses(adjoints), None, address(spill))

    def _compare(
        self, f_z: Tensor, z: Tensor | None, initial: Tensor, adjoints: Adjoints, floor: Tensor, maxima: Tensor
    ) -> None:
        compared = COMPARED.pack(floor.data_ptr(), maxima.data_ptr())
        call(library.revdeq_exact_invert, self, f_z, z, initial, *addresses(adjoints), compared, None)
