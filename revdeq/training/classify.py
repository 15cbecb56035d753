"""Classification of the user's images by a model that was trained on CIFAR-10."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .checkpoint import CheckpointError
from .data import DataError
from .data.cifar10 import NAMES, SIDE, normalise
from .processes import Processes
from .restore import loaded

__all__ = ["Guess", "classify", "images_in"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


class Guess(NamedTuple):
    """The predicted class of an image.

    Attributes:
        file: The image.
        name: The most likely class.
        probability: Its predicted probability.

    Example:
        >>> from revdeq.training.classify import Guess
        >>> Guess(Path("tabby.png"), "cat", 0.9).name
        'cat'
    """

    file: Path
    name: str
    probability: float


def classify(
    run: str | Path,
    images: Sequence[Path],
    changes: Mapping[str, Any] | None = None,
    device: str | None = None,
    batch: int = 64,
) -> Iterator[Guess]:
    """Classify images with a model that was trained on CIFAR-10.

    Images are cropped to the central square and resized to 32 x 32 pixels. Transparent parts become white.

    Args:
        run: As for `revdeq.models.load`.
        images: The files, or folders of files.
        changes: Settings that override those of the training, max_steps for example.
        device: Such as "cpu" or "cuda:1". None is a GPU, if there is one.
        batch: The batch size.

    Returns:
        An iterator with a `Guess` for each image.

    Raises:
        CheckpointError: The model does not classify images.
        DataError: There is no image; or, after all others, an image cannot be read.

    Example:
        >>> from PIL import Image
        >>> from revdeq.training.classify import classify
        >>> Image.new("RGB", (300, 200), "blue").save("sky.png")
        >>> small = {"updates": 2, "batch": 8, "evaluation_batches": 1}
        >>> rows = revdeq.train("cifar10-tiny", "data", "runs/images", device="cpu", quiet=True, **small)
        >>> [guess.file.name for guess in classify("runs/images", [Path("sky.png")])]
        ['sky.png']
    """
    files = [file for place in images for file in images_in(Path(place))]
    where = Processes(device).device
    preset, model, _ = loaded(Path(run), None, changes, where)
    if preset.data != "cifar10":
        raise CheckpointError(f"{run} was trained as {preset.name}: only models for cifar10 classify images")
    return _guesses(model, files, where, batch)


def _guesses(model: torch.nn.Module, files: list[Path], device: torch.device, batch: int) -> Iterator[Guess]:
    """Raises for unreadable images after all others are classified."""
    wrong = []
    for start in range(0, len(files), batch):
        images = {}
        for file in files[start : start + batch]:
            try:
                images[file] = read(file)
            except DataError as error:
                wrong.append(error)
        if not images:
            continue
        with torch.no_grad():
            likeliest = model(normalise(torch.stack([*images.values()]).to(device))).float().softmax(1).max(1)
        for file, probability, chosen in zip(
            images, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True
        ):
            yield Guess(file, NAMES[chosen], probability)
    if wrong:
        raise DataError("\n".join(map(str, wrong))) from wrong[0]


def images_in(place: Path) -> list[Path]:
    """The images in a folder, or a single image.

    Args:
        place: A folder, or a file.

    Returns:
        The files, sorted by name.

    Raises:
        DataError: There are none.

    Example:
        >>> from PIL import Image
        >>> from revdeq.training.classify import images_in
        >>> Image.new("RGB", (32, 32)).save("one.png")
        >>> images_in(Path("one.png"))
        [...Path('one.png')]
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise DataError(f"there is no image or folder {place}")
    if not (found := sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES)):
        raise DataError(f"{place} contains no image: expected files that end in {', '.join(SUFFIXES)} are read")
    return found


def read(file: Path) -> Tensor:
    """The pixels of an image, (3, 32, 32) bytes."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image: Any = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
                image = Image.fromarray((np.asarray(image) / 257).clip(0, 255).round().astype(np.uint8))
            image = image.convert("RGBA")
    except Exception as error:  # decoders raise all kinds of errors for damaged files
        raise DataError(f"{file} is not a readable image: {error}") from error
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
