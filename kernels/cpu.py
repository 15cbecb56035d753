"""The half-steps in C (cpu.c), for CPU tensors."""

import ctypes
import importlib.util
import warnings
from ctypes import c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch  # before the library: it brings the OpenMP runtime that the library shares
from torch import Tensor, get_num_threads

from . import exact, reference

CODE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum dtype of cpu.c


class _Bound(ctypes.Structure):  # half_step of cpu.c
    _fields_ = [("state", c_void_p), ("copy", c_void_p), ("n", c_int64), ("beta", c_double), ("copy_type", c_int32)]


class _BoundExact(ctypes.Structure):  # exact_half_step of cpu.c
    _fields_ = [
        *_Bound._fields_[:3],
        *((name, c_double) for name in ("a", "beta")),
        *((name, c_int32) for name in ("sign", "p", "d", "fraction_bits", "copy_type")),
    ]


def _load() -> Any:
    spec = importlib.util.find_spec("revdeq.kernels._cpu")
    if spec is None or spec.origin is None:
        return None  # built without a C compiler
    library = ctypes.CDLL(spec.origin)
    common = [c_void_p, c_void_p, c_int, c_int]
    for name, more in (("relax", 0), ("relax_norms", 1), ("invert", 2), ("invert_compare", 4)):
        function = getattr(library, f"revdeq_{name}")
        function.argtypes, function.restype = [*common, *[c_void_p] * more], None
    for name, more, result in (
        ("relax", 1, c_int),
        ("relax_norms", 2, c_int),
        ("invert", 3, None),
        ("invert_compare", 4, None),
    ):
        function = getattr(library, f"revdeq_exact_{name}")
        function.argtypes, function.restype = [*common, *[c_void_p] * more], result
    return library


try:
    library, trouble = _load(), ""
except (OSError, AttributeError) as error:  # built on another machine, or from another version of cpu.c
    library, trouble = None, str(error)
    warnings.warn(
        f"the C kernel cannot be loaded, and PyTorch's slower operations run instead: reinstall revdeq ({error})",
        RuntimeWarning,
        stacklevel=2,
    )


class HalfStep(reference.HalfStep):
    def __init__(self, state: Tensor, copy: Tensor, beta: float) -> None:
        super().__init__(state, copy, beta)
        self._bound = _Bound(state.data_ptr(), copy.data_ptr(), state.numel(), beta, CODE[copy.dtype])
        self._address = ctypes.addressof(self._bound)
        # Looked up here and not in every call: at 4,096 elements a call takes 2.5 us, half of it overhead.
        self._relax = library.revdeq_relax

    def relax(self, f: Tensor) -> None:
        f = self.in_order(f)
        self._relax(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads())

    def relax_norms(self, f: Tensor) -> Tensor:
        f, partial = self.in_order(f), self.partial_sums()
        library.revdeq_relax_norms(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), partial.data_ptr())
        return partial

    def invert(self, f: Tensor) -> None:
        f = self.in_order(f)
        library.revdeq_invert(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), None, None)

    def invert_adjoint(self, f: Tensor, adjoint: Tensor, vjp: Tensor) -> None:
        f, vjp = self.in_order(f), self.in_order(vjp)
        library.revdeq_invert(
            self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), adjoint.data_ptr(), vjp.data_ptr()
        )

    def invert_compare(self, f: Tensor, initial: Tensor, adjoint: Tensor | None, vjp: Tensor | None) -> Tensor:
        f, initial, partial = self.in_order(f), self.in_order(initial), self.partial_maxima()
        vjp = None if vjp is None else self.in_order(vjp)
        tensors = (None if x is None else x.data_ptr() for x in (initial, adjoint, vjp, partial))
        library.revdeq_invert_compare(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), *tensors)
        return partial


class ExactHalfStep(exact.HalfStep):
    def __init__(
        self, state: Tensor, copy: Tensor, radix: exact.Radix, half_steps: int, spilled: list[Tensor] | None = None
    ) -> None:
        super().__init__(state, copy, radix, half_steps, spilled)
        numbers = radix.a, radix.beta, radix.sign, radix.p, radix.d, radix.fraction_bits
        self._bound = _BoundExact(state.data_ptr(), copy.data_ptr(), state.numel(), *numbers, CODE[copy.dtype])
        self._address = ctypes.addressof(self._bound)

    def _call(self, function: Any, f: Tensor, *tensors: Tensor | None) -> Any:
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        return function(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), *addresses)

    def _relax(self, f: Tensor, spill: Tensor | None) -> None:
        f = self.in_order(f)
        if self._call(library.revdeq_exact_relax, f, spill):
            self._find_largest(f)

    def _relax_norms(self, f: Tensor, spill: Tensor | None) -> Tensor:
        f, partial = self.in_order(f), self.partial_sums()
        if self._call(library.revdeq_exact_relax_norms, f, spill, partial):
            self._find_largest(f)
        return partial

    def _invert(self, f: Tensor, adjoint: Tensor | None, vjp: Tensor | None, spill: Tensor | None) -> None:
        vjp = None if vjp is None else self.in_order(vjp)
        self._call(library.revdeq_exact_invert, self.in_order(f), adjoint, vjp, spill)

    def invert_compare(self, f: Tensor, initial: Tensor, adjoint: Tensor | None, vjp: Tensor | None) -> Tensor:
        initial, partial = self.in_order(initial), self.partial_maxima()
        vjp = None if vjp is None else self.in_order(vjp)
        self._call(library.revdeq_exact_invert_compare, self.in_order(f), initial, adjoint, vjp, partial)
        return partial
