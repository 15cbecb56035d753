"""What a training asks of a data set.

To train on data of one's own, `Examples` is enough. To add a data set to the presets: write a class with these
attributes, whose constructor takes its settings by name (and `folder`, if it is read from files), and enter it in
`DATASETS` of `revdeq/training/data/__init__.py`.
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
ERROR = Metric("error", False, lambda loss, right: loss)
PERPLEXITY = Metric("perplexity", False, lambda loss, right: math.exp(min(loss, 700.0)))


class Batch(NamedTuple):
    """inputs, and the class of each target; surcharge: what is to be added to the summed loss of these targets."""

    inputs: Tensor
    targets: Tensor
    surcharge: float = 0.0


class DataSet(Protocol):
    """What a training asks of a data set: write a class with these attributes and methods, and enter it in `DATASETS`.

    Attributes:
        unit: What the speed of a training is counted in: "images", for example.
        metric: What a model is judged by.
        splits: Those that a model can be evaluated on.
        validation: The split on which the best model of a training is chosen.
        size: The number of examples in an epoch.
        units: How many of `unit` an example has.
        shapes: Keywords of the model that follow from the data.
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
        """What it is, in a line.

        Returns:
            The line with which a training begins.
        """

    def to(self, device: torch.device) -> "DataSet":
        """Move the data, so that batches are on a device.

        Args:
            device: Where to.

        Returns:
            The data set.
        """

    def order(self, generator: torch.Generator) -> Tensor:
        """The order of an epoch.

        Args:
            generator: Of whatever is random in it.

        Returns:
            `size` indices, of which `batch` takes some.
        """

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        """A batch for training.

        Args:
            indices: A part of `order`.
            generator: Of whatever is random in it, such as augmentation.

        Returns:
            Inputs and targets.
        """

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        """All of a split.

        Args:
            split: One of `splits`.
            batch: The number of examples in a batch.

        Returns:
            Its batches, one after the other.
        """

    def saved(self) -> Mapping[str, Any] | None:
        """What a checkpoint must hold so that its model can be used.

        Returns:
            Plain values, which the constructor takes as `saved`; None, if there are none.
        """
