"""WikiText-2 and WikiText-103 as tokens of GPT-2's byte-pair encoding.

Reads the official files, packed or unpacked: wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens (words, with <unk>)
or the same names with .raw. The tokens are cached in memory-mapped files in $REVDEQ_CACHE or ~/.cache/revdeq, named
by the checksum of their source.

A model may have a smaller vocabulary than GPT-2's 50,257 tokens, which dominate the time and parameters of small
models: vocabulary="seen" keeps those that occur in the training data, vocabulary=8192 the most frequent of them, and
all others share one more id. The perplexity is still that of all tokens: a token t among the others counts as
p(others) p(t | others), where p(t | others) is its frequency in the training data (plus one, for tokens that never
occur there). The term that this adds to the loss is the `surcharge`.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._atomic import replacing
from . import download, encoding
from .dataset import PERPLEXITY, Batch
from .download import Source
from .files import DataError, checksum, is_archive, read, stored

SPLITS = ("train", "valid", "test")
VARIANTS = ("tokens", "raw")
SOURCES = {
    name: (
        Source(
            f"{name}-v1.zip",
            (
                f"https://wikitext.smerity.com/{name}-v1.zip",
                f"https://s3.amazonaws.com/research.metamind.io/wikitext/{name}-v1.zip",
            ),
            "md5",
            md5,
        ),
        *encoding.SOURCES,
    )
    for name, md5 in (
        ("wikitext-2", "542ccefacc6c27f945fb54453812b3cd"),
        ("wikitext-103", "9ddaacaf6af0710eda8c456decff7832"),
    )
}
PADDED_TO = 128
"""The full vocabulary is rounded up to a multiple of this, 50,304 for GPT-2, which is faster on GPUs."""


class WikiText:
    """WikiText: the tokens of its three splits, cut into sequences and mapped to the ids of a vocabulary.

    Args:
        name: "wikitext-2" or "wikitext-103".
        folder: The folder of its files and of GPT-2's encoding, packed or unpacked.
        length: The number of tokens in a sequence.
        vocabulary: "full" for all tokens, "seen" for those of the training data, or a number for the most frequent.
            The loss includes the others, so that the perplexity is that of all tokens.
        saved: The vocabulary of a checkpoint.

    Raises:
        DataError: The files are missing, invalid or too short.

    Example:
        >>> dataset = revdeq.training.data.WikiText("wikitext-2", Path("data"), length=32)
        >>> dataset.batch(torch.arange(2), torch.Generator()).inputs.shape
        torch.Size([2, 32])
    """

    unit = "tokens"
    metric = PERPLEXITY
    splits: tuple[str, ...] = ("valid", "test")
    validation = "valid"

    def __init__(
        self,
        name: str,
        folder: Path,
        length: int = 512,
        vocabulary: str | int = "full",
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise DataError(f"length={length!r}: it must be an integer of at least 1")
        place, variant = find(name, folder)
        encoder = encoding.find(folder)
        self.name, self.source, self.encoding, self.length = name, place, encoder, length
        self.tokens = {split: tokens(place, f"wiki.{split}.{variant}", encoder) for split in SPLITS}
        if saved is not None:
            self.vocabulary = Vocabulary.restored(saved)
        else:
            self.vocabulary = Vocabulary.of(self.tokens["train"], vocabulary, encoder)
        for split, found in self.tokens.items():
            if len(found) < 2 * length:
                raise DataError(
                    f"{place}'s {split} has {len(found):,} tokens, too few for sequences of {length}: set a smaller "
                    "length"
                )
        self.device = torch.device("cpu")

    @property
    def size(self) -> int:
        """Sequences per epoch: one fewer than fit, so that an epoch can start at a random offset."""
        return (len(self.tokens["train"]) - self.length) // self.length

    @property
    def units(self) -> int:
        return self.length

    @property
    def shapes(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary.size}

    def describe(self) -> str:
        counts = " / ".join(f"{len(self.tokens[split]):,}" for split in SPLITS)
        return f"{self.name} from {self.source}: {counts} tokens (train / valid / test), {self.vocabulary.describe()}"

    def to(self, device: torch.device) -> "WikiText":
        self.device = device
        return self

    def order(self, generator: torch.Generator) -> Tensor:
        # The starts of the sequences.
        offset = torch.randint(self.length, (), generator=generator)
        return offset + self.length * torch.randperm(self.size, generator=generator)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self._sequences("train", indices.numpy(), self.length)

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        # Every token but the first, once, in independent sequences.
        count = len(self.tokens[split]) - 1
        starts = np.arange(0, count - self.length + 1, self.length)
        for i in range(0, len(starts), batch):
            yield self._sequences(split, starts[i : i + batch], self.length)
        if rest := count % self.length:
            yield self._sequences(split, np.array([count - rest]), rest)

    def saved(self) -> dict[str, Any] | None:
        return None if self.vocabulary.complete else self.vocabulary.saved()

    def _sequences(self, split: str, starts: np.ndarray, length: int) -> Batch:
        found = self.tokens[split][starts[:, None] + np.arange(length + 1)]
        ids = torch.from_numpy(self.vocabulary.ids[found]).to(self.device)
        return Batch(ids[:, :-1], ids[:, 1:], float(self.vocabulary.surcharge[found[:, 1:]].sum()))


def example(length: int = 512, vocabulary: str | int = "full") -> tuple[Batch, dict[str, Any]]:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    size = vocabulary + 1 if isinstance(vocabulary, int) else -(-encoding.TOKENS // PADDED_TO) * PADDED_TO
    return Batch(tokens, tokens), {"vocabulary": size}


class Vocabulary:
    """Maps the tokens of an encoding to the ids of a model.

    kept: the token of every id; all other tokens have the id len(kept).
    surcharge: -log p(t | the id of t) for every token t of the encoding.
    """

    def __init__(self, kept: np.ndarray, surcharge: np.ndarray) -> None:
        self.kept, self.surcharge, self.encoded = kept, surcharge, len(surcharge)
        self.complete = len(kept) == self.encoded
        self.ids = np.full(self.encoded, len(kept), np.int64)
        self.ids[kept] = np.arange(len(kept))
        self.size = -(-self.encoded // PADDED_TO) * PADDED_TO if self.complete else len(kept) + 1

    @classmethod
    def full(cls, encoded: int) -> "Vocabulary":
        return cls(np.arange(encoded), np.zeros(encoded))

    @classmethod
    def of(cls, train: np.ndarray, choice: str | int, encoder: Path) -> "Vocabulary":
        encoded = encoding.load(encoder).n_vocab
        if choice == "full":
            return cls.full(encoded)
        counts = np.bincount(train, minlength=encoded)
        kept = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        if choice != "seen":
            if not isinstance(choice, int) or isinstance(choice, bool) or choice < 1:
                raise DataError(
                    f"vocabulary={choice!r}: it must be full, seen (the tokens of the training data), or the number "
                    f"of most frequent tokens to keep"
                )
            kept = kept[:choice]
        frequency = counts + 1.0
        frequency[kept] = 0
        others = np.flatnonzero(frequency)
        surcharge = np.zeros(encoded)
        surcharge[others] = np.log(frequency.sum()) - np.log(frequency[others])
        return cls(kept, surcharge)

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Vocabulary":
        return cls(saved["kept"].numpy(), saved["surcharge"].numpy())

    def saved(self) -> dict[str, Any]:
        return {"kept": torch.from_numpy(self.kept.copy()), "surcharge": torch.from_numpy(self.surcharge)}

    def describe(self) -> str:
        return f"all {self.encoded:,} tokens" if self.complete else f"{len(self.kept):,} of {self.encoded:,} tokens"


def find(name: str, folder: Path) -> tuple[Path, str]:
    """The path of the data set in `folder`, and its variant, tokens or raw."""
    names = [name, f"{name}-v1", f"{name}-raw", f"{name}-raw-v1"]
    for place in (folder, *(folder / (name + suffix) for name in names for suffix in ("", ".zip"))):
        if is_archive(place):
            return place, "raw" if "raw" in place.name else "tokens"
        for variant in VARIANTS:
            if stored(place, f"wiki.train.{variant}"):
                return place, variant
    raise DataError(f"no {name} in {folder}.\n{download.instructions(SOURCES[name][:1], folder)}")


def tokens(place: Path, name: str, encoder: Path) -> np.ndarray:
    """The tokens of a file, memory-mapped; encoded first if they are not cached."""
    file = stored(place, name)
    if file is None:
        raise DataError(f"{place} has no {name}, plain or compressed, which belongs to the data set")
    identity = hashlib.sha256(f"{name} 1".encode())  # 1: the version of the encoding
    for source in (file, *(encoder / part for part in encoding.FILES)):
        identity.update(checksum(source))
    cached = cache_folder() / f"{name}-{identity.hexdigest()[:24]}.npy"
    if (found := _mapped(cached)) is not None:
        return found
    encoded = encoding.encode(text(place, name), encoding.load(encoder))
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cached) as target:
            np.save(target, encoded)
    except OSError as error:
        raise DataError(
            f"the tokens of {file} cannot be cached in {cached} ({error.strerror or error}, {encoded.nbytes:,} bytes): "
            f"set REVDEQ_CACHE to a folder with enough space"
        ) from error
    return np.load(cached, mmap_mode="r")


def text(place: Path, name: str) -> str:
    found = read(place, [name])
    where = f"{place / name}"
    if name not in found:
        raise DataError(f"{place} has no {name}, which belongs to the data set")
    try:
        content = found[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text at byte {error.start:,}: damaged, or still compressed?") from error
    if not content.strip():
        raise DataError(f"{where} is empty: expected the text of the data set")
    if content.lstrip()[:14].lower().startswith(("<!doctype", "<html")):
        raise DataError(f"{where} is a web page: a failed download? Expected the text of the data set")
    return content


def cache_folder() -> Path:
    if chosen := os.environ.get("REVDEQ_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "revdeq"


def _mapped(cached: Path) -> np.ndarray | None:
    """The cached tokens; None if the file does not exist or is damaged."""
    try:
        found = np.load(cached, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if found.dtype == np.uint16 and found.ndim == 1 else None
