"""The learning rate over the updates of a training."""

import torch
from torch.optim import lr_scheduler

PLATEAU_PATIENCE = 10

Schedule = lr_scheduler.LRScheduler | lr_scheduler.ReduceLROnPlateau | None


def scheduled(optimizer: torch.optim.Optimizer, name: str, warmup: int, total: int) -> Schedule:
    if name == "plateau":
        # torch counts the windows that are let pass, the paper the one at which lr is halved
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=PLATEAU_PATIENCE - 1)
    if name == "constant":
        return None
    warmup = min(warmup, total - 1)
    falling = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup)
    if not warmup:
        return falling
    rising = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return lr_scheduler.SequentialLR(optimizer, [rising, falling], [warmup])
