"""Interleaved timing: other load on the machine slows all methods alike, and ratios are taken within a round."""

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
    """Seconds per call of each provider, a list with one entry per round. A measurement repeats the call until it takes
    `least` seconds. The number of rounds is what `budget` seconds allow, clipped to `rounds`. Short calls are warmed
    up first."""
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
    """Stop malloc from returning freed memory to the system: the page faults of getting it back depend on the heap's
    layout, and are noise. A long training run mostly reaches this state by itself."""
    trim_threshold, mmap_threshold = -1, -3  # glibc's malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)  # glibc's maximum


def one_thread() -> Callable[[], float]:
    """Switch torch to one thread, and return the clock to use: processor time on a CPU, which excludes other load."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return time.process_time if DEVICE.type == "cpu" else time.perf_counter


def _seconds(run: Run, clock: Callable[[], float], calls: int = 1) -> float:
    """Seconds per call, with the device synchronized before and after."""
    _device.synchronize(DEVICE)
    start = clock()
    for _ in range(calls):
        run()
    _device.synchronize(DEVICE)
    return (clock() - start) / calls


def ratios(slower: list[float], faster: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(slower, faster, strict=True)]


def ratio(slower: list[float], faster: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(ratios(slower, faster))
