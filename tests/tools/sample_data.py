"""Generates small data sets in the official formats."""

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


def write_cifar(folder, count=40):
    folder = Path(folder) / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for seed, name in enumerate(BATCHES):
        labels, pixels = cifar_records(count, seed)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
    return folder


def write_encoding(folder, merges=("t h", "th e", "Ġ the", "a n", "Ġ an", "Ġan d")):
    """A byte-pair encoding with these merges."""
    folder = Path(folder) / "gpt2"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    return folder


def sentences(count, seed=0):
    words = ["the", "fox", "and", "dog", "ran", "to", "a", "hill", ",", "<unk>", "then", "it", "sat", "."]
    chosen = np.random.default_rng(seed).choice(words, count)
    return " \n = Title = \n \n " + " ".join(chosen) + " \n "


def write_wikitext(folder, words=1500):
    folder = Path(folder) / "wikitext-2"
    folder.mkdir(parents=True)
    for seed, split in enumerate(("train", "valid", "test")):
        text = sentences(words if split == "train" else 200, seed)
        (folder / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")
    return folder
