"""Data sets: those of the paper, read from their official files, and generated puzzles."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import cifar10, wikitext
from .cifar10 import Cifar10
from .dataset import DataSet
from .files import DataError, Source, download
from .puzzles import Mazes, PrefixSums
from .wikitext import WikiText

__all__ = ["DATASETS", "Cifar10", "DataError", "DataSet", "Mazes", "PrefixSums", "WikiText", "download", "load"]


class Entry(NamedTuple):
    """make: creates the data set from its settings. sources: its files; none if it is generated."""

    make: Callable[..., DataSet]
    sources: tuple[Source, ...] = ()

    @property
    def settings(self) -> set[str]:
        return {*inspect.signature(self.make).parameters} - {"folder"}


DATASETS = {
    "cifar10": Entry(Cifar10, cifar10.SOURCES),
    "wikitext-2": Entry(functools.partial(WikiText, "wikitext-2"), wikitext.SOURCES["wikitext-2"]),
    "wikitext-103": Entry(functools.partial(WikiText, "wikitext-103"), wikitext.SOURCES["wikitext-103"]),
    "prefix-sums": Entry(PrefixSums),
    "mazes": Entry(Mazes),
}
"""The data sets by their name in presets."""


def load(name: str, folder: Path | None, settings: Mapping[str, Any]) -> DataSet:
    """Load a data set from the files in a folder, with those of these settings that it has."""
    entry = DATASETS[name]
    own: dict[str, Any] = {key: value for key, value in settings.items() if key in entry.settings}
    if entry.sources:
        if folder is None:
            raise DataError(f"{name} is read from files: pass their folder, --data DIR")
        own["folder"] = folder
    return entry.make(**own)
