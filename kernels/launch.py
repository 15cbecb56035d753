"""Launches of Triton kernels, for which Python spends little time.

Triton finds out at each launch which of its compiled kernels fits the arguments: by their types, by whether a pointer
is a multiple of 16 and, on AMD, by whether its memory is below 2 GiB. Here that is asked once for all arguments that
are alike in these respects, and the compiled kernel is called from then on. Where it is not known what Triton asks,
and where somebody watches launches, Triton launches.

A state of several tensors takes the same half-step for each of its leaves, of which one launch does several.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from triton.runtime.jit import JITFunction

from . import half_step

KNOWN = (3, 5), (3, 9)
"""The first and the last version of Triton whose way to specialise and to call a kernel this is."""

TOGETHER = (3, 7)
"""The first whose compiler takes the kernels for leaves, in which functions return None."""

Tensors: TypeAlias = Any  # a tuple of tensors, and of None where a kernel is not given one; the first is none of those
Numbers: TypeAlias = tuple[int | None, ...]

LEAVES = 8
"""As many go into one launch: to choose among them takes a program a few instructions for each."""

AMD_POINTERS = 32
"""As many go into one launch of leaves on AMD's GPUs, which bring them all into scalar registers, and spill more."""

_compiled: dict[Any, Any] = {}


class Kernel(NamedTuple):
    """one: for one tensor. leaves: the same for several, which takes a tuple of tensors for each of its tensors, then a
    tuple of their numbers of elements and a tuple of the programs that begin with them, both as `odd` makes them."""

    one: Any
    leaves: Any


class _Launch(NamedTuple):
    """what: the kernel, its warps, the device, numbers and constants, which leaves that go together have in common."""

    what: tuple[Kernel, int, torch.device, Numbers, tuple[Any, ...]]
    programs: int
    n: int
    tensors: Tensors


