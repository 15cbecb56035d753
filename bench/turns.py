"""Interleaved timing: other load on the machine slows all methods alike, and ratios are taken within a round."""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from revdeq import _device

DEVICE = _device.devices()[0]
Run = Callable[[], Any]
Clock = Callable[[], float]


def take_turns(
    runs: dict[str, Run],
    budget: float,
    least: float = 1e-3,
    rounds: tuple[int, int] = (5, 25),
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each method, a list with one entry per round.

    A measurement repeats the call until it takes `least` seconds. The number of rounds is what `budget` seconds allow,
    clipped to `rounds`. Every other round takes the methods in reverse order. The first call of each is a warm-up."""
    for run in runs.values():
        run()
    once = {name: min(_seconds(run, clock, 1) for _ in range(2)) for name, run in runs.items()}
    calls = {name: max(1, round(least / seconds)) for name, seconds in once.items()}
    expected = sum(calls[name] * once[name] for name in runs)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(max(rounds[0], min(rounds[1], int(budget / expected)))):
        for name in runs if i % 2 == 0 else reversed(runs):
            times[name].append(_seconds(runs[name], clock, calls[name]))
    return times


def one_thread() -> Clock:
    """Switch torch to one thread, and return the clock to use: processor time on a CPU, which excludes other load."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return time.process_time if DEVICE.type == "cpu" else time.perf_counter


def keep_freed_memory() -> None:
    """Stop malloc from returning freed memory to the system: the page faults of getting it back depend on the heap's
    layout, and are noise. A long training run mostly reaches this state by itself."""
    trim_threshold, mmap_threshold = -1, -3  # glibc's malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)  # glibc's maximum


def _seconds(run: Run, clock: Clock, calls: int) -> float:
    """Seconds per call, with the device synchronized before and after."""
    _device.synchronize(DEVICE)
    start = clock()
    for _ in range(calls):
        run()
    _device.synchronize(DEVICE)
    return (clock() - start) / calls


def ratios(over: list[float], under: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def ratio(over: list[float], under: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(ratios(over, under))
