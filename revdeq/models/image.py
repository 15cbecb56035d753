"""The paper's image models. To use an f of your own, pass SingleScale(block=MyBlock), where MyBlock(channels, width) is
a module f(z, x)."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .. import RevDEQ
from .blocks import FORMS, ConvBlock, PreActivation, checked_form, checked_size, group_norm, unrounded

POOLED = 4
"""The side of the image that the single-scale model classifies."""


class SingleScale(nn.Module):
    """A 3x3 convolution with GroupNorm, the equilibrium of a `ConvBlock` (equation 8 of the paper), average pooling
    to 4x4, and a linear layer: images (B, 3, H, W) to logits (B, classes).

    The defaults are the paper's, which states 170K parameters; its hyperparameters give 160,138.

    Args:
        channels: Of the block.
        width: Of the block.
        classes: The number of classes.
        form: "paper", or "authors" for the block of the authors' code.
        block: A class or function that returns another f, given `channels` and `width`. None is `ConvBlock`.
        max_steps: As for `revdeq.RevDEQ`.
        beta: As for `revdeq.RevDEQ`.
        options: Other options of `revdeq.RevDEQ`, by name.

    Example:
        >>> revdeq.models.SingleScale(channels=16)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        channels: int = 64,
        width: int = 2,
        classes: int = 10,
        form: str = "paper",
        block: Callable[[int, int], nn.Module] | None = None,
        max_steps: int = 4,
        beta: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__()
        checked_size("channels", channels), checked_size("classes", classes), checked_form(form, FORMS)
        f = ConvBlock(channels, width, form) if block is None else block(channels, width)
        self.encode = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), group_norm(channels))
        self.equilibrium = RevDEQ(f, max_steps=max_steps, beta=beta, **options)
        self.classify = nn.Linear(POOLED**2 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        z = self.equilibrium(unrounded(self.encode(checked_images(images))))
        return self.classify(F.adaptive_avg_pool2d(z, POOLED).flatten(1))


class MultiScale(nn.Module):
    """The implicit ResNet: four scales, each the equilibrium of a `ConvBlock` with a skip connection around it and a
    `PreActivation` block that halves the image; after the last scale, global average pooling.

    | channels             | widths       | max_steps    | stated in paper  | counted    |
    |----------------------|--------------|--------------|------------------|------------|
    | 32, 32, 32, 32       | 1, 2, 2, 1   | 1, 4, 4, 1   | 170K             | 171,498    |
    | 64, 128, 128, 256    | 2, 4, 4, 2   | 1, 4, 4, 1   | 5M               | 6,335,946  |
    | 128, 256, 256, 128   | 1, 3, 3, 1   | 4, 4, 4, 4   | 10M              | 10,319,754 |

    Args:
        channels: Of each scale; there may be more or fewer than four.
        widths: Of the block of each scale, or one number for all.
        max_steps: Of each scale, or one number for all.
        classes: The number of classes.
        form: "paper", or "authors" for the block of the authors' code.
        block: A class or function that returns another f, given the channels and the width of a scale. None is
            `ConvBlock`.
        beta: As for `revdeq.RevDEQ`.
        options: Other options of `revdeq.RevDEQ`, by name.

    Example:
        >>> model = revdeq.models.MultiScale(channels=(8, 16), widths=1, max_steps=2)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        channels: Sequence[int] = (32, 32, 32, 32),
        widths: int | Sequence[int] = (1, 2, 2, 1),
        max_steps: int | Sequence[int] = (1, 4, 4, 1),
        classes: int = 10,
        form: str = "paper",
        block: Callable[[int, int], nn.Module] | None = None,
        beta: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__()
        checked_size("classes", classes), checked_form(form, FORMS)
        channels = by_scale("channels", channels)
        scales = len(channels)
        widths, max_steps = by_scale("widths", widths, scales), by_scale("max_steps", max_steps, scales)
        self.encode = nn.Sequential(
            nn.Conv2d(3, channels[0], 3, padding=1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU()
        )
        self.scales, self.downsample = nn.ModuleList(), nn.ModuleList()
        for c, width, n in zip(channels, widths, max_steps, strict=True):
            f = ConvBlock(c, width, form) if block is None else block(c, width)
            self.scales.append(RevDEQ(f, max_steps=n, beta=beta, **options))
        for c, following in itertools.pairwise(channels):
            self.downsample.append(PreActivation(c, following, stride=2))
        self.downsample.append(nn.AdaptiveAvgPool2d(1))
        self.classify = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.encode(checked_images(images))
        for layer, downsample in zip(self.scales, self.downsample, strict=True):
            x = downsample(x + layer(unrounded(x)))
        return self.classify(x.flatten(1))


def checked_images(images: Tensor) -> Tensor:
    if images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images of shape {tuple(images.shape)}: pass a batch of shape (B, 3, H, W)")
    if not images.is_floating_point():
        raise TypeError(f"images are {images.dtype}: convert them to normalized floating point numbers first")
    return images


def by_scale(name: str, values: Any, scales: int | None = None) -> list[Any]:
    """One number per scale, as a list; a single number is repeated if the number of scales is known."""
    if isinstance(values, int) and scales is not None:
        values = [values] * scales
    if not isinstance(values, (list, tuple)) or len(values) < 1 or (scales and len(values) != scales):
        count = f"{scales} numbers" if scales else "a list of numbers"
        raise ValueError(f"{name} = {values!r} must be {count}, one for each scale")
    return [checked_size(f"{name}[{i}]", value) for i, value in enumerate(values)]
