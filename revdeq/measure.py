"""Peak memory of a computation, by the allocator's own count."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def peak_memory(run: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The largest number of bytes in tensors that were allocated during `run` and alive at the same time."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
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
