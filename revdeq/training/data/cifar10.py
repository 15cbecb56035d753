"""CIFAR-10 in its binary version, and its augmentation.

A record has 3,073 bytes: the label, then 32 x 32 pixels of red, green and blue. The official files have 10,000 records;
fewer are accepted.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .dataset import ACCURACY, Batch, DataSet
from .files import DataError, Source, find, read

CLASSES, SIDE, PADDING = 10, 32, 4
RECORD = 1 + 3 * SIDE * SIDE
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
FILES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
PACKED = "cifar-10-binary.tar.gz"
PLACES = ("", "cifar-10-batches-bin", PACKED)
SOURCES = (Source(PACKED, f"https://www.cs.toronto.edu/~kriz/{PACKED}", "md5", "c32a1d4ab5d03f1284b67883e8d87530"),)


class Cifar10(DataSet):
    """CIFAR-10: images of 32 x 32 pixels in ten classes.

    Args:
        folder: The folder of its files, packed or unpacked.
        held_out: With k, every k-th training image is held out for the split "valid". None trains on all images; there
            is then no such split, and the best model is chosen on the test images.
    """

    unit, metric = "images", ACCURACY

    def __init__(self, folder: Path, held_out: int | None = 10) -> None:
        self.shapes = {"classes": CLASSES}
        self.source = find(folder, PLACES, FILES[0], SOURCES)
        contents = read(self.source, FILES)
        parts = [records(content, self.source / name) for content, name in zip(contents, FILES, strict=True)]
        images, labels = (torch.cat(part) for part in zip(*parts[:-1], strict=True))
        if held_out is not None and (type(held_out) is not int or not 2 <= held_out <= len(labels)):
            raise DataError(f"held_out={held_out!r}: it must be none, or an integer from 2 to {len(labels):,}")
        held = torch.zeros(len(labels), dtype=torch.bool)
        if held_out is not None:
            held[held_out - 1 :: held_out] = True
        self.parts = {"train": (images[~held], labels[~held]), "valid": (images[held], labels[held]), "test": parts[-1]}
        self.splits = ("valid", "test") if held.any() else ("test",)
        self.size = len(self.parts["train"][1])

    def to(self, device: torch.device) -> None:
        self.parts = {name: (images.to(device), labels.to(device)) for name, (images, labels) in self.parts.items()}

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        images, labels = self.parts["train"]
        indices = indices.to(labels.device)
        return Batch(normalise(augment(images[indices], generator)), labels[indices])

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        for images, labels in zip(*(part.split(batch) for part in self.parts[split]), strict=True):
            yield Batch(normalise(images), labels)


def records(content: bytes, file: Path) -> tuple[Tensor, Tensor]:
    if not content or len(content) % RECORD:
        raise DataError(
            f"{file} has {len(content):,} bytes, which are no whole records of {RECORD:,} bytes: it is truncated, or "
            "not CIFAR-10's binary version"
        )
    bytes_ = torch.from_numpy(np.frombuffer(content, np.uint8).reshape(-1, RECORD).copy())
    if (largest := int(bytes_[:, 0].max())) >= CLASSES:
        raise DataError(f"{file} has the label {largest}, and CIFAR-10's are 0 to 9: is it CIFAR-100?")
    return bytes_[:, 1:].reshape(-1, 3, SIDE, SIDE), bytes_[:, 0].long()


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random crops after padding with 4 black pixels, and random flips, in one gather."""

    def draw(high: int) -> Tensor:
        # drawn on the CPU, so that a seed gives the same images on every device
        return torch.randint(high, (len(images), 1), generator=generator).to(images.device)

    pixels = torch.arange(SIDE, device=images.device)
    rows, columns = draw(2 * PADDING + 1) + pixels, draw(2 * PADDING + 1) + pixels
    columns = torch.where(draw(2) == 1, columns.flip(1), columns)
    batch = torch.arange(len(images), device=images.device)
    padded = F.pad(images, [PADDING] * 4)
    return padded[batch[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def normalise(images: Tensor) -> Tensor:
    """uint8 to float32 with mean 0 and standard deviation 1 in every channel of the official training images."""
    mean, std = (torch.tensor(c, device=images.device).view(3, 1, 1) for c in (MEAN, STD))
    return (images.float() / 255 - mean) / std
