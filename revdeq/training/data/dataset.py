"""What a training asks of a data set.

To add one: write a class with these attributes, whose constructor takes its settings by name (and `folder`, if it is
read from files), and enter it in `DATASETS` of `revdeq/training/data/__init__.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Metric(NamedTuple):
    """A figure of merit. of: what it is, from the mean loss and from the fraction of examples that are all right."""

    name: str
    higher_is_better: bool
    of: Callable[[float, float], float]


ACCURACY = Metric("accuracy", True, lambda loss, right: right)
SOLVED = Metric("solved", True, lambda loss, right: right)
PERPLEXITY = Metric("perplexity", False, lambda loss, right: math.exp(min(loss, 700.0)))


class Batch(NamedTuple):
    """inputs, and the class of each target; surcharge: what is to be added to the summed loss of these targets."""

    inputs: Tensor
    targets: Tensor
    surcharge: float = 0.0


class DataSet(Protocol):
    """
    unit: what the speed of a training is counted in.
    metric: what it is judged by.
    splits: those that a model can be evaluated on.
    validation: the one on which the best model of a training is chosen.
    sources: files to download, see download.py.
    size: the number of examples in an epoch.
    units: of `unit`, in an example.
    shapes: keywords of the model that follow from the data.
    """

    unit: str
    metric: Metric
    splits: tuple[str, ...]
    validation: str

    @property
    def size(self) -> int: ...

    @property
    def units(self) -> int: ...

    @property
    def shapes(self) -> dict[str, Any]: ...

    def describe(self) -> str:
        """A line to begin the training with."""

    def to(self, device: torch.device) -> "DataSet":
        """The data set with its batches on the device."""

    def order(self, generator: torch.Generator) -> Tensor:
        """Of an epoch: `size` numbers, of which `batch` takes some."""

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """For training; whatever is random in it comes from the generator."""

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        """All of a split, in batches."""

    def saved(self) -> Mapping[str, Any] | None:
        """What a checkpoint must hold so that its model can be used: passed to the constructor as `saved`."""
