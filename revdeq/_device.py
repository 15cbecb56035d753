"""The devices that there are, and the peak memory of a computation by their allocators' own count."""

import contextlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


def devices() -> list[torch.device]:
    """All that revdeq can run on: GPUs, if there are any that work, and last the CPU."""
    found = []
    for kind in ("cuda", "xpu"):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = getattr(torch, kind)
            found += [torch.device(kind, i) for i in range(module.device_count() if module.is_available() else 0)]
    return [*found, torch.device("cpu")]


def name(device: torch.device) -> str:
    if device.type != "cpu":
        return getattr(torch, device.type).get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def peak_memory(run: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The largest number of bytes in tensors that were allocated during `run` and alive at the same time."""
    device = torch.device(device)
    if device.type != "cpu":
        gpu = getattr(torch, device.type)
        gpu.synchronize(device)
        before = gpu.memory_allocated(device)
        gpu.reset_peak_memory_stats(device)
        run()
        return gpu.max_memory_allocated(device) - before
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _standard_error_closed():
        profile.start()
    try:
        run()
    finally:
        with _standard_error_closed():
            profile.stop()
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


@contextlib.contextmanager
def _standard_error_closed() -> Iterator[None]:
    """The profiler's library writes a line whenever it starts or stops, past Python's sys.stderr."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
