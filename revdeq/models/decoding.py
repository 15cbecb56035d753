"""Text generation, token by token, with a key-value cache (caches.py)."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .caches import Cache


class DecodingModel(nn.Module):
    """Base class of `LanguageModel` and `Transformer`, with `generate`.

    Example:
        >>> issubclass(revdeq.models.LanguageModel, revdeq.models.DecodingModel)
        True
    """

    embed: Any

    def _decoded(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The logits after the last of these tokens, which continue the cached ones."""
        raise NotImplementedError

    def _why_not_cached(self) -> str | None:
        """Why a cache cannot be used; None if it can."""
        return None

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor | Sequence[Any],
        max_new_tokens: int = 20,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        use_cache: bool = True,
    ) -> Any:
        """Continue prompts, with Hugging Face's argument names, in evaluation mode.

        The prompts are evaluated in one pass, and each new token then takes 2 * max_steps evaluations of one position.
        The logits equal those of the whole sequence up to rounding. A text longer than `length` is seen through a
        window of its last `length` tokens. Their positions change with every token, so that each evaluates the window.

        Args:
            tokens: Prompts: a tensor (B, T), or a list of prompts, which may differ in length.
            max_new_tokens: How many tokens to add.
            do_sample: Whether to sample. False takes the most likely token. A token is drawn on the CPU, so that a seed
                (`torch.manual_seed`) gives the same text on every device.
            temperature: The logits are divided by it.
            top_k: Sample from the k most likely tokens only; None samples from all.
            top_p: Sample from the smallest set of most likely tokens with this total probability; None samples from
                all.
            eos_token_id: The token that ends a text.
            use_cache: False evaluates the whole sequence for every token.

        Returns:
            For a tensor, a tensor (B, T + new) with at most max_new_tokens new tokens; ended texts are filled with
            eos_token_id. For a list, a list of 1-d tensors, prompts included.

        Raises:
            TypeError, ValueError: An argument has the wrong type or an invalid value.

        Example:
            >>> model = revdeq.models.LanguageModel(vocabulary=100, d=16, heads=2, length=32)
            >>> model.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=4).shape
            torch.Size([1, 7])
            >>> [len(text) for text in model.generate([[5, 3, 8], [7]], max_new_tokens=4, do_sample=True, top_k=10)]
            [7, 5]
        """
        _check(max_new_tokens, do_sample, temperature, top_k, top_p)
        texts = self._prompts(tokens)
        if use_cache and (reason := self._why_not_cached()):
            warnings.warn(f"every token evaluates the whole sequence: {reason}", stacklevel=3)
            use_cache = False
        cache, new = None, list[Tensor]()
        ended = torch.zeros(len(texts), dtype=torch.bool, device=texts[0].device)
        with _evaluating(self):
            while len(new) < max_new_tokens and not ended.all():
                longest = max(map(len, texts))
                if not use_cache or longest > self.embed.length:
                    logits = self._logits(texts)
                elif cache is None:
                    padding = torch.tensor([longest - len(text) for text in texts], device=ended.device)
                    cache = Cache(min(self.embed.length, longest + max_new_tokens), padding).advance(longest)
                    logits = self._decoded(pad_sequence(texts, batch_first=True, padding_side="left"), cache)
                else:
                    logits = self._decoded(new[-1][:, None], cache.advance(1))
                if do_sample:
                    chosen = torch.tensor([_drawn(row, temperature, top_k, top_p) for row in logits.float().cpu()])
                else:
                    chosen = logits.argmax(-1)
                new.append(chosen.to(ended.device))
                if eos_token_id is not None:
                    new[-1][ended] = eos_token_id
                    ended |= new[-1] == eos_token_id
                texts = [torch.cat(pair) for pair in zip(texts, new[-1][:, None], strict=True)]
        if isinstance(tokens, Tensor):
            return torch.stack(texts).to(tokens)
        return [_until(eos_token_id, text, len(text) - len(new)) for text in texts]

    def _prompts(self, tokens: Any) -> list[Tensor]:
        if isinstance(tokens, Tensor) and tokens.dim() != 2:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}: pass a batch of prompts (B, T), or a list")
        device = self.embed.token.weight.device
        texts = [torch.as_tensor(text, device=device) for text in tokens]
        if not texts or any(text.dim() != 1 or len(text) < 1 for text in texts):
            raise ValueError("tokens has no prompt, or an empty one: every prompt needs at least one token")
        if any(text.is_floating_point() for text in texts):
            raise TypeError(f"tokens are {texts[0].dtype}: they must be integers")
        return [text.long() for text in texts]

    def _logits(self, texts: list[Tensor]) -> Tensor:
        """The logits of the next token of each text, from the last `length` tokens of each."""
        windows = [text[-self.embed.length :] for text in texts]
        last = torch.tensor([len(window) - 1 for window in windows])
        padded = pad_sequence(windows, batch_first=True)  # padding on the right affects no position before it
        return self(padded)[torch.arange(len(windows)), last]


def _drawn(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> int:
    probabilities, tokens = (logits / temperature).softmax(0).sort(descending=True, stable=True)
    probabilities = probabilities[:top_k]
    if top_p is not None:  # keeps at least the first token
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < top_p * probabilities.sum()]
    return int(tokens[torch.multinomial(probabilities, 1)])


def _until(end: int | None, text: Tensor, begin: int) -> Tensor:
    """The text, to its first end token from this position on."""
    places = (text[begin:] == end).nonzero() if end is not None else ()
    return text[: begin + int(places[0]) + 1] if len(places) else text


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


def _check(max_new_tokens: int, do_sample: bool, temperature: float, top_k: int | None, top_p: float | None) -> None:
    for name, value, holds, must in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "be at least 1"),
        ("temperature", temperature, temperature > 0, "be positive; without do_sample, the likeliest token is taken"),
        ("top_k", top_k, top_k is None or top_k >= 1, "be at least 1, or None"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "be larger than 0 and at most 1, or None"),
    ):
        if not holds:
            raise ValueError(f"{name} = {value!r} must {must}")
    if not do_sample and (temperature, top_k, top_p) != (1.0, None, None):
        raise ValueError("temperature, top_k and top_p apply to sampling only: pass do_sample=True, or leave them out")


def takes_a_cache(block: nn.Module) -> bool:
    """Whether the block takes an argument `cache`."""
    return "cache" in inspect.signature(block.forward).parameters
