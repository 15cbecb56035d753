"""A model for puzzles: strings or images of any size, with a class to predict at every position.

One evaluation of f is local, and information travels further with every evaluation: a larger puzzle takes more steps,
not more parameters. To use an f of your own, pass PuzzleModel(block=MyBlock), where MyBlock(channels, dimensions) is
a module f(z, x).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import RevDEQ
from .blocks import checked_size, unrounded

CONVOLUTIONS: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d}


class PuzzleBlock(nn.Module):
    """f(z, x) = LN(z + W2 * ReLU(W1 * z + x)), with convolutions of size 3 (or 3x3). The norm is over the channels of
    a position, because a norm over positions would depend on the size of the puzzle.

    Args:
        channels: Of z and x.
        dimensions: 1 for strings, 2 for images.

    Example:
        >>> strings = torch.randn(2, 8, 20)
        >>> revdeq.RevDEQ(revdeq.models.PuzzleBlock(8, dimensions=1), beta=0.8)(strings).shape
        torch.Size([2, 8, 20])
    """

    def __init__(self, channels: int, dimensions: int = 2) -> None:
        super().__init__()
        convolution = checked_convolution(dimensions)
        self.conv1 = convolution(checked_size("channels", channels), channels, 3, padding=1)
        self.conv2 = convolution(channels, channels, 3, padding=1)
        self.norm = ChannelNorm(channels)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(z + self.conv2(F.relu(self.conv1(z) + x)))


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (B, C, positions ...)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias).movedim(-1, 1)


class PuzzleModel(nn.Module):
    """The equilibrium of a `PuzzleBlock` between a local encoder and a local head: (B, features, positions ...) to
    logits (B, positions ..., classes).

    Args:
        features: The number of channels of the input.
        dimensions: 1 for strings, 2 for images.
        channels: Of the block.
        classes: The number of classes of a position.
        noise: In training, every second puzzle starts from Gaussian noise of this scale instead of 0, so that the
            result does not depend on the initial state. Without it, some long strings converge to states that are only
            locally consistent.
        block: A class or function that returns another f, given `channels` and `dimensions`. None is `PuzzleBlock`.
        max_steps: As for `revdeq.RevDEQ`.
        beta: As for `revdeq.RevDEQ`.
        options: Other options of `revdeq.RevDEQ`, by name.

    Example:
        >>> revdeq.models.PuzzleModel(channels=8, max_steps=4)(torch.randn(2, 3, 9, 9)).shape
        torch.Size([2, 9, 9, 2])
    """

    def __init__(
        self,
        features: int = 3,
        dimensions: int = 2,
        channels: int = 32,
        classes: int = 2,
        noise: float = 0.0,
        block: Callable[[int, int], nn.Module] | None = None,
        max_steps: int = 16,
        beta: float = 0.8,
        **options: Any,
    ) -> None:
        super().__init__()
        self.noise = noise
        self.encode = encoder(features, dimensions, channels)
        f = PuzzleBlock(channels, dimensions) if block is None else block(channels, dimensions)
        self.equilibrium = RevDEQ(f, max_steps=max_steps, beta=beta, **options)
        self.classify = classifier(channels, classes)

    def forward(self, puzzles: Tensor) -> Tensor:
        x = unrounded(self.encode(checked_puzzles(self.encode, puzzles)))
        z0 = None
        if self.training and self.noise:
            z0 = self.noise * torch.randn(x.shape, device=x.device)
            z0[1::2] = 0
        return self.classify(self.equilibrium(x, z0=z0).movedim(1, -1))


def encoder(features: int, dimensions: int, channels: int) -> nn.Module:
    convolution = checked_convolution(dimensions)
    return convolution(checked_size("features", features), checked_size("channels", channels), 3, padding=1)


def classifier(channels: int, classes: int) -> nn.Module:
    checked_size("classes", classes)
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, classes))


def checked_convolution(dimensions: int) -> Callable[..., nn.Module]:
    if dimensions not in CONVOLUTIONS:
        raise ValueError(f"dimensions = {dimensions!r} must be 1, for strings, or 2, for images")
    return CONVOLUTIONS[dimensions]


def checked_puzzles(encode: Any, puzzles: Tensor) -> Tensor:
    dimensions, features = encode.weight.dim() - 2, encode.weight.shape[1]
    if puzzles.dim() != dimensions + 2 or puzzles.shape[1] != features or 0 in puzzles.shape:
        shape = f"(B, {features}, {'H, W' if dimensions == 2 else 'T'})"
        raise ValueError(f"puzzles of shape {tuple(puzzles.shape)}: pass a batch of shape {shape}")
    return puzzles
