"""CIFAR-10, and its augmentation.

Reads the official archives, binary or Python version, packed or unpacked. A record of the binary version has 3,073
bytes: the label, then 32x32 pixels of red, green and blue. Files with fewer than the official 10,000 records are
accepted.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import download
from .dataset import ACCURACY, Batch
from .download import Source
from .files import DataError, is_archive, read, stored

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES = len(NAMES)
SIDE = 32
PIXELS = 3 * SIDE * SIDE
RECORD = 1 + PIXELS
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PADDING = 4

SOURCES = (
    Source(
        "cifar-10-binary.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        "md5",
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
)
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
TEST = "test_batch"
PLACES = (
    "",
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "cifar-10-binary.tar.gz",
    "cifar-10-python.tar.gz",
)


class Cifar10:
    """CIFAR-10: images of 32 x 32 pixels in ten classes.

    Args:
        folder: The folder of its files, binary or Python version, packed or unpacked.
        held_out: With k, every k-th training image is held out for the split "valid". None trains on all images; there
            is then no such split, and the best model is chosen on the test images.

    Raises:
        DataError: The files are missing or invalid.

    Example:
        >>> dataset = revdeq.training.data.Cifar10(Path("data"))
        >>> dataset.batch(torch.arange(2), torch.Generator()).inputs.shape
        torch.Size([2, 3, 32, 32])
    """

    unit = "images"
    metric = ACCURACY
    units = 1

    def __init__(self, folder: Path, held_out: int | None = 10) -> None:
        place = find(folder)
        contents = read(place, [*TRAIN, TEST, *(f"{name}.bin" for name in [*TRAIN, TEST])])
        parts = []
        for name in [*TRAIN, TEST]:
            if f"{name}.bin" in contents:
                parts.append(from_binary(contents[f"{name}.bin"], f"{place / name}.bin"))
            elif name in contents:
                parts.append(from_pickle(contents[name], str(place / name)))
            else:
                raise DataError(
                    f"{place} contains {', '.join(sorted(contents)) or 'no batch'}, but not {name}.bin (binary "
                    f"version) or {name} (Python version): CIFAR-10 is {TRAIN[0]} to {TRAIN[-1]} and {TEST}"
                )
        images, labels = (torch.cat(part) for part in zip(*parts[:-1], strict=True))
        self.images, self.labels = images, labels
        self.evaluated = {"test": parts[-1]}
        self.source, self.whole = place, (len(labels), len(parts[-1][1])) == (50_000, 10_000)
        if held_out is not None:
            if not isinstance(held_out, int) or not 2 <= held_out <= len(labels):
                raise DataError(f"held_out={held_out!r}: it must be none, or an integer from 2 to {len(labels):,}")
            valid = torch.arange(len(labels)) % held_out == held_out - 1
            self.images, self.labels = images[~valid], labels[~valid]
            self.evaluated = {"valid": (images[valid], labels[valid]), **self.evaluated}
        self.splits = tuple(self.evaluated)
        self.validation = self.splits[0]

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def shapes(self) -> dict[str, Any]:
        return {"classes": CLASSES}

    def describe(self) -> str:
        sizes = {"training": self.size, **{split: len(labels) for split, (_, labels) in self.evaluated.items()}}
        return (
            f"CIFAR-10 from {self.source}: {', '.join(f'{size:,} {split}' for split, size in sizes.items())} images"
            f"{'' if self.whole else ' (a subset: the official files have 50,000 training and 10,000 test images)'}"
        )

    def to(self, device: torch.device) -> "Cifar10":
        # 184 MB for the official files.
        self.images, self.labels = self.images.to(device), self.labels.to(device)
        self.evaluated = {split: (x.to(device), y.to(device)) for split, (x, y) in self.evaluated.items()}
        return self

    def order(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.size, generator=generator)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        indices = indices.to(self.labels.device)
        return Batch(normalise(augment(self.images[indices], generator)), self.labels[indices])

    def evaluation(self, split: str, batch: int) -> Iterator[Batch]:
        for images, labels in zip(*(part.split(batch) for part in self.evaluated[split]), strict=True):
            yield Batch(normalise(images), labels)

    def saved(self) -> None:
        return None


def example(**_: Any) -> tuple[Batch, dict[str, Any]]:
    return Batch(torch.zeros(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.int64)), {"classes": CLASSES}


def find(folder: Path) -> Path:
    for place in [folder / place for place in PLACES]:
        if is_archive(place) or any(stored(place, name) for name in (TRAIN[0], f"{TRAIN[0]}.bin")):
            return place
    raise DataError(f"no CIFAR-10 in {folder}.\n{download.instructions(SOURCES, folder)}")


def from_binary(content: bytes, name: str) -> tuple[Tensor, Tensor]:
    if len(content) == 0 or len(content) % RECORD:
        raise DataError(
            f"{name} has {len(content):,} bytes, which is not a whole number of CIFAR-10 records of {RECORD:,} bytes "
            f"(the official file has 10,000 records, {10_000 * RECORD:,} bytes): it is truncated or not CIFAR-10"
        )
    records = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).view(-1, RECORD)
    return checked(records[:, 1:], records[:, 0], name)


def from_pickle(content: bytes, name: str) -> tuple[Tensor, Tensor]:
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except DataError as error:
        raise DataError(f"{name} {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(
            f"{name} is not a batch of CIFAR-10's Python version (a pickled dict with b'data' and b'labels'): {error!r}"
        ) from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS) or not len(labels):
        raise DataError(
            f"{name} has data of shape {pixels.shape} and {pixels.dtype} with {len(labels)} labels: expected uint8 "
            f"of shape (records, {PIXELS:,}) and as many labels"
        )
    return checked(torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64)), name)


def checked(pixels: Tensor, labels: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(
            f"{name} has the label {labels[(labels < 0) | (labels >= CLASSES)][0].item()}: CIFAR-10's are 0 to 9 (is "
            f"this CIFAR-100, or are its bytes shifted?)"
        )
    return pixels.reshape(-1, 3, SIDE, SIDE), labels.long()


class ArrayUnpickler(pickle.Unpickler):
    """Loads only numbers, strings, containers and NumPy arrays of bytes, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # its location depends on the version of NumPy
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return byte_dtype
        if (module, name) == ("_codecs", "encode"):  # how Python 3 pickles bytes for Python 2
            return lambda text, encoding: text.encode("latin1")
        raise DataError(
            f"imports {module}.{name}, which no CIFAR-10 batch needs: it may be malicious, and was not read"
        )


def byte_dtype(name: str | bytes, *_: Any) -> Any:
    if name not in ("u1", b"u1"):
        raise DataError(f"has an array of dtype {name!r}: expected u1, bytes")
    return np.dtype("u1")


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random crops after padding with 4 black pixels, and random flips, in one gather."""
    count, _, height, width = images.shape

    def draw(high: int) -> Tensor:
        # drawn on the CPU, so that a seed gives the same images on every device
        return torch.randint(high, (count, 1), generator=generator).to(images.device)

    rows = draw(2 * PADDING + 1) + torch.arange(height, device=images.device)
    columns = draw(2 * PADDING + 1) + torch.arange(width, device=images.device)
    columns = torch.where(draw(2) == 1, columns.flip(1), columns)
    padded = F.pad(images, [PADDING] * 4)
    batch = torch.arange(count, device=images.device)
    gathered = padded[batch[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return gathered.permute(0, 3, 1, 2).contiguous()


def normalise(images: Tensor) -> Tensor:
    """uint8 to float32 with mean 0 and standard deviation 1 in every channel of the official training images."""
    mean, std = (torch.tensor(c, device=images.device).view(3, 1, 1) for c in (MEAN, STD))
    return (images.float() / 255 - mean) / std
