"""Text, token by token, with caches (caches.py): the logits are those of the whole sequence, to rounding."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .caches import Caches
from .model import Model


class Draw(NamedTuple):
    """How the next token is chosen. All of it happens on the CPU, so that a seed is the same everywhere."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None

    def __call__(self, logits: Tensor) -> int:
        """Of one sequence."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities, tokens = (logits / self.temperature).softmax(0).sort(descending=True, stable=True)
        if self.top_k is not None:
            probabilities = probabilities[: self.top_k]
        if self.top_p is not None:  # those before which less than top_p is gathered: the first one always is
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < self.top_p * probabilities.sum()]
        return int(tokens[torch.multinomial(probabilities, 1, generator=self.generator)])

    def of_each(self, logits: Tensor) -> Tensor:
        """Of every row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.tensor([self(row) for row in logits.float().cpu()], device=logits.device)


class DecodingModel(Model):
    """What `LanguageModel` and `Transformer` have in common: they write text, token by token.

    Args:
        args: Those of the model.
        kwargs: Those of the model.

    Example:
        >>> issubclass(revdeq.models.LanguageModel, revdeq.models.DecodingModel)
        True
    """

    embed: Any

    def _decoded(self, tokens: Tensor, caches: Caches) -> Tensor:
        """The logits after the last of these tokens, which follow those in the caches."""
        raise NotImplementedError

    def _why_not_cached(self) -> str | None:
        """Why the whole sequence has to be evaluated for every token, if it has to."""
        return None

    def generate(
        self,
        tokens: Tensor | Sequence[Any],
        max_new_tokens: int = 20,
        *,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        slide: int = 1,
        use_cache: bool = True,
    ) -> Any:
        """What the model writes after prompts, by the names that Hugging Face uses.

        The prompts are evaluated at once, and then one position at a time, in evaluation mode, with caches of
        2 * max_steps evaluations. The logits are those of the whole sequence, to rounding.

        Args:
            tokens: Prompts: a tensor (B, T), or a list of prompts, which may differ in length.
            max_new_tokens: How many tokens to add.
            do_sample: Whether to draw tokens. False takes the likeliest.
            temperature: Of the draw. None is 1.
            top_k: Draw from so many of the likeliest tokens only; None draws from all.
            top_p: Draw from the fewest likeliest tokens that have this probability together; None draws from all.
            eos_token_id: The token, or the tokens, after which a text ends.
            pad_token_id: What follows the end of a text, in a tensor. None is the (first) eos_token_id.
            attention_mask: Of a tensor: 0 where tokens are padding, at the left.
            generator: Of the draws, on the CPU. None is torch's own.
            slide: By how many positions the window moves on when it is full, that is, when a text is longer than
                `length`. Positions are absolute, so that all of the window is then evaluated again. With 1 each token
                is what the model makes of the `length` tokens before it, and takes a whole window; with length // 2 it
                sees at least so many of them, and nearly all tokens take one position.
            use_cache: False evaluates the whole sequence for every token.

        Returns:
            Of a tensor, a tensor (B, T + new), with at most max_new_tokens new ones. Of a list, a list of 1-d tensors,
            each with its prompt.

        Raises:
            TypeError, ValueError: An argument is of the wrong kind, or not possible.
            FloatingPointError: A logit is not finite.

        Example:
            >>> model = revdeq.models.LanguageModel(vocabulary=100, d=16, heads=2, length=32)
            >>> model.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=4).shape
            torch.Size([1, 7])
            >>> [len(text) for text in model.generate([[5, 3, 8], [7]], max_new_tokens=4, do_sample=True, top_k=10)]
            [7, 5]
        """
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        if not do_sample and (given := [name for name, value in settings.items() if value is not None]):
            raise ValueError(
                f"{given[0]} = {settings[given[0]]!r} is about a draw: pass do_sample=True, or leave it out"
            )
        usual = 1.0 if temperature is None else temperature
        draw = Draw(usual if do_sample else 0.0, top_k, top_p, generator)
        ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        check(max_new_tokens, draw, slide, self.embed.length)
        rows = _prompts(self, tokens, attention_mask)
        new = torch.stack(list(stream(self, rows, max_new_tokens, draw, None, ends, slide, use_cache)), 1)
        after = _after_the_end(new, ends)
        if isinstance(tokens, Tensor):
            if ends:
                new = new.masked_fill(after, ends[0] if pad_token_id is None else pad_token_id)
            return torch.cat([tokens, new.to(tokens)], 1)
        return [torch.cat([row, x[~y]]) for row, x, y in zip(rows, new, after, strict=True)]


