"""Timing in turns: whatever else the machine does slows all providers down, and a ratio is that of one round."""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from revdeq import _device

DEVICE = _device.devices()[0]
Run = Callable[[], Any]
Name = TypeVar("Name")


def take_turns(
    providers: dict[Name, Run],
    budget: float,
    least: float = 1e-3,
    rounds: tuple[int, int] = (5, 25),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Seconds per call of each, round by round. A turn takes at least `least` seconds, and there are as many rounds
    as `budget` seconds allow, within their limits. What takes longer than that needs no warm-up."""
    if DEVICE.type != "cpu":  # where the first call may compile
        for run in providers.values():
            run()
    once = {name: _seconds(run, clock) for name, run in providers.items()}
    for name, run in providers.items():
        if once[name] < 100 * least:  # the first call was a warm-up
            once[name] = min(_seconds(run, clock) for _ in range(3))
    calls = {name: max(1, round(least / seconds)) for name, seconds in once.items()}
    expected = sum(calls[name] * once[name] for name in providers)
    times: dict[Name, list[float]] = {name: [once[name]] if expected > budget else [] for name in providers}
    left = max(rounds[0], min(rounds[1], int(budget / expected))) - (expected > budget)
    for _ in range(left):
        for name, run in providers.items():
            times[name].append(_seconds(run, clock, calls[name]))
    return times


def keep_freed_memory() -> None:
    """From now on the C library gives none back to the system: it would be cleared page by page when it is asked for
    again, at a cost that depends on what happens to lie above it. A long training run has come to the same by itself,
    mostly."""
    trim_threshold, mmap_threshold = -1, -3  # glibc's malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)  # the most that it takes


def one_thread() -> Callable[[], float]:
    """From now on. And a clock for it: where all is computed by the processor, its own time, which does not run while
    others use it."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return time.process_time if DEVICE.type == "cpu" else time.perf_counter


def _seconds(run: Run, clock: Callable[[], float], calls: int = 1) -> float:
    """Per call; on a GPU, until its queue is empty."""
    _device.synchronize(DEVICE)
    start = clock()
    for _ in range(calls):
        run()
    _device.synchronize(DEVICE)
    return (clock() - start) / calls


def ratio(slower: list[float], faster: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))
