"""The data sets of the paper's experiments, read from their official files."""

from pathlib import Path

from . import download
from .cifar10 import Cifar10
from .files import DataError
from .wikitext import Vocabulary, WikiText

__all__ = ["Cifar10", "DataError", "Vocabulary", "WikiText", "download", "load"]


def load(name: str, folder: Path, length: int = 0, vocabulary: str | int | Vocabulary = "full") -> Cifar10 | WikiText:
    """The data set called cifar10, wikitext-2 or wikitext-103 in `folder`; length and vocabulary are for text."""
    return Cifar10(folder) if name == "cifar10" else WikiText(name, folder, length, vocabulary)
