"""The processes that torchrun started, or a single one."""

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _device
from .presets import SettingError


class Processes:
    """rank, size, and the device of this process. Also works for a single process."""

    def __init__(self, device: str | None = None) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = _checked(device) if device else _device.best()
        self.first = self.rank == 0
        _device.make_current(self.device)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        # The group's threads end with the last reference to it, and threads left at interpreter exit may abort the
        # process. This module, like DDP, keeps a reference to the group that exists when it is imported.
        importlib.import_module("torch.distributed.nn")
        dist.init_process_group(_device.process_group(self.device))
        try:
            yield
        finally:
            gc.collect()  # a DDP model is a reference cycle that includes the group
            dist.destroy_process_group()

    def wrapped(self, model: nn.Module) -> nn.Module:
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(model, None if self.device.type == "cpu" else [self.device])

    def apart(self, model: nn.Module, more: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager: skip the gradient synchronization while accumulating."""
        wrapped: Any = model
        return wrapped.no_sync() if more and self.size > 1 else contextlib.nullcontext()

    def share(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.size)[self.rank]

    def total(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        if self.size == 1:
            return value
        agreed = torch.tensor(value)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def all_of(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Context manager: the first process runs first, so that others find its files."""
        if self.size > 1 and not self.first:
            dist.barrier()
        yield
        if self.size > 1 and self.first:
            dist.barrier()

    def same_buffers(self, model: nn.Module) -> None:
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


def placed(device: str | torch.device) -> torch.device:
    """The device to load a model to; unlike for training, it may be any, such as meta."""
    try:
        found = torch.device(device)
    except RuntimeError:
        return _checked(str(device))
    return _checked(str(device)) if found.type in _device.GPUS else found


def _checked(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"device={name} (--device): it must be a device such as cpu, cuda or cuda:1") from None
    if device.type in _device.GPUS and device.index is None:
        device = _device.of_this_process(device.type)
    if device not in (known := _device.devices()) and device.type != "cpu":
        there = ", ".join(map(str, known[:-1])) or "no GPU"
        raise SettingError(f"device={name} (--device): this machine has {there}; use cpu, or leave it out")
    return device
