"""Data sets: those of the paper, read from their official files, and generated puzzles."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import cifar10, download, wikitext
from .cifar10 import Cifar10
from .dataset import Batch, DataSet
from .download import Source
from .examples import Examples
from .files import DataError
from .puzzles import Mazes, PrefixSums
from .wikitext import WikiText

__all__ = [
    "DATASETS",
    "Cifar10",
    "DataError",
    "DataSet",
    "Examples",
    "Mazes",
    "PrefixSums",
    "WikiText",
    "download",
    "load",
    "settings",
]


class Entry(NamedTuple):
    """make: creates the data set from its settings. sources: its files.

    example: for a data set with files, creates a batch of one and the shapes from its settings, without the files.
    """

    make: Callable[..., DataSet]
    sources: tuple[Source, ...] = ()
    example: Callable[..., tuple[Batch, dict[str, Any]]] | None = None


DATASETS = {
    "cifar10": Entry(Cifar10, cifar10.SOURCES, cifar10.example),
    "wikitext-2": Entry(functools.partial(WikiText, "wikitext-2"), wikitext.SOURCES["wikitext-2"], wikitext.example),
    "wikitext-103": Entry(
        functools.partial(WikiText, "wikitext-103"), wikitext.SOURCES["wikitext-103"], wikitext.example
    ),
    "prefix-sums": Entry(PrefixSums),
    "mazes": Entry(Mazes),
}
"""The data sets by their name in presets."""


def settings(name: str) -> set[str]:
    """The names of a data set's settings.

    Args:
        name: A name in `DATASETS`.

    Returns:
        The arguments of its class.

    Example:
        >>> sorted(revdeq.training.data.settings("mazes"))
        ['cells', 'longest_of']
    """
    return {*inspect.signature(DATASETS[name].make).parameters} - {"folder", "saved"}


def load(name: str, folder: Path | None, chosen: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> DataSet:
    """Load a data set.

    Args:
        name: A name in `DATASETS`.
        folder: The folder of its files; None if it has none.
        chosen: Settings; those of other things are ignored.
        saved: The entry of a checkpoint, the result of `saved` of the data set.

    Returns:
        The data set.

    Raises:
        DataError: It cannot be found or read.

    Example:
        >>> revdeq.training.data.load("mazes", None, {"cells": 5}).describe()
        'mazes of 5 x 5 cells, made on the fly'
    """
    make, sources, _ = DATASETS[name]
    own: dict[str, Any] = {key: value for key, value in chosen.items() if key in settings(name)}
    if sources:
        if folder is None:
            raise DataError(f"{name} is read from files: pass their folder, --data DIR")
        own["folder"] = folder
    if saved is not None:
        own["saved"] = saved
    return make(**own)


def of(data: Any) -> DataSet:
    """Convert a pair of tensors, or a torch Dataset, to a data set."""
    return data if hasattr(data, "evaluation") else Examples(data)


def example(name: str, chosen: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """A batch of one, and the arguments that a model needs for it, without reading files."""
    make = DATASETS[name].example
    if make is not None:
        return make(**{key: value for key, value in chosen.items() if key in settings(name)})
    dataset = load(name, None, chosen)
    return dataset.batch(torch.arange(1), torch.Generator()), dataset.shapes
