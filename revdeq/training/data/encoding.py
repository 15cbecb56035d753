"""GPT-2's byte-pair encoding, from the file of its merges."""

from pathlib import Path

import numpy as np
import tiktoken

from .files import DataError, Source, find

PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
END_OF_TEXT = "<|endoftext|>"
FILE = "vocab.bpe"
URL = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{FILE}"
SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
SOURCES = (Source(f"gpt2/{FILE}", URL, "sha256", SHA256),)


def load(folder: Path) -> tuple[Path, tiktoken.Encoding]:
    """The file in `folder`, or in gpt2 inside it or beside it, and its encoding: the 256 bytes, then the result of each
    merge, then the end of a text."""
    file = find(folder, ("", "gpt2", "../gpt2"), FILE, SOURCES) / FILE
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]  # which the file writes as the characters from 256 on
    bytes_ = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    tokens = [bytes([b]) for b in bytes_.values()]
    try:
        for line in file.read_text(encoding="utf-8").splitlines()[1:]:  # the first line is the version
            first, second = line.split()
            tokens.append(bytes(bytes_[character] for character in first + second))
    except (KeyError, ValueError) as error:
        raise DataError(f"{file} is not GPT-2's, whose sha256 is {SHA256}: download it again") from error
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(ranks)}
    return file, tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def encode(text: str, encoding: tiktoken.Encoding) -> np.ndarray:
    """The tokens of a text, in which the end of a text is ordinary text, too."""
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
