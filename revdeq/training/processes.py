"""The processes that torchrun started, or a single one."""

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _device
from .presets import SettingError


class Processes:
    """rank and size, and the device of this process."""

    def __init__(self, device: str | None = None) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = checked_device(device) if device else _device.best()
        self.is_first = self.rank == 0
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

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model on the device of this process, whose gradients are averaged over all."""
        if self.size == 1:
            return model.to(self.device)
        if self.device.type == "cpu":
            return nn.parallel.DistributedDataParallel(model)
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(self.device)
        return nn.parallel.DistributedDataParallel(model, [self.device])

    def share(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.size)[self.rank]

    def total(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def same_buffers(self, model: nn.Module) -> None:
        """Those of the first process, such as BatchNorm's running statistics."""
        for buffer in model.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, 0)


def checked_device(name: str) -> torch.device:
    found = str(_device.of_this_process(name)) if name in _device.GPUS else name
    there = {*map(str, _device.devices()), "cpu"}
    if found not in there:
        raise SettingError(f"--device {name}: this machine has {', '.join(sorted(there))}")
    return torch.device(found)
