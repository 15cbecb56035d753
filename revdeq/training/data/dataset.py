"""What a training needs of its data."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import DataError


class Metric(NamedTuple):
    """of: the metric, given the mean loss and the share of examples that are right in every target."""

    name: str
    higher_is_better: bool
    of: Callable[[float, float], float]


ACCURACY = Metric("accuracy", True, lambda loss, right: right)
SOLVED = Metric("solved", True, lambda loss, right: right)
PERPLEXITY = Metric("perplexity", False, lambda loss, right: math.exp(min(loss, 700.0)))


class Batch(NamedTuple):
    """Inputs and targets. surcharge: a number to add to the summed loss of these targets."""

    inputs: Tensor
    targets: Tensor
    surcharge: float = 0.0


class DataSet:
    """Base class of data sets. Arguments of a constructor are settings of presets.

    Attributes:
        unit: What targets are called: "tokens", for example.
        metric: The metric of a model.
        splits: The splits that a model can be evaluated on. On the first of them, the best model is chosen.
        size: The number of examples in an epoch.
        shapes: Arguments of the model that follow from the data.
    """

    unit: str
    metric: Metric
    splits: tuple[str, ...] = ("valid", "test")
    size: int
    shapes: dict[str, Any]
    device = torch.device("cpu")

    def to(self, device: torch.device) -> None:
        """Return batches on this device from now on."""
        self.device = device

    def order(self, generator: torch.Generator) -> Tensor:
        """The `size` indices of an epoch, which are passed to `batch` in parts."""
        return torch.randperm(self.size, generator=generator)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """A batch for training."""
        raise NotImplementedError

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        """The batches of a split."""
        raise NotImplementedError


def checked(name: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise DataError(f"{name}={value!r}: it must be an integer of at least {least}")
    return value
