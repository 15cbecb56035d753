"""GPT-2's byte-pair encoding, from the two files that OpenAI published; nothing is downloaded."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import download
from .download import Source
from .files import DataError

if TYPE_CHECKING:
    import tiktoken

PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
END_OF_TEXT = "<|endoftext|>"
FILES = ("vocab.bpe", "encoder.json")
PUBLISHED = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
SOURCES = (
    Source(
        "gpt2/encoder.json",
        (f"{PUBLISHED}/encoder.json",),
        "sha256",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    Source(
        "gpt2/vocab.bpe",
        (f"{PUBLISHED}/vocab.bpe",),
        "sha256",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
)
TOKENS = 50_257
"""Of GPT-2."""
CHUNK = 1 << 20  # characters that a thread encodes


def find(folder: Path) -> Path:
    """The folder of the encoding: `folder` itself, or gpt2 inside it or beside it."""
    for place in (folder, folder / "gpt2", folder.parent / "gpt2"):
        if all((place / name).is_file() for name in FILES):
            return place
    raise DataError(f"no GPT-2 encoding in {folder}.\n{download.instructions(SOURCES, folder)}")


def load(folder: Path) -> "tiktoken.Encoding":
    """The encoding whose files are in `folder`."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    vocab, encoder = (folder / name for name in FILES)
    try:
        with _no_cache():
            ranks = data_gym_to_mergeable_bpe_ranks(str(vocab), str(encoder))
    except (AssertionError, AttributeError, KeyError, UnicodeDecodeError, ValueError) as error:
        # AssertionError: the merges and the tokens do not match
        expected = "\n".join(f"  {s.place}: sha256 {s.checksum}" for s in SOURCES)
        raise DataError(
            f"{vocab} and {encoder} are not a byte-pair encoding, or do not match ({type(error).__name__}: "
            f"{error}). GPT-2's are\n{expected}"
        ) from error
    if len(ranks) >= 1 << 16:
        raise DataError(f"{encoder} has {len(ranks):,} tokens, more than 16 bits can hold: GPT-2 has 50,257")
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Without this, tiktoken would cache the files in a temporary folder and not notice changes."""
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    try:
        yield
    finally:
        os.environ.pop("TIKTOKEN_CACHE_DIR")
        if before is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def encode(text: str, encoding: "tiktoken.Encoding") -> np.ndarray:
    """The tokens of a text, as uint16."""
    parts = encoding.encode_ordinary_batch(chunks(text), num_threads=os.cpu_count() or 1)
    return np.concatenate([np.array(part, np.uint16) for part in parts])


def chunks(text: str, size: int = CHUNK) -> list[str]:
    """Split a text between words: no token contains the end of a word and the space after it."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find(" ", start + size)
        while end > 0 and text[end - 1].isspace():
            end = text.find(" ", end + 1)
        end = end if end > 0 else len(text)
        pieces.append(text[start:end])
        start = end
    return pieces
