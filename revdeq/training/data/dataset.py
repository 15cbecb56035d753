"""The interface of data sets.

To train on your own data, use `Examples`. To add a data set to the presets, write a class with these attributes, whose
constructor takes its settings as keyword arguments (and `folder`, if it reads files), and add it to `DATASETS` in
`revdeq/training/data/__init__.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Metric(NamedTuple):
    """A metric. of: computes it from the mean loss and the fraction of entirely correct examples."""

    name: str
    higher_is_better: bool
    of: Callable[[float, float], float]


ACCURACY = Metric("accuracy", True, lambda loss, right: right)
SOLVED = Metric("solved", True, lambda loss, right: right)
ERROR = Metric("error", False, lambda loss, right: loss)
PERPLEXITY = Metric("perplexity", False, lambda loss, right: math.exp(min(loss, 700.0)))


class Batch(NamedTuple):
    """inputs and targets. surcharge: a number to add to the summed loss of these targets."""

    inputs: Tensor
    targets: Tensor
    surcharge: float = 0.0


class DataSet(Protocol):
    """The interface of data sets: write a class with these attributes and methods, and add it to `DATASETS`.

    Attributes:
        unit: The unit of the training speed: "images", for example.
        metric: The metric of a model.
        splits: The splits that a model can be evaluated on.
        validation: The split on which the best model is chosen.
        size: The number of examples in an epoch.
        units: The number of units per example.
        shapes: Arguments of the model that follow from the data.
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
        """A one-line description.

        Returns:
            The first line of a training's output.
        """

    def to(self, device: torch.device) -> "DataSet":
        """Move the data to a device.

        Args:
            device: The device.

        Returns:
            The data set.
        """

    def order(self, generator: torch.Generator) -> Tensor:
        """The order of an epoch.

        Args:
            generator: For its random numbers.

        Returns:
            `size` indices, to pass to `batch` in parts.
        """

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """A batch for training.

        Args:
            indices: A part of `order`.
            generator: For its random numbers, such as those of augmentation.

        Returns:
            Inputs and targets.
        """

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        """The batches of a split.

        Args:
            split: One of `splits`.
            batch: The batch size.

        Returns:
            An iterator over its batches.
        """

    def saved(self) -> Mapping[str, Any] | None:
        """State to save in a checkpoint, such as a vocabulary.

        Returns:
            Plain values, which the constructor takes as `saved`; or None.
        """
