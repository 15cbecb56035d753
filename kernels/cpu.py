"""The half-steps in C (cpu.c), for CPU tensors."""

import ctypes
import importlib.util
import warnings
from ctypes import c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch  # before the library, which shares torch's OpenMP runtime
from torch import Tensor, get_num_threads

from . import half_step
from .half_step import LANES, ROWS, Adjoints, Coefficients, Linear

CODE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum dtype of common.h

OPERATIONS = {"relax": 1, "relax_norms": 2, "invert": 3, "invert_compare": 6}
EXACT_OPERATIONS = {"relax": 2, "relax_norms": 3, "invert": 4, "invert_compare": 6}
"""The number of pointers that each takes besides the bound half-step, f, f's dtype and the number of threads, and, for
inverses, the seed and its dtype."""


class Packed(ctypes.Structure):  # coefficients of common.h
    _fields_ = [("a", c_double), ("b", c_double), ("c", c_double)]


class Examples(ctypes.Structure):  # examples of common.h
    _fields_ = [("count", c_int64), ("length", c_int64), ("ends", c_void_p), ("kept", c_double), ("now", c_int32)]


class Bound(ctypes.Structure):  # half_step of cpu.c
    _fields_ = [
        ("state", c_void_p),
        ("copy", c_void_p),
        ("n", c_int64),
        ("step", Packed),
        ("adjoint", Packed),
        ("copy_type", c_int32),
        ("each", Examples),
    ]


def load(path: str) -> Any:
    """Load the library. Raises if it does not match this version."""
    library = ctypes.CDLL(path)
    for prefix, operations in (("revdeq_", OPERATIONS), ("revdeq_exact_", EXACT_OPERATIONS)):
        for name, pointers in operations.items():
            function = getattr(library, prefix + name)
            seed = [c_void_p, c_int] if name.startswith("invert") else []
            function.argtypes = [c_void_p, c_void_p, c_int, c_int, *[c_void_p] * pointers, *seed]
            function.restype = c_int if prefix == "revdeq_exact_" and name.startswith("relax") else None
    c_int32.in_dll(library, "revdeq_has_examples")  # raises if the library is of an earlier version
    found = c_int32.in_dll(library, "revdeq_lanes").value, c_int32.in_dll(library, "revdeq_rows").value
    if found != (LANES, ROWS):
        raise OSError(f"{path} has chunks of {found[1]} rows of {found[0]} lanes, not {ROWS} rows of {LANES}")
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
    warnings.warn(
        f"the C kernel cannot be loaded ({trouble}), so PyTorch's slower operations run instead: {remedy(trouble)}",
        RuntimeWarning,
        stacklevel=2,
    )


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def typed(x: Tensor | None) -> tuple[int | None, int]:
    """Its address and its dtype."""
    return (None, 0) if x is None else (x.data_ptr(), CODE[x.dtype])


class InC(half_step.HalfStep):
    """What the half-steps of both states share: a structure that C reads."""

    _bound: Any
    _adjoint_step: Linear | None = None

    def write_to(self, copy: Tensor) -> None:
        self.copy, self._bound.copy = copy, copy.data_ptr()

    def each(self, ends: Tensor, now: int, kept: float = 1.0) -> None:
        super().each(ends, now, kept)
        length = self.state.numel() // max(self.examples, 1)
        self._bound.each = Examples(self.examples, length, ends.data_ptr(), kept, now)

    def _take_adjoint(self, step: Linear) -> None:
        if step is not self._adjoint_step:
            self._adjoint_step, self._bound.adjoint = step, Packed(step.a, step.b, step.c)


class HalfStep(InC):
    def __init__(self, state: Tensor, copy: Tensor) -> None:
        super().__init__(state, copy)
        n, code = state.numel(), CODE[copy.dtype]
        self._bound = Bound(state.data_ptr(), copy.data_ptr(), n, each=Examples(1, n), copy_type=code)
        self._address = ctypes.addressof(self._bound)
        self._step: Coefficients | None = None
        # Looked up once: at 4,096 elements a call takes 2.5 us, half of which is overhead.
        self._relax_in_c, self._invert_in_c = library.revdeq_relax, library.revdeq_invert

    def _take(self, step: Coefficients) -> None:
        if step is not self._step:
            self._step, self._bound.step = step, Packed(step.a, step.b, step.c)

    def _relax(self, f: Tensor, read: Tensor | None, step: Coefficients) -> None:
        if step is not self._step:
            self._take(step)
        self._relax_in_c(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), address(read))

    def _relax_norms(self, f: Tensor, read: Tensor | None, step: Coefficients) -> Tensor:
        self._take(step)
        partial = self.partial_sums()
        tensors = address(read), partial.data_ptr()
        library.revdeq_relax_norms(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), *tensors)
        return partial

    def _invert(self, f: Tensor, adjoints: Adjoints, step: Coefficients, adjoint_step: Linear) -> None:
        if step is not self._step:
            self._take(step)
        if adjoint_step is not self._adjoint_step:
            self._take_adjoint(adjoint_step)
        adjoint, vjp, other, seed = adjoints
        tensors = address(adjoint), address(vjp), address(other), *typed(seed)
        self._invert_in_c(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), *tensors)

    def _compare(
        self, f: Tensor, initial: Tensor, floor: Tensor, adjoints: Adjoints, step: Coefficients, adjoint_step: Linear
    ) -> Tensor:
        self._take(step)
        self._take_adjoint(adjoint_step)
        worst = self.partial_maxima(self.examples)
        *others, seed = adjoints
        tensors = *map(address, (initial, floor, *others, worst)), *typed(seed)
        library.revdeq_invert_compare(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), *tensors)
        return worst
