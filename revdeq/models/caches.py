"""Key-value caches for decoding.

Position t of evaluation k depends only on positions up to t of evaluation k - 1. So each of the 2 N evaluations has its
own cache, and a new token takes 2 N evaluations of one position.

With a tolerance, a position comes to rest after some evaluations, and the caches of the others lack its keys and values
until a later position needs them: it is then evaluated late, at its frozen state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Cache:
    """The key-value cache of one evaluation, which a block gets as its argument `cache`.

    A block calls `attend` or `extend` once per attention, always in the same order.

    Args:
        caches: The caches of all evaluations.

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

    def __init__(self, caches: "Caches") -> None:
        self._caches, self._slots, self._next, self._end = caches, list[list[Tensor]](), 0, 0

    @property
    def positions(self) -> Tensor:
        """The positions that are being evaluated, (T,) or (B, T), for blocks that encode positions themselves."""
        return self._caches.positions

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of the current positions to themselves and to all cached ones.

        Args:
            q: Queries of the current positions, (B, heads, T, size).
            k: Their keys, which are appended to the cache.
            v: Their values, which are appended to the cache.

        Returns:
            The result of `torch.nn.functional.scaled_dot_product_attention`.
        """
        caches = self._caches
        k, v = self.extend(k, v)
        return F.scaled_dot_product_attention(q, k, v, caches.mask, is_causal=caches.is_causal)

    def extend(self, *tensors: Tensor) -> list[Tensor]:
        """Append tensors to the cache, and return them for all positions so far.

        Args:
            tensors: Tensors of the current positions, each of shape (B, ..., T, size).

        Returns:
            The tensors of all positions, (B, ..., all, size). If the prompts differ in length, the first positions may
            be padding, which `attend` masks.
        """
        caches = self._caches
        if self._next == len(self._slots):
            room = (caches.room,)
            self._slots.append([x.new_empty((*x.shape[:-2], *room, x.shape[-1])) for x in tensors])
        slot = self._slots[self._next]
        self._next += 1
        for kept, x in zip(slot, tensors, strict=True):
            kept.narrow(-2, caches.begin, x.shape[-2]).copy_(x)
        return [kept.narrow(-2, 0, caches.end) for kept in slot]

    def _kept(self) -> list[Tensor]:
        """The buffers, including unused capacity."""
        return [x for slot in self._slots for x in slot]


class Caches:
    """The caches of all evaluations, for a batch of left-padded sequences.

    begin, end: the columns that are being evaluated. mask, is_causal: their attention mask.
    resting: with a tolerance, the input and the last z and y of every column.
    """

    def __init__(self, room: int, padding: Tensor) -> None:
        self.room, self.begin, self.end = room, 0, 0
        self._padding = padding if padding.any() else None
        self._each: list[Cache] = []
        self._columns = torch.arange(room, device=padding.device)
        self.resting = Cache(self)

    def advance(self, count: int) -> None:
        """Prepare for the evaluation of this many more positions."""
        self._look_at(self.end, self.end + count)

    def _look_at(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        columns, self.mask = self._columns[begin:end], None
        self.is_causal = end - begin > 1 and begin == 0 and self._padding is None
        if self._padding is None:
            self.positions = columns
            if end - begin > 1 and begin > 0:
                self.mask = self._columns[: self.end] <= columns[:, None]
            return
        self.positions = (columns - self._padding[:, None]).clamp(min=0)
        keys, queries = self._columns[: self.end], columns[:, None]
        # Padding attends to itself: a row without any key would be NaN.
        seen = (keys <= queries) & ((keys >= self._padding[:, None, None]) | (keys == queries))
        self.mask = seen[:, None]

    def at(self, k: int) -> Cache:
        """The cache of evaluation k, which is about to evaluate all columns that it lacks."""
        while k >= len(self._each):
            self._each.append(Cache(self))
        return self._from_where_it_ends(self._each[k])

    def _from_where_it_ends(self, cache: Cache) -> Cache:
        if cache._end != self.begin:
            self._look_at(cache._end, self.end)
        cache._end, cache._next = self.end, 0
        return cache

    def with_late(self, k: int, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """What evaluation k reads, z and the input x, with those of the columns that are evaluated late."""
        late = self.end - self.begin - x.shape[1]
        if late == 0:
            return z, x
        given, *states = (kept[:, self.begin : self.begin + late] for kept in self.resting._kept())
        return torch.cat([states[k % 2], z], 1), torch.cat([given, x], 1)

    def rest(self, x: Tensor, z: Tensor, y: Tensor) -> None:
        """The new columns have this input, and rest in these states."""
        self._from_where_it_ends(self.resting).extend(x, z, y)

    @property
    def bytes(self) -> int:
        caches = [*self._each, self.resting]
        return sum(x.numel() * x.element_size() for cache in caches for x in cache._kept())
