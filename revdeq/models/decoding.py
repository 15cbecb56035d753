"""Decoding with key-value caches (caches.py). The logits equal those of the whole sequence up to rounding."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._solver.options import Options
from .caches import Caches
from .model import Model


class Draw(NamedTuple):
    """Sampling of the next token. It runs on the CPU, so that a seed gives the same text on every device."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None

    def __call__(self, logits: Tensor) -> int:
        """The next token of one sequence."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities, tokens = (logits / self.temperature).softmax(0).sort(descending=True, stable=True)
        if self.top_k is not None:
            probabilities = probabilities[: self.top_k]
        if self.top_p is not None:  # keeps at least the first token
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < self.top_p * probabilities.sum()]
        return int(tokens[torch.multinomial(probabilities, 1, generator=self.generator)])

    def of_each(self, logits: Tensor) -> Tensor:
        """The next token of every row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.tensor([self(row) for row in logits.float().cpu()], device=logits.device)


class DecodingModel(Model):
    """Base class of `LanguageModel` and `Transformer`, with `generate`.

    Args:
        args: Those of the model.
        kwargs: Those of the model.

    Example:
        >>> issubclass(revdeq.models.LanguageModel, revdeq.models.DecodingModel)
        True
    """

    embed: Any

    def _decoded(self, tokens: Tensor, caches: Caches, tol: float | None = None) -> Tensor:
        """The logits after the last of these tokens, which continue the cached ones."""
        raise NotImplementedError

    def _why_not_cached(self, tol: float | None) -> str | None:
        """Why caches cannot be used; None if they can."""
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
        tol: float | None = None,
        use_cache: bool = True,
    ) -> Any:
        """Continue prompts, with Hugging Face's argument names.

        The prompts are evaluated in one pass, then one position at a time, in evaluation mode, with a key-value cache
        for each of the 2 * max_steps evaluations. The logits equal those of the whole sequence up to rounding.

        Args:
            tokens: Prompts: a tensor (B, T), or a list of prompts, which may differ in length.
            max_new_tokens: How many tokens to add.
            do_sample: Whether to sample. False takes the most likely token.
            temperature: Sampling temperature. None is 1.
            top_k: Sample from the k most likely tokens only; None samples from all.
            top_p: Sample from the smallest set of most likely tokens with this total probability; None samples from
                all.
            eos_token_id: The token, or tokens, that end a text.
            pad_token_id: The token that fills a tensor after the end of a text. None is the (first) eos_token_id.
            attention_mask: For a tensor: 0 at padding, which must be on the left.
            generator: A CPU generator for sampling. None is torch's default.
            slide: For texts longer than `length`: by how many positions the window moves when it is full. Positions are
                absolute, so the whole window is then evaluated again. With 1, each token depends on the `length` tokens
                before it and costs a whole window; with length // 2, it depends on at least half as many, and
                nearly all tokens cost one position.
            tol: The tolerance of every position, as for `Equilibrium.by_position`: each new token takes its own number
                of steps, at most `max_steps`, and a batch as many as its slowest text. None takes `max_steps`.
            use_cache: False evaluates the whole sequence for every token.

        Returns:
            For a tensor, a tensor (B, T + new) with at most max_new_tokens new tokens. For a list, a list of 1-d
            tensors, prompts included.

        Raises:
            TypeError, ValueError: An argument has the wrong type or an invalid value.
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
                f"{given[0]} = {settings[given[0]]!r} applies to sampling only: pass do_sample=True, or leave it out"
            )
        usual = 1.0 if temperature is None else temperature
        draw = Draw(usual if do_sample else 0.0, top_k, top_p, generator)
        ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        check(self, max_new_tokens, draw, slide, tol)
        rows = _prompts(self, tokens, attention_mask)
        new = torch.stack(list(stream(self, rows, max_new_tokens, draw, None, ends, slide, tol, use_cache)), 1)
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
    tol: float | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yield the next token of every text, (B,), until all texts have ended. Only the first `vocabulary` tokens are
    chosen. Other arguments are as for `DecodingModel.generate`."""
    with _evaluating(model):
        decoder = Decoder(model, prompts, max_new_tokens, slide, tol, use_cache)
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
    """A batch of growing texts, and the logits of their next tokens.

    Each text has a window of at most `length` tokens. Positions are absolute: when a window moves, by `slide`, all
    caches are computed again.
    """

    def __init__(
        self,
        model: DecodingModel,
        prompts: Sequence[Tensor],
        most: int,
        slide: int = 1,
        tol: float | None = None,
        use_cache: bool = True,
    ) -> None:
        self.model, self.length, self._slide = model, model.embed.length, slide
        self._given = {} if tol is None else {"tol": tol}
        self._prompts, self._new, self._most = prompts, list[Tensor](), most
        self._starts = [max(0, len(row) - self.length) for row in prompts]
        why_not = model._why_not_cached(tol) if use_cache else None
        if why_not:
            warnings.warn(f"every token evaluates the whole sequence: {why_not}", stacklevel=2)
        self._is_cached = use_cache and not why_not
        self.caches: Caches | None = None

    def append(self, tokens: Tensor) -> None:
        """Append one token to each text."""
        self._new.append(tokens)

    def logits(self) -> Tensor:
        """The logits of the next token of each text, (B, vocabulary)."""
        longest = max(len(row) - start for row, start in zip(self._prompts, self._starts, strict=True)) + len(self._new)
        if self._is_cached and self.caches is not None and longest <= self.length:
            self.caches.advance(1)
            return self.model._decoded(self._new[-1][:, None], self.caches, **self._given)
        windows = self._windows()
        longest = max(map(len, windows))
        if not self._is_cached:  # padding on the right affects no position before it
            padded = nn.utils.rnn.pad_sequence([*windows], batch_first=True)
            last = torch.tensor([len(row) - 1 for row in windows], device=padded.device)
            return self.model(padded, **self._given)[torch.arange(len(windows), device=padded.device), last]
        padded = nn.utils.rnn.pad_sequence([*windows], batch_first=True, padding_side="left")
        padding = torch.tensor([longest - len(row) for row in windows], device=padded.device)
        self.caches = Caches(min(self.length, longest + self._most - len(self._new)), padding)
        self.caches.advance(longest)
        return self.model._decoded(padded, self.caches, **self._given)

    def _windows(self) -> list[Tensor]:
        """The window of each text."""
        texts: Sequence[Tensor] = self._prompts
        if self._new:
            texts = [torch.cat(pair) for pair in zip(self._prompts, torch.stack(self._new, 1), strict=True)]
        for i, text in enumerate(texts):
            if len(text) - self._starts[i] > self.length:
                self._starts[i] = max(self._starts[i] + self._slide, len(text) - self.length)
        return [text[start:] for text, start in zip(texts, self._starts, strict=True)]


