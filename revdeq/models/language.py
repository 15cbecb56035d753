"""The paper's language model. To use an f of your own, pass LanguageModel(block=MyBlock), where MyBlock(d) is a module
f(z, x). Position t of its output may depend only on positions up to t. For fast decoding, define f(z, x, cache=None),
and call cache.attend(q, k, v) if there is a cache."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import RevDEQ
from .blocks import LANGUAGE_FORMS, TransformerBlock, checked_form, checked_size
from .caches import Cache
from .decoding import DecodingModel, takes_a_cache

INITIAL_DEVIATION = 0.02 * math.sqrt(1024)
"""Initial standard deviation times sqrt(fan-in): GPT-2's .02 at the paper's size. The paper does not state it."""


class LanguageModel(DecodingModel):
    """Embeddings of tokens and positions, the equilibrium of a `TransformerBlock` (equation 7 of the paper), and a
    tied head: tokens (B, T) to logits (B, T, vocabulary) of each next token.

    The defaults are the paper's, which states 94M parameters. There are 93,987,840 with heads of full size d, and
    64,627,712 with heads of size d / 8 (wide_heads=False).

    Args:
        vocabulary: The number of tokens; the default is that of GPT-2, padded to a multiple of 128.
        d: As for `TransformerBlock`.
        heads: As for `TransformerBlock`.
        length: The maximum length of a sequence.
        dropout: As for `TransformerBlock`.
        wide_heads: As for `TransformerBlock`.
        form: "paper", "authors" for the block of the authors' code, "residual" or "pre-norm", as for
            `TransformerBlock`.
        block: A class or function that returns another f, given `d`. None is `TransformerBlock`.
        max_steps: As for `revdeq.RevDEQ`.
        beta: As for `revdeq.RevDEQ`.
        options: Other options of `revdeq.RevDEQ`, by name.

    Example:
        >>> model = revdeq.models.LanguageModel(vocabulary=100, d=16, heads=2, length=32)
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
        wide_heads: bool = True,
        form: str = "paper",
        block: Callable[[int], nn.Module] | None = None,
        max_steps: int = 4,
        beta: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__()
        checked_form(form, LANGUAGE_FORMS)
        self.embed = Embedding(vocabulary, d, length)
        f = TransformerBlock(d, heads, dropout, wide_heads, form) if block is None else block(d)
        self.equilibrium = RevDEQ(f, max_steps=max_steps, beta=beta, **options)
        initialise(self.embed)
        if block is None:
            initialise(f)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed.logits(self.equilibrium(self.embed(tokens)))

    def _decoded(self, tokens: Tensor, cache: Cache) -> Tensor:
        z = self.equilibrium(self.embed(tokens, cache.positions), cache=cache)
        return self.embed.logits(z[:, -1])

    def _why_not_cached(self) -> str | None:
        layer = self.equilibrium
        if not takes_a_cache(layer.f):
            return f"{type(layer.f).__name__} takes no cache; define forward(self, z, x, cache=None)"
        if layer.tol is not None:
            return f"with tol = {layer.tol!r} tokens differ in their number of evaluations; use tol=None"
        return None


class Embedding(nn.Module):
    """Embeddings of tokens and positions, and the tied head, whose initial weights are small. As in Vaswani et al.
    (2017), the embeddings are multiplied by sqrt(d): otherwise they would be negligible next to a normalized z."""

    def __init__(self, vocabulary: int, d: int, length: int) -> None:
        super().__init__()
        self.vocabulary, self.length = checked_size("vocabulary", vocabulary), checked_size("length", length)
        self.token = nn.Embedding(vocabulary, checked_size("d", d))
        self.position = nn.Embedding(length, d)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """positions: None starts at 0."""
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}: pass a batch of sequences (B, T)")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens are {tokens.dtype}: they must be int64 or int32")
        if tokens.shape[1] > self.length:
            raise ValueError(
                f"tokens of length {tokens.shape[1]}: this model has length = {self.length}; truncate them, or "
                "create the model with a larger length"
            )
        try:
            x = self.token(tokens)
        except IndexError:
            low, high = tokens.aminmax()
            raise IndexError(
                f"tokens from {low} to {high}: they must lie between 0 and vocabulary - 1 = {self.vocabulary - 1}"
            ) from None
        x = x + (self.position.weight[: tokens.shape[1]] if positions is None else self.position(positions))
        return math.sqrt(x.shape[-1]) * x

    def logits(self, z: Tensor) -> Tensor:
        return F.linear(z, self.token.weight)


def initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INITIAL_DEVIATION / math.sqrt(module.weight.shape[1]))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
