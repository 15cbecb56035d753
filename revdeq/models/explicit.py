"""Explicit models for comparison."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import CausalAttention, PreActivation, checked_size, mlp
from .caches import Cache
from .decoding import DecodingModel
from .image import by_scale, checked_images
from .language import Embedding, initialise
from .puzzle import PuzzleBlock, checked_puzzles, classifier, encoder


class ResNet(nn.Module):
    """The pre-activation ResNet of He et al. (2016, "Identity mappings"): images (B, 3, H, W) to logits (B, classes).

    The defaults are ResNet-18.

    Args:
        channels: Of each scale; each scale but the first begins by halving the image.
        depth: The number of blocks at each scale, or one number for all.
        classes: The number of classes.

    Example:
        >>> revdeq.models.ResNet(channels=(8, 16), depth=1)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, channels: Sequence[int] = (64, 128, 256, 512), depth: int | Sequence[int] = 2, classes: int = 10
    ) -> None:
        super().__init__()
        channels = by_scale("channels", channels)
        depth = by_scale("depth", depth, len(channels))
        checked_size("classes", classes)
        self.encode = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        blocks, before = [], channels[0]
        for scale, (c, count) in enumerate(zip(channels, depth, strict=True)):
            for i in range(count):
                blocks.append(PreActivation(before, c, stride=2 if scale and i == 0 else 1))
                before = c
        self.blocks, self.norm = nn.Sequential(*blocks), nn.BatchNorm2d(before)
        self.classify = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.encode(checked_images(images)))))
        return self.classify(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Transformer(DecodingModel):
    """A pre-norm transformer like GPT-2: tokens (B, T) to logits (B, T, vocabulary), with a tied head.

    Args:
        vocabulary: As for `LanguageModel`.
        d: As for `LanguageModel`.
        heads: As for `LanguageModel`; each has the size d / heads.
        length: As for `LanguageModel`.
        dropout: As for `LanguageModel`.
        depth: The number of layers.
        hidden: The number of units of the MLP of each layer. None is 4 d.

    Example:
        >>> model = revdeq.models.Transformer(vocabulary=100, d=16, heads=2, length=32, depth=2)
        >>> model(torch.randint(100, (2, 12))).shape
        torch.Size([2, 12, 100])
    """

    def __init__(
        self,
        vocabulary: int = 50304,
        d: int = 1024,
        heads: int = 8,
        length: int = 512,
        dropout: float = 0.1,
        depth: int = 3,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden = checked_size("hidden", 4 * d if hidden is None else hidden)
        self.embed = Embedding(vocabulary, d, length)
        layers = [Layer(d, heads, self.hidden, dropout) for _ in range(checked_size("depth", depth))]
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(d)
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed.logits(self.norm(self.layers(self.embed(tokens))))

    def _decoded(self, tokens: Tensor, cache: Cache) -> Tensor:
        x = self.embed(tokens, cache.positions)
        for layer in self.layers:
            x = layer(x, cache)
        return self.embed.logits(self.norm(x[:, -1]))


class PuzzleNet(nn.Module):
    """A `PuzzleModel` with a stack of blocks, each with its own parameters, in place of the equilibrium.

    Args:
        features: As for `PuzzleModel`.
        dimensions: As for `PuzzleModel`.
        channels: As for `PuzzleModel`.
        classes: As for `PuzzleModel`.
        depth: The number of blocks. Each has the form of the equilibrium's f; the first one gets z = 0.

    Example:
        >>> revdeq.models.PuzzleNet(channels=8)(torch.randn(2, 3, 9, 9)).shape
        torch.Size([2, 9, 9, 2])
    """

    def __init__(
        self, features: int = 3, dimensions: int = 2, channels: int = 32, classes: int = 2, depth: int = 2
    ) -> None:
        super().__init__()
        self.encode = encoder(features, dimensions, channels)
        self.blocks = nn.ModuleList(PuzzleBlock(channels, dimensions) for _ in range(checked_size("depth", depth)))
        self.classify = classifier(channels, classes)

    def forward(self, puzzles: Tensor) -> Tensor:
        x = self.encode(checked_puzzles(self.encode, puzzles))
        z = torch.zeros_like(x)
        for block in self.blocks:
            z = block(z, x)
        return self.classify(z.movedim(1, -1))


class Layer(nn.Module):
    def __init__(self, d: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention, self.mlp = CausalAttention(d, heads), mlp(d, hidden, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cache))
        return x + self.dropout(self.mlp(self.norm2(x)))


def count_parameters(model: nn.Module) -> int:
    """The number of parameters of a model. Shared parameters count once.

    Args:
        model: Any module.

    Returns:
        Their number.

    Example:
        >>> revdeq.models.count_parameters(nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in model.parameters())