_put_off: ContextVar[list[_Launch] | None] = ContextVar("revdeq_put_off", default=None)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Launches inside take place at the end, and of those that are alike, several are one. None of them may need what
    another one writes."""
    launches: list[_Launch] = []
    token = _put_off.set(launches)
    try:
        yield
    finally:
        _put_off.reset(token)
    rows = [(it.what, _kinds(it.tensors), it) for it in launches]
    while rows:
        what, kinds, it = rows[0]
        alike = [row[2] for row in rows if row[1] == kinds and row[0] == what]
        most = _most(it.tensors)
        for i in range(0, len(alike), most):
            _launch_leaves(alike[i : i + most], kinds)
        if len(alike) == len(rows):
            return
        rows = [row for row in rows if row[1] != kinds or row[0] != what]


def _launch_leaves(alike: list[_Launch], kinds: list[Any]) -> None:
    (kernel, warps, device, numbers, constants), programs, n, tensors = alike[0]
    if len(alike) == 1:
        _run(kernel.one, warps, device, programs, kinds, tensors, (n, *numbers), constants)
        return
    _, counts, sizes, rows = zip(*alike, strict=True)
    *first, programs = itertools.accumulate(counts, initial=0)
    leaves = [None if column[0] is None else column for column in zip(*rows, strict=True)]
    _run(kernel.leaves, warps, device, programs, kinds, leaves, (odd(sizes), odd(first), *numbers), constants)


def _most(tensors: Tensors) -> int:
    """Leaves of one launch, of which each has these."""
    return min(LEAVES, AMD_POINTERS // sum(x is not None for x in tensors)) if is_amd() else LEAVES


def odd(numbers: Iterable[int]) -> tuple[int, ...]:
    """And above 1: Triton specialises a number in a tuple, whatever it is told, if it is 1 or a multiple of 16."""
    return tuple([2 * x + 3 for x in numbers])


def launch_blocks(
    kernel: Kernel, warps: int, block: int, tensors: Tensors, numbers: Numbers, constants: tuple[Any, ...] = ()
) -> None:
    """A program for each block of the first tensor, the state.

    The kernel takes the tensors; the number of elements and other numbers, for none of which it is specialised; its own
    constants and the size of a block.
    """
    n = tensors[0].numel()
    _launch(kernel, warps, -(-n // block), n, tensors, numbers, (*constants, block))


def launch_chunks(
    kernel: Kernel, warps: int, tensors: Tensors, numbers: Numbers, constants: tuple[Any, ...] = ()
) -> None:
    """A program for each chunk of rows, which leaves a sum or a maximum for each lane."""
    n, rows, lanes = tensors[0].numel(), half_step.ROWS, half_step.LANES
    _launch(kernel, warps, -(-n // (rows * lanes)), n, tensors, numbers, (*constants, rows, lanes))


def _launch(
    kernel: Kernel, warps: int, programs: int, n: int, tensors: Tensors, numbers: Numbers, constants: tuple[Any, ...]
) -> None:
    if programs == 0:
        return
    device, put_off = tensors[0].device, _put_off.get()
    if put_off is not None and _VERSION >= TOGETHER and is_known(kernel.leaves, device):
        put_off.append(_Launch((kernel, warps, device, numbers, constants), programs, n, tensors))
    else:
        _run(kernel.one, warps, device, programs, _kinds(tensors), tensors, (n, *numbers), constants)


def _run(
    kernel: Any, warps: int, device: torch.device, programs: int, kinds: list[Any], tensors: Tensors, numbers: Any,
    constants: tuple[Any, ...],
) -> None:  # fmt: skip
    if not is_known(kernel, device) or _is_watched(kernel):
        _launch_by_triton(kernel, warps, device, programs, (*tensors, *numbers, *constants))
        return
    key = kernel.fn, warps, device.index, constants, _types(numbers), *kinds
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
            f"{kernel.__name__} cannot be compiled or loaded while a graph is recorded ({type(error).__name__}): run "
            "what is recorded once before, with tensors of the same dtypes"
        ) from error


_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def is_known(kernel: Any, device: torch.device) -> bool:
    """Whether Triton asks of a launch what `_kinds` and `_types` tell. The interpreter compiles nothing."""
    return is_known_version() and device.type == "cuda" and type(kernel) is JITFunction


def is_known_version() -> bool:
    return KNOWN[0] <= _VERSION <= KNOWN[1]


def _is_watched(kernel: Any) -> bool:
    """By a profiler, say, which is told of each launch, or changes how kernels are compiled."""
    knobs, compilation = triton.knobs.runtime, triton.knobs.compilation
    before, after = knobs.launch_enter_hook, knobs.launch_exit_hook  # lists of hooks, or what was put in their place
    return bool(
        getattr(before, "calls", before)
        or getattr(after, "calls", after)
        or knobs.debug
        or getattr(knobs, "add_stages_inspection_hook", None)  # from 3.6 on, as is
        or getattr(compilation, "instrumentation_mode", "")
        or getattr(compilation, "fpsan_homomorphic_casts", False)  # from 3.9 on
        or kernel.pre_run_hooks
    )


def _kinds(tensors: Tensors) -> list[Any]:
    """What of tensors a kernel is compiled for."""
    kinds = [None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    if is_amd():  # whose instructions differ for memory below 2 GiB
        kinds += [None if x is None else x.untyped_storage().nbytes() < 2**31 for x in tensors]
    return kinds


def is_amd() -> bool:
    return torch.version.hip is not None


@functools.lru_cache(4096)
def _types(numbers: Any) -> tuple[Any, ...]:
    """Whether Triton takes them for 32-bit integers, those in tuples too."""
    return tuple([None if x is None else _types(x) if isinstance(x, tuple) else -(2**31) <= x < 2**31 for x in numbers])


def is_capturing(device: torch.device) -> bool:
    """Whether this thread records a graph, in which a kernel is not loaded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever device its tensors are on."""
    return contextlib.nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)
