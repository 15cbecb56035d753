"""What depends on devices: which there are, waiting for them, random generators and memory.

Every function takes a device, and none relies on the current one.
"""

import contextlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

GPUS = ("cuda", "xpu")
"""The types of GPUs. ROCm's type is cuda, too."""


def devices() -> list[torch.device]:
    """All devices that revdeq can run on: GPUs that work, and then the CPU."""
    return [*(torch.device(kind, i) for kind in GPUS for i in range(_count(kind))), torch.device("cpu")]


def _count(kind: str) -> int:
    module = getattr(torch, kind)
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.device_count() if module.is_available() else 0
    return 0


def best() -> torch.device:
    """A GPU, if there is one; under torchrun, the one of this process."""
    return of_this_process(devices()[0].type)


def of_this_process(kind: str) -> torch.device:
    """Under torchrun, GPUs are assigned to local ranks in turn. A process may see all of them, or only its own."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) % max(1, _count(kind)))


def process_group(device: torch.device) -> str:
    """The backends of torch.distributed: the GPU's, and gloo for CPU tensors, so that these do not wait for the GPU."""
    collectives = {"cuda": "nccl", "xpu": "xccl"}.get(device.type)
    return f"cpu:gloo,{device.type}:{collectives}" if collectives else "gloo"


def api(device: torch.device) -> ModuleType:
    """torch.cuda, torch.xpu or the like."""
    return getattr(torch, device.type)


def name(device: torch.device) -> str:
    if device.type != "cpu":
        return api(device).get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def make_current(device: torch.device) -> None:
    """Make it the default GPU of this process."""
    if device.type != "cpu":
        api(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type != "cpu":
        api(device).synchronize(device)


class Arriving:
    """A value that is copied from a device to the host asynchronously.

    The host memory is filled with a rare bit pattern first, and the value has arrived when that is gone. An event is
    not used, because querying it would invalidate a graph that another thread is capturing.
    """

    FILLER = 0x55

    def __init__(self, value: Tensor) -> None:
        self.value = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda or value.is_xpu)
        self._bytes = self.value.view(-1, 1).view(torch.uint8)  # one row per number, which arrives as a whole
        self._bytes.fill_(self.FILLER)
        self.value.copy_(value.detach(), non_blocking=True)

    def has_come(self) -> bool:
        """Whether the value has arrived. It can be called at any time."""
        return not bool(self._bytes.eq(self.FILLER).all(1).any())


def is_capturing(device: torch.device) -> bool:
    """Whether this thread is capturing a graph, on this device or on the current one of its type. Then it must not
    query events or synchronize, on any device."""
    capturing = device.type != "cpu" and getattr(api(device), "is_current_stream_capturing", None)
    if not capturing:
        return False
    if capturing():
        return True
    with api(device).device(device):
        return bool(capturing())


def allocated(device: torch.device) -> int | None:
    """The peak of allocated bytes on a GPU, as its allocator counts them."""
    return None if device.type == "cpu" else api(device).max_memory_allocated(device)


def peak_memory(run: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The largest number of bytes in tensors that were allocated during `run` and alive at the same time."""
    device = torch.device(device)
    if device.type != "cpu":
        gpu = api(device)
        gpu.synchronize(device)
        before = gpu.memory_allocated(device)
        gpu.reset_peak_memory_stats(device)
        run()
        return gpu.max_memory_allocated(device) - before
    # Torch 2.10 warns that events are cleared after each cycle, unless they are kept.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True)
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
    """The profiler's library prints a line when it starts and stops, bypassing Python's sys.stderr."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