@torch.no_grad()
def stream(
    model: DecodingModel,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    draw: Draw,
    vocabulary: int | None = None,
    ends: Sequence[int] = (),
    slide: int = 1,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """The next token of every text, (B,), as it is chosen, until all of them have ended. No token is outside of the
    first `vocabulary`. Other arguments are as for `DecodingModel.generate`."""
    with _evaluating(model):
        decoder = Decoder(model, prompts, max_new_tokens, slide, use_cache)
        stops = torch.tensor([*ends], device=prompts[0].device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts[0].device)
        for number in range(max_new_tokens):
            logits = decoder.logits()[:, :vocabulary]
            if not logits.amax().isfinite():
                raise FloatingPointError(
                    f"a logit of token {number} is not finite: the iteration diverges; use a smaller beta"
                )
            chosen = draw.of_each(logits)
            yield chosen
            if ends:
                ended |= torch.isin(chosen, stops)
                if ended.all():
                    return
            decoder.append(chosen)


class Decoder:
    """Texts that grow by a token at a time, and the logits of their next one.

    Each has a window, of at most `length` tokens. Positions are absolute: where one has to move on, by `slide`, the
    caches of all are computed anew.
    """

    def __init__(
        self, model: DecodingModel, prompts: Sequence[Tensor], most: int, slide: int = 1, use_cache: bool = True
    ) -> None:
        self.model, self.length, self._slide = model, model.embed.length, slide
        self._prompts, self._new, self._most = prompts, list[Tensor](), most
        self._starts = [max(0, len(row) - self.length) for row in prompts]
        why_not = model._why_not_cached() if use_cache else None
        if why_not:
            warnings.warn(f"every token evaluates the whole sequence: {why_not}", stacklevel=2)
        self._is_cached = use_cache and not why_not
        self.caches: Caches | None = None

    def append(self, tokens: Tensor) -> None:
        """One to each."""
        self._new.append(tokens)

    def logits(self) -> Tensor:
        """Of the token that follows each, (B, vocabulary)."""
        longest = max(len(row) - start for row, start in zip(self._prompts, self._starts, strict=True)) + len(self._new)
        if self._is_cached and self.caches is not None and longest <= self.length:
            self.caches.advance(1)
            return self.model._decoded(self._new[-1][:, None], self.caches)
        windows = self._windows()
        longest = max(map(len, windows))
        if not self._is_cached:  # no position depends on the padding after it
            padded = nn.utils.rnn.pad_sequence([*windows], batch_first=True)
            last = torch.tensor([len(row) - 1 for row in windows], device=padded.device)
            return self.model(padded)[torch.arange(len(windows), device=padded.device), last]
        padded = nn.utils.rnn.pad_sequence([*windows], batch_first=True, padding_side="left")
        padding = torch.tensor([longest - len(row) for row in windows], device=padded.device)
        self.caches = Caches(min(self.length, longest + self._most - len(self._new)), padding)
        self.caches.advance(longest)
        return self.model._decoded(padded, self.caches)

    def _windows(self) -> list[Tensor]:
        """What the model reads of each text."""
        texts: Sequence[Tensor] = self._prompts
        if self._new:
            texts = [torch.cat(pair) for pair in zip(self._prompts, torch.stack(self._new, 1), strict=True)]
        for i, text in enumerate(texts):
            if len(text) - self._starts[i] > self.length:
                self._starts[i] = max(self._starts[i] + self._slide, len(text) - self.length)
        return [text[start:] for text, start in zip(texts, self._starts, strict=True)]


def takes_a_cache(block: Any) -> bool:
    """Whether it is called as block(z, x, cache=...)."""
    return "cache" in inspect.signature(block.forward).parameters


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and afterwards in that of before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _prompts(model: DecodingModel, tokens: Any, attention_mask: Tensor | None) -> list[Tensor]:
    device = model.embed.token.weight.device
    if attention_mask is not None:
        if not isinstance(tokens, Tensor) or attention_mask.shape != tokens.shape:
            raise ValueError("attention_mask must be shaped like tokens, a tensor: a list of prompts needs none")
        kept = attention_mask.bool()
        if (kept[:, 1:] < kept[:, :-1]).any():
            raise ValueError("attention_mask has padding at the right of a prompt: pad at the left, or pass a list")
        rows = [row[mask] for row, mask in zip(tokens, kept, strict=True)]
    elif isinstance(tokens, Tensor) and tokens.dim() != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: they must be a batch of prompts, (B, T), or a list")
    else:
        rows = [torch.as_tensor(row, device=device) for row in tokens]
    if not rows or any(row.dim() != 1 or len(row) < 1 for row in rows):
        raise ValueError("tokens have no prompt, or one that is empty: begin a text with a token")
    for row in rows:
        if row.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens are {row.dtype}: they must be int64 or int32")
    return [row.long() for row in rows]


def _after_the_end(new: Tensor, ends: Sequence[int]) -> Tensor:
    """Where the tokens of a text come after one of its ends."""
    is_end = torch.isin(new, torch.tensor([*ends], device=new.device)).long()
    return is_end.cumsum(1) - is_end > 0


def check(max_new_tokens: int, draw: Draw, slide: int = 1, length: int = 1) -> None:
    """Refuse what is not possible."""
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", draw.top_k), ("slide", slide)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} = {value!r} must be an integer of at least 1")
    if slide > length:
        raise ValueError(f"slide = {slide} must be at most length = {length}: a window that moves on keeps a token")
    if not 0 <= draw.temperature < float("inf"):
        raise ValueError(f"temperature = {draw.temperature!r} must be 0 or larger")
    if draw.top_p is not None and not 0 < draw.top_p <= 1:
        raise ValueError(f"top_p = {draw.top_p!r} must be larger than 0 and at most 1")
