"""The exact half-steps in C (cpu_exact.c), for CPU tensors."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

from torch import Tensor, get_num_threads

from . import cpu, reference_exact
from .cpu import CODE, Examples, Packed, address, typed
from .half_step import Adjoints, Linear
from .radix import Radix


class Bound(ctypes.Structure):  # exact_half_step of cpu_exact.c
    _fields_ = [
        ("state", c_void_p),
        ("copy", c_void_p),
        ("n", c_int64),
        ("adjoint", Packed),
        ("gamma", c_double),
        *((name, c_int32) for name in ("sign", "p", "d", "fraction_bits", "copy_type")),
        ("each", Examples),
    ]


class HalfStep(cpu.InC, reference_exact.HalfStep):
    def __init__(
        self, state: Tensor, copy: Tensor, steps: Sequence[Radix], spilled: list[Tensor] | None = None
    ) -> None:
        super().__init__(state, copy, steps, spilled)
        n, code = state.numel(), CODE[copy.dtype]
        self._bound = Bound(state.data_ptr(), copy.data_ptr(), n, each=Examples(1, n), copy_type=code)
        self._address = ctypes.addressof(self._bound)
        self._step: Radix | None = None

    def _call(self, name: str, step: Radix, f: Tensor, *addresses: int | None) -> Any:
        if step is not self._step:
            self._step = step
            for field in ("gamma", "sign", "p", "d", "fraction_bits"):
                setattr(self._bound, field, getattr(step, field))
        function = getattr(cpu.library, f"revdeq_exact_{name}")
        return function(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), *addresses)

    def _relax(self, f: Tensor, read: Tensor | None, step: Radix) -> None:
        if self._call("relax", step, f, address(read), address(self._put_aside(step))):
            self._find_largest(f)

    def _relax_norms(self, f: Tensor, read: Tensor | None, step: Radix) -> Tensor:
        partial = self.partial_sums()
        if self._call("relax_norms", step, f, address(read), address(self._put_aside(step)), address(partial)):
            self._find_largest(f)
        return partial

    def _invert(self, f: Tensor, adjoints: Adjoints, step: Radix, adjoint_step: Linear) -> None:
        self._take_adjoint(adjoint_step)
        spill = self._take_back(step)  # alive until the call returns
        *tensors, seed = adjoints
        self._call("invert", step, f, *map(address, (*tensors, spill)), *typed(seed))

    def _compare(
        self, f: Tensor, initial: Tensor, floor: Tensor, adjoints: Adjoints, step: Radix, adjoint_step: Linear
    ) -> Tensor:
        self._take_adjoint(adjoint_step)
        worst = self.partial_maxima(self.examples)
        *others, seed = adjoints
        self._call("invert_compare", step, f, *map(address, (initial, floor, *others, worst)), *typed(seed))
        return worst
