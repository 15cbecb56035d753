"""One process, or those that torchrun started: who this one is, and what they do together."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .presets import SettingError


class Processes:
    """rank, size, and the device of this process. Everything works for one process, too."""

    def __init__(self, device: str | None = None) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = _checked(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.first = self.rank == 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        # gloo beside nccl: what is agreed on the CPU must not wait for the GPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()

    def wrapped(self, model: nn.Module) -> nn.Module:
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(model, [self.device] if self.device.type == "cuda" else None)

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
        """What the first process prepares on the disk, the others find there."""
        if self.size > 1 and not self.first:
            dist.barrier()
        yield
        if self.size > 1 and self.first:
            dist.barrier()

    def same_buffers(self, model: nn.Module) -> None:
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


def _checked(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"--device {name}: it must be cpu, or cuda or cuda:1 where there is such a GPU") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.type != "cpu" and not (device.type == "cuda" and device.index < torch.cuda.device_count()):
        there = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
        raise SettingError(f"--device {name}: there is {there}; use cpu, or leave it out")
    return device
