"""Launches of Triton kernels with little Python overhead.

At each launch, Triton selects a compiled kernel by the types of the arguments, by whether pointers are multiples of 16
and, on AMD, by whether their memory is smaller than 2 GiB. Here the selection is cached by these properties, and the
compiled kernel is called directly. With unknown versions of Triton, and if something observes launches, Triton
launches.
"""

import contextlib
import functools
from typing import Any, TypeAlias

import torch
import triton
from triton.runtime.jit import JITFunction

from ..._device import is_capturing
from .. import half_step

KNOWN = (3, 5), (3, 9)
"""The first and the last version of Triton whose specialization and calling convention this implements."""

Tensors: TypeAlias = Any  # a tuple of tensors, with None for those that are absent; the first is the state
Numbers: TypeAlias = tuple[int | None, ...]

SMALL, SMALL_BLOCK = 2**18, half_step.LANES
"""Smaller tensors use smaller blocks, because larger ones would leave multiprocessors idle."""

_compiled: dict[Any, Any] = {}


def launch_blocks(
    kernel: Any,
    warps: int,
    block: int,
    tensors: Tensors,
    numbers: Numbers,
    constants: tuple[Any, ...] = (),
    examples: int = 1,
) -> None:
    """Launch one program per block of the first tensor, the state, or of each of its examples.

    The arguments of the kernel are the tensors, the number of elements, the other numbers, the constants and the block
    size. Kernels are not specialized for the numbers.
    """
    n = tensors[0].numel()
    length = n // max(examples, 1)
    if n < SMALL or (examples > 1 and length < block):
        block = SMALL_BLOCK
    _launch(kernel, warps, examples * -(-length // block), tensors, (n, *numbers), (*constants, block))


def launch_chunks(
    kernel: Any, warps: int, tensors: Tensors, numbers: Numbers, constants: tuple[Any, ...] = (), examples: int = 1
) -> None:
    """Launch one program per chunk of rows, which computes a sum or a maximum per lane."""
    n, rows, lanes = tensors[0].numel(), half_step.rows_of(tensors[0].numel()), half_step.LANES
    programs = examples * -(-n // (max(examples, 1) * rows * lanes))
    _launch(kernel, warps, programs, tensors, (n, *numbers), (*constants, rows, lanes))


def _launch(
    kernel: Any, warps: int, programs: int, tensors: Tensors, numbers: Numbers, constants: tuple[Any, ...]
) -> None:
    if programs == 0:
        return
    device = tensors[0].device
    if not is_known(kernel, device) or _is_watched(kernel):
        _launch_by_triton(kernel, warps, device, programs, (*tensors, *numbers, *constants))
        return
    key = kernel.fn, warps, device.index, constants, _types(numbers), *_kinds(tensors)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = _launch_by_triton(kernel, warps, device, programs, (*tensors, *numbers, *constants))
        return
    active = triton.runtime.driver.active
    arguments = (
        programs, 1, 1, active.get_current_stream(device.index), compiled.function, compiled.packed_metadata,
        None, None, None, *tensors, *numbers, *constants,
    )  # fmt: skip
    if active.get_current_device() == device.index:
        compiled.run(*arguments)
    else:
        with _on(device):
            compiled.run(*arguments)


def _launch_by_triton(kernel: Any, warps: int, device: torch.device, programs: int, arguments: tuple[Any, ...]) -> Any:
    try:
        with _on(device):
            return kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False)
    except Exception as error:
        if not is_capturing(device):
            raise
        raise RuntimeError(
            f"{kernel.__name__} cannot be compiled or loaded during graph capture ({type(error).__name__}): run the "
            "captured code once before capturing, with tensors of the same dtypes"
        ) from error


_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def is_known(kernel: Any, device: torch.device) -> bool:
    """Whether `_kinds` and `_types` determine which kernel Triton selects. The interpreter compiles nothing."""
    return is_known_version() and device.type == "cuda" and type(kernel) is JITFunction


def is_known_version() -> bool:
    return KNOWN[0] <= _VERSION <= KNOWN[1]


def _is_watched(kernel: Any) -> bool:
    """Whether something, such as a profiler, observes launches or changes the compilation."""
    knobs, compilation = triton.knobs.runtime, triton.knobs.compilation
    before, after = knobs.launch_enter_hook, knobs.launch_exit_hook  # lists of hooks, or their replacements
    return bool(
        getattr(before, "calls", before)
        or getattr(after, "calls", after)
        or knobs.debug
        or getattr(knobs, "add_stages_inspection_hook", None)  # since 3.6, like the next one
        or getattr(compilation, "instrumentation_mode", "")
        or getattr(compilation, "fpsan_homomorphic_casts", False)  # since 3.9
        or kernel.pre_run_hooks
    )


def _kinds(tensors: Tensors) -> list[Any]:
    """The properties of tensors that a kernel is specialized for."""
    kinds = [None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    if is_amd():  # its instructions differ for memory below 2 GiB
        kinds += [None if x is None else x.untyped_storage().nbytes() < 2**31 for x in tensors]
    return kinds


def is_amd() -> bool:
    return torch.version.hip is not None


@functools.lru_cache(4096)
def _types(numbers: Numbers) -> tuple[bool | None, ...]:
    """Whether Triton treats them as 32-bit integers."""
    return tuple([None if x is None else -(2**31) <= x < 2**31 for x in numbers])


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the device current: Triton launches there, whatever the device of the tensors."""
    return contextlib.nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)
