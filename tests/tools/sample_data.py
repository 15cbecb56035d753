"""Generates small data sets in the official formats."""

import json
from pathlib import Path

import numpy as np

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar_records(count, seed=0):
    """Random images whose colour depends on the label, so that there is something to learn."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count, dtype=np.uint8)
    pixels = random.integers(0, 56, (count, 3, 1024), dtype=np.uint8)
    pixels[:, 0] += 20 * labels[:, None]
    pixels[:, 1] += 200 - 20 * labels[:, None]
    return labels, pixels.reshape(count, 3072)


def write_cifar_binary(folder, count=40):
    folder = Path(folder) / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for seed, name in enumerate(BATCHES):
        labels, pixels = cifar_records(count, seed)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
    return folder


def python2_pickle(labels, pixels):
    """A batch of the Python version, with the pickle opcodes of Python 2 and NumPy 1."""
    size = len(labels)

    def number(n, code=b"M", width=2):
        return code + n.to_bytes(width, "little")

    def string(s):
        return b"U" + bytes([len(s)]) + s

    return b"".join(
        [
            b"\x80\x02}(" + string(b"data"),
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R",
            b"(K\x01" + number(size) + number(3072) + b"\x86",
            b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R",
            b"(K\x03" + string(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb\x89",
            b"T" + (3072 * size).to_bytes(4, "little") + pixels.tobytes() + b"tb",
            string(b"labels") + b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"eu.",
        ]
    )


def write_encoding(folder, merges=(("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("Ġ", "an"), ("Ġan", "d"))):
    """A byte-pair encoding with 256 bytes, these merges and GPT-2's special token."""
    folder = Path(folder) / "gpt2"
    folder.mkdir(parents=True)
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    tokens = [*letters, *(a + b for a, b in merges), "<|endoftext|>"]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def sentences(count, seed=0):
    words = ["the", "fox", "and", "dog", "ran", "to", "a", "hill", ",", "<unk>", "then", "it", "sat", "."]
    chosen = np.random.default_rng(seed).choice(words, count)
    return " \n = Title = \n \n " + " ".join(chosen) + " \n "


def write_wikitext(folder, name="wikitext-2", words=1500, variant="tokens"):
    folder = Path(folder) / name
    folder.mkdir(parents=True)
    for seed, split in enumerate(("train", "valid", "test")):
        text = sentences(words if split == "train" else 200, seed)
        (folder / f"wiki.{split}.{variant}").write_text(text, encoding="utf-8")
    return folder
