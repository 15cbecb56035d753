"""Your own data."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from .dataset import ACCURACY, ERROR, SOLVED, Batch
from .files import DataError

FROM_NUMPY = "; torch.from_numpy(x) converts an array"
LOOKED_AT = 1000
"""The maximum number of examples per part in the fingerprint."""


class Examples:
    """Your own inputs and targets. Integer targets are classes, and the metric is the accuracy; with several classes
    per example it is "solved", the share of examples whose classes are all right. Otherwise it is the squared error.

    Args:
        train: The training data: a pair of tensors (inputs, targets), or a `torch.utils.data.Dataset` of pairs, which
            is read on demand.
        valid: The validation data, on which the best model is chosen. None holds out a fixed tenth of the examples.

    Raises:
        DataError: train or valid has the wrong type, or its tensors have different lengths.

    Example:
        >>> points = torch.randn(100, 2)
        >>> revdeq.training.data.Examples((points, (points[:, 0] > 0).long())).describe()
        'data of your own: 90 training, 10 valid examples'
    """

    unit = "examples"
    units = 1
    splits: tuple[str, ...] = ("valid",)
    validation = "valid"

    def __init__(self, train: Any, valid: Any = None) -> None:
        train = checked(train)
        everything = torch.arange(count(train))
        if valid is None:
            if len(everything) < 10:
                raise DataError(f"data has {len(everything)} examples: pass at least 10, or Examples(train, valid=...)")
            held_out = torch.zeros(len(everything), dtype=torch.bool)
            held_out[torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))[::10]] = True
            self.parts = {"train": (train, everything[~held_out]), "valid": (train, everything[held_out])}
        else:
            self.parts = {"train": (train, everything), "valid": (checked(valid), torch.arange(count(valid)))}
        self.device = torch.device("cpu")
        targets = self._batch("train", torch.arange(1)).targets
        self.metric = ERROR if targets.is_floating_point() else ACCURACY if targets.dim() == 1 else SOLVED

    @property
    def size(self) -> int:
        return len(self.parts["train"][1])

    @property
    def shapes(self) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return f"data of your own: {self.size:,} training, {len(self.parts['valid'][1]):,} valid examples"

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the examples and their order. For a Dataset, whose examples may be random, only of their
        number."""
        check = 0
        for source, _ in self.parts.values():
            tensors = (
                source.tensors if isinstance(source, TensorDataset) else source if isinstance(source, tuple) else ()
            )
            for part in tensors:
                some = part[:: 1 + len(part) // LOOKED_AT].detach().cpu().contiguous()
                check = zlib.crc32(some.reshape(-1).view(torch.uint8).numpy().tobytes(), check)
        return f"{self.size} + {len(self.parts['valid'][1])} examples, {check:08x}"

    def to(self, device: torch.device) -> "Examples":
        self.device = device
        return self

    def order(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.size, generator=generator)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self._batch("train", indices)

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        for indices in torch.arange(len(self.parts[split][1])).split(batch):
            yield self._batch(split, indices)

    def saved(self) -> None:
        return None

    def _batch(self, split: str, indices: Tensor) -> Batch:
        source, chosen = self.parts[split]
        indices = chosen[indices]
        if isinstance(source, Dataset):
            inputs, targets = collated([source[int(i)] for i in indices])
        else:
            inputs, targets = (part[indices.to(part.device)] for part in source)
        return Batch(inputs.to(self.device), targets.to(self.device))


def checked(source: Any) -> Any:
    if isinstance(source, DataLoader):
        raise DataError("data is a DataLoader: pass its dataset; batch is a setting of the training")
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return source
    if not isinstance(source, (tuple, list)) or len(source) != 2 or not all(isinstance(x, Tensor) for x in source):
        raise DataError(
            f"data is of type {kind_of(source)}: pass a pair of tensors, (inputs, targets), or a "
            f"torch.utils.data.Dataset of pairs that has a length{FROM_NUMPY if 'ndarray' in kind_of(source) else ''}"
        )
    if len(source[0]) != len(source[1]):
        raise DataError(f"data has {len(source[0]):,} inputs and {len(source[1]):,} targets: pass one target per input")
    return tuple(source)


def collated(examples: list[Any]) -> tuple[Tensor, Tensor]:
    if not isinstance(examples[0], (tuple, list)) or len(examples[0]) != 2:
        raise DataError(
            f"an example of data is of type {kind_of(examples[0])}: __getitem__ of the Dataset must return a pair, "
            "(input, target)"
        )
    try:
        inputs, targets = default_collate(examples)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"the examples of data cannot be stacked: {error}; return tensors of the same shape from "
            "__getitem__ of the Dataset"
        ) from error
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise DataError(
            f"an example of data is of type {kind_of(examples[0])}: its input and its target must be tensors, arrays "
            "or numbers"
        )
    return inputs, targets


def kind_of(thing: Any) -> str:
    """Its type, with those of its items if it is a short container."""
    inside: Any = thing if isinstance(thing, (tuple, list)) else [*thing] if isinstance(thing, dict) else ()
    parts = ", ".join(repr(x) if isinstance(thing, dict) else type(x).__name__ for x in inside[:4])
    more = ", ..." if len(inside) > 4 else ""
    return f"{type(thing).__name__} ({parts}{more})" if inside else type(thing).__name__


def count(source: Any) -> int:
    examples: Any = source if isinstance(source, Dataset) else source[0]
    return len(examples)
