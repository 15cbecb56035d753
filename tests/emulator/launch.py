"""Launches of Triton kernels on CPU tensors, compiled for a GPU and executed."""

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
def emulating(target, unordered: Collection[str] = ()):
    """Inside, launches on CPU tensors change them as a GPU would.

    unordered: names of a kernel's pointers to which threads write without order, and any of them may be the last.
    """
    with launching(target, functools.partial(_execute, unordered=unordered)):
        yield


def _execute(launch: Launch, unordered: Collection[str]) -> None:
    memory, addresses, arguments = Memory(), {}, []
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor):
            place = value.data_ptr(), value.nbytes
            if place not in addresses:
                skew, array = value.data_ptr() % 256, _flat(value, name)
                addresses[place] = memory.allocate(array, name, skew, unordered=name in unordered)
            value = addresses[place]
        arguments.append(value)
    if launch.compiled.metadata.shared:
        raise EmulationError(f"{launch.compiled.name} uses shared memory")
    (programs,) = launch.grid
    machine.run(parse_once(launch.compiled.asm["ptx"]), programs, arguments, memory)


def _flat(x: torch.Tensor, name: str):
    """The tensor's memory."""
    flat = x.detach().as_strided((x.numel(),), (1,))
    if flat.nbytes > x.untyped_storage().nbytes() - x.storage_offset() * x.element_size():
        raise EmulationError(f"{name} is not dense")
    return (flat.view(torch.int16) if x.dtype == torch.bfloat16 else flat).numpy()
