"""Timing in turns: whatever else the machine does slows all providers down, and a ratio is that of one round."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from revdeq import _device

DEVICE = _device.devices()[0]
Run = Callable[[], Any]


def take_turns(
    providers: dict[str, Run], budget: float, least: float = 1e-3, rounds: tuple[int, int] = (5, 25)
) -> dict[str, list[float]]:
    """Seconds per call of each, round by round. A turn takes at least `least` seconds, and there are as many rounds
    as `budget` seconds allow, within their limits. What takes longer than that needs no warm-up."""
    once = {name: _seconds(run) for name, run in providers.items()}
    for name, run in providers.items():
        if once[name] < 0.1:  # the first call was a warm-up
            once[name] = min(_seconds(run) for _ in range(3))
    calls = {name: max(1, round(least / seconds)) for name, seconds in once.items()}
    expected = sum(calls[name] * once[name] for name in providers)
    times: dict[str, list[float]] = {name: [once[name]] if expected > budget else [] for name in providers}
    left = max(rounds[0], min(rounds[1], int(budget / expected))) - (expected > budget)
    for _ in range(left):
        for name, run in providers.items():
            times[name].append(_seconds(run, calls[name]))
    return times


def _seconds(run: Run, calls: int = 1) -> float:
    """Per call; on a GPU, until its queue is empty."""
    _device.synchronize(DEVICE)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _device.synchronize(DEVICE)
    return (time.perf_counter() - start) / calls


def ratio(slower: list[float], faster: list[float]) -> float:
    """The median over the rounds."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))
