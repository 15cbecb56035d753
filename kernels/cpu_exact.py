"""The exact half-steps in C (cpu_exact.c), for CPU tensors."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

from torch import Tensor, get_num_threads

from . import cpu, reference_exact
from .cpu import CODE, Examples, Packed, address, typed
from .half_step import Linear
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

    def _call(self, name: str, step: Radix, f: Tensor, *tensors: Tensor | None, seed: tuple[Any, ...] = ()) -> Any:
        if step is not self._step:
            self._step = step
            for field in ("gamma", "sign", "p", "d", "fraction_bits"):
                setattr(self._bound, field, getattr(step, field))
        function = getattr(cpu.library, f"revdeq_exact_{name}")
        return function(self._address, f.data_ptr(), CODE[f.dtype], get_num_threads(), *map(address, tensors), *seed)

    def _read(self, read: Tensor | None, step: Radix) -> Tensor | None:
        return self.in_order_or_none(read) if step.gamma != 1 else None

    def _relax(self, f: Tensor, read: Tensor | None, spill: Tensor | None, step: Radix) -> None:
        f = self.in_order(f)
        if self._call("relax", step, f, self._read(read, step), spill):
            self._find_largest(f)

    def _relax_norms(self, f: Tensor, read: Tensor | None, spill: Tensor | None, step: Radix) -> Tensor:
        f, partial = self.in_order(f), self.partial_sums()
        if self._call("relax_norms", step, f, self._read(read, step), spill, partial):
            self._find_largest(f)
        return partial

    def _invert(
        self,
        f: Tensor,
        adjoint: Tensor | None,
        vjp: Tensor | None,
        other: Tensor | None,
        spill: Tensor | None,
        step: Radix,
        adjoint_step: Linear,
        seed: Tensor | None,
    ) -> None:
        self._take_adjoint(adjoint_step)
        vjp, other = self.in_order_or_none(vjp), other if adjoint_step.c else None
        self._call("invert", step, self.in_order(f), adjoint, vjp, other, spill, seed=typed(seed))

    def invert_compare(
        self,
        f: Tensor,
        initial: Tensor,
        floor: Tensor,
        adjoint: Tensor | None,
        vjp: Tensor | None,
        other: Tensor | None,
        step: Radix,
        adjoint_step: Linear,
        seed: Tensor | None = None,
    ) -> Tensor:
        self._take_adjoint(adjoint_step)
        initial, worst = self.in_order(initial), self.partial_maxima()
        vjp, other = self.in_order_or_none(vjp), other if adjoint_step.c else None
        tensors = initial, floor, adjoint, vjp, other, worst
        self._call("invert_compare", step, self.in_order(f), *tensors, seed=typed(seed))
        return worst
