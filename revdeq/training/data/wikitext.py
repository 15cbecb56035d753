"""WikiText-2 and WikiText-103 as tokens of GPT-2's byte-pair encoding.

The tokens are cached in memory-mapped files in $REVDEQ_CACHE or ~/.cache/revdeq.

GPT-2's 50,257 tokens dominate the time and the parameters of small models. With vocabulary=8192, a model knows the most
frequent tokens of the training data, and all others share one more id. The perplexity is still that of all tokens: one
of the others, t, counts as p(others) p(t | others), where p(t | others) is its frequency in the training data, plus one
for tokens that never occur there. The term that this adds to the loss is the `surcharge`.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..._atomic import replacing
from . import encoding
from .dataset import PERPLEXITY, Batch, DataSet, checked
from .files import DataError, Source, find, read, stored

SPLITS = ("train", "valid", "test")
MD5 = {"wikitext-2": "542ccefacc6c27f945fb54453812b3cd", "wikitext-103": "9ddaacaf6af0710eda8c456decff7832"}
SOURCES = {
    name: (Source(f"{name}-v1.zip", f"https://wikitext.smerity.com/{name}-v1.zip", "md5", md5), *encoding.SOURCES)
    for name, md5 in MD5.items()
}
PADDED_TO = 128
"""The full vocabulary is rounded up to a multiple of this, 50,304 for GPT-2, which is faster on GPUs."""


class WikiText(DataSet):
    """WikiText: the tokens of its three splits, cut into sequences and mapped to the ids of a vocabulary.

    Args:
        name: "wikitext-2" or "wikitext-103".
        folder: The folder of its files, packed or unpacked, and of GPT-2's vocab.bpe.
        length: The number of tokens in a sequence.
        vocabulary: "full" for all tokens, or a number for the most frequent ones. The loss includes the others, so that
            the perplexity is that of all tokens.
    """

    unit, metric = "tokens", PERPLEXITY

    def __init__(self, name: str, folder: Path, length: int = 512, vocabulary: str | int = "full") -> None:
        places = ("", name, f"{name}-v1", f"{name}.zip", f"{name}-v1.zip")
        self.source = find(folder, places, "wiki.train.tokens", SOURCES[name][:1])
        self.merges, self.encoding = encoding.load(folder)
        self.length = checked("length", length)
        self.tokens = {split: self._tokens(f"wiki.{split}.tokens") for split in SPLITS}
        if short := [split for split, found in self.tokens.items() if len(found) < 2 * length]:
            raise DataError(f"length={length}: {self.source} has too few tokens in {short[0]}; set a smaller length")
        self.vocabulary = Vocabulary(self.tokens["train"], vocabulary, self.encoding.n_vocab)
        self.shapes = {"vocabulary": self.vocabulary.size}
        self.size = len(self.tokens["train"]) // length - 1  # one fewer, so that an epoch starts at a random offset

    def order(self, generator: torch.Generator) -> Tensor:
        offset = torch.randint(self.length, (), generator=generator)
        return offset + self.length * super().order(generator)  # the starts of the sequences

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

    def _sequences(self, split: str, starts: np.ndarray, length: int) -> Batch:
        found = self.tokens[split][starts[:, None] + np.arange(length + 1)]
        ids = torch.from_numpy(self.vocabulary.ids[found]).to(self.device)
        return Batch(ids[:, :-1], ids[:, 1:], float(self.vocabulary.surcharge[found[:, 1:]].sum()))

    def _tokens(self, name: str) -> np.ndarray:
        """The tokens of a file, memory-mapped; encoded first if they are not cached."""
        sources = [stored(self.source, name) or self.source, self.merges]
        known = [name, *((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sources)]
        cache = Path(os.environ.get("REVDEQ_CACHE") or Path.home() / ".cache" / "revdeq")
        cached = cache / f"{name}-{hashlib.sha256(repr(known).encode()).hexdigest()[:24]}.npy"
        if not cached.exists():
            try:
                text = read(self.source, [name])[0].decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{self.source / name} is damaged: it is not UTF-8 at byte {error.start:,}") from error
            cache.mkdir(parents=True, exist_ok=True)
            with replacing(cached) as target:
                np.save(target, encoding.encode(text, self.encoding))
        return np.load(cached, mmap_mode="r")


class Vocabulary:
    """Maps the tokens of an encoding to the ids of a model.

    kept: the token of every id; all other tokens have the id len(kept).
    surcharge: -log p(t | the id of t) for every token t of the encoding.
    """

    def __init__(self, train: np.ndarray, choice: str | int, encoded: int) -> None:
        if choice != "full" and (type(choice) is not int or choice < 1):
            raise DataError(f"vocabulary={choice!r}: it must be full, or the number of most frequent tokens to keep")
        self.kept, self.surcharge = np.arange(encoded), np.zeros(encoded)
        if isinstance(choice, int):
            counts = np.bincount(train, minlength=encoded)
            self.kept = np.argsort(-counts, kind="stable")[:choice]
            others = np.ones(encoded, bool)
            others[self.kept] = False
            frequency = counts[others] + 1.0
            self.surcharge[others] = np.log(frequency.sum()) - np.log(frequency)
        self.ids = np.full(encoded, len(self.kept), np.int64)
        self.ids[self.kept] = np.arange(len(self.kept))
        self.size = len(self.kept) + 1 if choice != "full" else -(-encoded // PADDED_TO) * PADDED_TO
