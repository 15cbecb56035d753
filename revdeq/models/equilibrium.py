"""The layer of a model: the reversible equilibrium, or for comparison the classical one."""

from typing import Any

import torch
from torch import Tensor, nn

from .._solver.layer import RevDEQ
from ..baselines import Anderson


def equilibrium(f: nn.Module, solver: str, evaluations: int | None, **options: Any) -> RevDEQ:
    if solver == "torchdeq":
        return Anderson(f, evaluations=evaluations, **options)
    if solver != "reversible":
        raise ValueError(f"solver = {solver!r} must be 'reversible' or 'torchdeq'")
    if evaluations is not None:
        raise ValueError(f"evaluations = {evaluations!r} belongs to solver = 'torchdeq': use max_steps")
    return RevDEQ(f, **options)


def unrounded(x: Tensor) -> Tensor:
    """The input of an equilibrium: autocast applies inside f, and not to the state."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x
