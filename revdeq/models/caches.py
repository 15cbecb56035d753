"""The key-value cache of generation.

Position t of evaluation k depends only on positions up to t of evaluation k - 1. So each attention of each of the 2 N
evaluations has its own keys and values, and a new token takes 2 N evaluations of one position.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Cache:
    """The keys and values of all positions so far, which a block gets as its argument `cache`.

    A block calls `attend` or `extend` once per attention, in the same order each time: the k-th call extends the
    k-th tensors.

    Args:
        room: The number of positions to make room for.
        padding: The number of columns before the first token of each text, (B,). Texts are padded on the left.

    Example:
        >>> class Attends(nn.Module):
        ...     def __init__(self, d):
        ...         super().__init__()
        ...         self.qkv, self.norm = nn.Linear(d, 3 * d), nn.LayerNorm(d)
        ...
        ...     def forward(self, z, x, cache=None):
        ...         q, k, v = (t.unsqueeze(1) for t in self.qkv(z + x).chunk(3, -1))  # one head: (B, 1, T, d)
        ...         if cache is None:
        ...             attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ...         else:
        ...             attended = cache.attend(q, k, v)
        ...         return self.norm(x + attended.squeeze(1))
        >>> model = revdeq.models.LanguageModel(vocabulary=100, d=16, length=32, block=Attends)
        >>> model.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """

    positions: Tensor
    """The positions that are being evaluated, (T,) or (B, T), for blocks that encode positions themselves."""

    def __init__(self, room: int, padding: Tensor) -> None:
        self._room, self._begin, self._end, self._turn, self._device = room, 0, 0, 0, padding.device
        self._padding = padding if padding.any() else None
        self._kept: list[list[Tensor]] = []

    def advance(self, count: int) -> "Cache":
        """Prepare for the evaluation of more positions.

        Args:
            count: How many there are.

        Returns:
            The cache itself.
        """
        self._begin, self._end, self._turn = self._end, self._end + count, 0
        columns, self._mask = torch.arange(self._begin, self._end, device=self._device), None
        if self._padding is None:
            self.positions = columns
            return self
        self.positions = (columns - self._padding[:, None]).clamp(min=0)
        keys, queries = torch.arange(self._end, device=self._device), columns[:, None]
        # Padding attends to itself: a row without any key would be NaN.
        seen = (keys <= queries) & ((keys >= self._padding[:, None, None]) | (keys == queries))
        self._mask = seen[:, None]
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of the current positions to themselves and to all before them.

        Args:
            q: Queries of the current positions, (B, heads, T, size).
            k: Their keys, which are appended to the cache.
            v: Their values, which are appended to the cache.

        Returns:
            The result of `torch.nn.functional.scaled_dot_product_attention`.
        """
        k, v = self.extend(k, v)
        is_causal = self._mask is None and self._begin == 0 and self._end > 1
        return F.scaled_dot_product_attention(q, k, v, self._mask, is_causal=is_causal)

    def extend(self, *tensors: Tensor) -> list[Tensor]:
        """Append tensors to the cache, and return them for all positions so far.

        Args:
            tensors: Tensors of the current positions, each of shape (B, ..., T, size).

        Returns:
            The tensors of all positions, (B, ..., all, size). If the prompts differ in length, the first positions may
            be padding, which `attend` masks.
        """
        if self._turn == len(self._kept):
            self._kept.append([x.new_empty((*x.shape[:-2], self._room, x.shape[-1])) for x in tensors])
        kept = self._kept[self._turn]
        self._turn += 1
        for buffer, x in zip(kept, tensors, strict=True):
            buffer[..., self._begin : self._end, :] = x
        return [buffer[..., : self._end, :] for buffer in kept]