def takes_a_cache(block: Any) -> bool:
    """Whether the block takes an argument `cache`."""
    return "cache" in inspect.signature(block.forward).parameters


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode, restored afterwards."""
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
            raise ValueError(
                "attention_mask must have the shape of tokens, a tensor; for a list of prompts, leave it out"
            )
        kept = attention_mask.bool()
        if (kept[:, 1:] < kept[:, :-1]).any():
            raise ValueError(
                "attention_mask has padding on the right of a prompt: pad on the left, or pass a list of prompts"
            )
        rows = [row[mask] for row, mask in zip(tokens, kept, strict=True)]
    elif isinstance(tokens, Tensor) and tokens.dim() != 2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: pass a batch of prompts (B, T), or a list of prompts")
    else:
        rows = [torch.as_tensor(row, device=device) for row in tokens]
    if not rows or any(row.dim() != 1 or len(row) < 1 for row in rows):
        raise ValueError("tokens has no prompt, or an empty one: every prompt needs at least one token")
    for row in rows:
        if row.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens are {row.dtype}: they must be int64 or int32")
    return [row.long() for row in rows]


def _after_the_end(new: Tensor, ends: Sequence[int]) -> Tensor:
    """The mask of tokens after the end of a text."""
    is_end = torch.isin(new, torch.tensor([*ends], device=new.device)).long()
    return is_end.cumsum(1) - is_end > 0


def check(model: DecodingModel, max_new_tokens: int, draw: Draw, slide: int, tol: float | None) -> None:
    """Raise for invalid settings."""
    length = model.embed.length
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", draw.top_k), ("slide", slide)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} = {value!r} must be an integer of at least 1")
    if slide > length:
        raise ValueError(f"slide = {slide} must be less than or equal to length = {length}: choose a smaller slide")
    if not 0 <= draw.temperature < float("inf"):
        raise ValueError(f"temperature = {draw.temperature!r} must be 0 or larger")
    if draw.top_p is not None and not 0 < draw.top_p <= 1:
        raise ValueError(f"top_p = {draw.top_p!r} must be larger than 0 and at most 1")
    Options(tol=tol)  # raises if it is invalid
    if tol is not None and not hasattr(model, "equilibrium"):
        raise ValueError(f"tol = {tol!r}: {type(model).__name__} has no equilibrium; leave it out")
