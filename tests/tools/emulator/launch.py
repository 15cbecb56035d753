"""Launches of Triton kernels on CPU tensors, compiled for a GPU and executed by the emulator."""

import contextlib
import functools
from collections.abc import Collection

import torch
from gpu_targets import Launch, launching

from . import machine
from .memory import Memory
from .parse import EmulationError, parse

parse_once = functools.lru_cache(parse)


@contextlib.contextmanager
def emulating(target, unordered: Collection[str] = (), last: int | None = None, before: int = 0):
    """Context manager: launches on CPU tensors change them as a GPU would.

    unordered: names of pointers to which several threads may write, in any order.
    last: run only this many programs, the last of the grid.
    before: the number of elements before the start of all tensors, which these programs must not access.
    """
    with launching(target, functools.partial(_execute, unordered=unordered, last=last, before=before)):
        yield


def _execute(launch: Launch, unordered: Collection[str], last: int | None, before: int) -> None:
    memory, addresses, arguments = Memory(), {}, []
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            start, end = value.data_ptr(), value.data_ptr() + value.nbytes
            if (start, end) not in addresses:
                if any(start < other_end and other_start < end for other_start, other_end in addresses):
                    raise EmulationError(f"{name} overlaps with another argument")
                addresses[start, end] = memory.allocate(_flat(value, name), name, start % 256, name in unordered)
            value = addresses[start, end] - before * value.element_size()
        arguments.append(value)
    if launch.compiled.metadata.shared:
        raise EmulationError(f"{launch.compiled.name} uses shared memory")
    (grid,) = launch.grid
    programs = range(0 if last is None else grid - last, grid)
    machine.run(parse_once(launch.compiled.asm["ptx"]), programs, arguments, memory)


def _flat(x: torch.Tensor, name: str):
    """The tensor's memory."""
    flat = x.detach().as_strided((x.nbytes // x.element_size(),), (1,))
    if flat.nbytes > x.untyped_storage().nbytes() - x.storage_offset() * x.element_size():
        raise EmulationError(f"{name} is not dense")
    return (flat.view(torch.int16) if x.dtype == torch.bfloat16 else flat).numpy()
