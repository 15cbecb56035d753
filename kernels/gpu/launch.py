"""Launches of Triton kernels with little Python overhead.

At each launch, Triton selects a compiled kernel by the dtypes of the tensors, by whether their addresses are multiples
of 16 and, on AMD, by whether their memory is smaller than 2 GiB. This file caches the selection by these properties.
Numbers have the types of their annotations, and no kernel is specialized for their values. A setting of Triton that
changes the compilation must be made before the first launch. If the version of Triton is unknown, Triton selects.
"""

import contextlib
import functools
from typing import Any, TypeAlias

import torch
import triton
from triton.runtime.jit import JITFunction

from ..._device import is_capturing
from ..half_step import LANES, rows_of

KNOWN = (3, 6), (3, 9)
"""The first and the last version of Triton whose specialization this implements."""
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))

THREADS = LANES // 2
SMALL = 2**18
"""Tensors with fewer elements have blocks of LANES elements. Larger blocks would leave multiprocessors idle."""

Tensors: TypeAlias = Any  # a tuple of tensors, with None for those that are absent; the first is the state
Numbers: TypeAlias = tuple[float, ...]

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any, block: int | None, tensors: Tensors, numbers: Numbers = (), constants: tuple[Any, ...] = ()
) -> None:
    """Launch one program per block of the first tensor, the state. If the block is None, launch one per chunk: it
    computes a sum or a maximum per lane.

    The arguments of the kernel are the tensors, the number of elements, the other numbers, the constants, the number of
    rows per program, whether the number of elements is even, and the number of elements per row.
    """
    n, device = tensors[0].numel(), tensors[0].device
    rows, size = (rows_of(n), LANES) if block is None else (1, LANES if n < SMALL else block)
    if (programs := -(-n // (rows * size))) == 0:
        return
    constants = *constants, rows, n % 2 == 0, size
    arguments = *tensors, n, *numbers, *constants
    key = kernel.fn, device.index, constants, *_kinds(tensors)
    compiled = _compiled.get(key) if is_known(kernel, device) else None
    if compiled is None:
        _compiled[key] = _launch_by_triton(kernel, device, programs, arguments)
    elif triton.runtime.driver.active.get_current_device() == device.index:
        compiled[programs, 1, 1](*arguments)
    else:
        with on(device):
            compiled[programs, 1, 1](*arguments)


def _launch_by_triton(kernel: Any, device: torch.device, programs: int, arguments: tuple[Any, ...]) -> Any:
    try:
        with on(device):
            return kernel[(programs,)](*arguments, num_warps=warps(device), enable_fp_fusion=False)
    except Exception as error:
        if not is_capturing(device):
            raise
        raise RuntimeError(
            f"{kernel.__name__} cannot be compiled or loaded during graph capture ({type(error).__name__}): run the "
            "captured code once before capturing, with tensors of the same dtypes"
        ) from error


def is_known(kernel: Any, device: torch.device) -> bool:
    """Whether `_kinds` determines which kernel Triton selects. The interpreter compiles nothing."""
    return KNOWN[0] <= _VERSION <= KNOWN[1] and device.type == "cuda" and type(kernel) is JITFunction


def _kinds(tensors: Tensors) -> list[Any]:
    """The properties of tensors that a kernel is specialized for."""
    kinds = [None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    if is_amd():  # its instructions differ for memory below 2 GiB
        kinds += [None if x is None else x.untyped_storage().nbytes() < 2**31 for x in tensors]
    return kinds


def is_amd() -> bool:
    return torch.version.hip is not None


@functools.cache
def warps(device: torch.device) -> int:
    return THREADS // (torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the device current: Triton launches there, whatever the device of the tensors."""
    return contextlib.nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)
