"""Device memory: tensors far apart from each other, and which thread accessed which element."""

from dataclasses import dataclass

import numpy as np

from .parse import EmulationError

APART = 40
"""Each allocation is in the middle of its own 2^40 bytes, so that a wrong offset cannot reach another allocation, and
an address truncated to 32 bits reaches none."""

NOBODY, SEVERAL = -1, -2


@dataclass
class Allocation:
    """unordered: several threads may write to an element, in any order."""

    name: str
    base: int
    data: np.ndarray
    element_size: int
    unordered: bool

    def __post_init__(self) -> None:
        elements = self.data.size // self.element_size
        self.writer = np.full(elements, NOBODY)
        self.reader = np.full(elements, NOBODY)


class Memory:
    def __init__(self) -> None:
        self.allocations: list[Allocation] = []

    def allocate(self, array: np.ndarray, name: str, skew: int = 0, unordered: bool = False) -> int:
        """Allocate an array in place and return its address, which is a multiple of 256 plus `skew`."""
        base = (2 * len(self.allocations) + 3 << APART - 1) + skew
        self.allocations.append(Allocation(name, base, array.view(np.uint8), array.itemsize, unordered))
        return base

    def load(self, addresses: np.ndarray, threads: np.ndarray, size: int, count: int) -> list[np.ndarray]:
        """`count` adjacent values of `size` bytes for each thread."""
        values = np.empty((threads.size, count), f"u{size}")
        for allocation, here, offsets in self._find(addresses, size * count):
            places, who = _elements(allocation, offsets, threads[here], size * count)
            _refuse(allocation, allocation.writer[places], who, "reads what another wrote")
            earlier = allocation.reader[places]
            allocation.reader[places] = who
            shared = (allocation.reader[places] != who) | ((earlier != NOBODY) & (earlier != who))
            allocation.reader[places[shared]] = SEVERAL
            values[here] = allocation.data[_bytes(offsets, size * count)].view(values.dtype)
        return list(np.ascontiguousarray(values.T))

    def store(self, addresses: np.ndarray, threads: np.ndarray, values: list[np.ndarray]) -> None:
        data = np.stack(values, axis=1)
        width = data.shape[1] * data.itemsize
        for allocation, here, offsets in self._find(addresses, width):
            places, who = _elements(allocation, offsets, threads[here], width)
            if not allocation.unordered:
                _refuse(allocation, allocation.writer[places], who, "writes what another wrote")
                _refuse(allocation, allocation.reader[places], who, "writes what another reads")
            allocation.writer[places] = who
            if not allocation.unordered:
                _refuse(allocation, allocation.writer[places], who, "writes what another wrote")
            allocation.data[_bytes(offsets, width)] = data[here].view(np.uint8)

    def _find(self, addresses: np.ndarray, width: int):
        """For each accessed allocation: the allocation, the indices of its threads, and their offsets."""
        numbers = (addresses >> np.uint64(APART)).astype(np.int64) - 1
        for number in sorted(set(numbers.tolist())):
            here = np.flatnonzero(numbers == number)
            if not 0 <= number < len(self.allocations):
                raise EmulationError(f"out of bounds: an access to {addresses[here[0]]:#x}, which is not allocated")
            allocation = self.allocations[number]
            offsets = addresses[here].astype(np.int64) - allocation.base
            outside = (offsets < 0) | (offsets + width > allocation.data.size)
            if outside.any():
                raise EmulationError(
                    f"out of bounds: {outside.sum()} threads access {allocation.name}, which has "
                    f"{allocation.data.size} bytes, at byte {offsets[outside][0]}"
                )
            if (addresses[here] % np.uint64(width)).any():
                raise EmulationError(f"misaligned: an access of {width} bytes to {allocation.name}")
            yield allocation, here, offsets


def _elements(allocation: Allocation, offsets: np.ndarray, threads: np.ndarray, width: int):
    """The accessed elements, and the thread that accesses each."""
    count = -(-width // allocation.element_size)
    places = offsets[:, None] // allocation.element_size + np.arange(count)
    return places.ravel(), np.repeat(threads, count)


def _bytes(offsets: np.ndarray, width: int) -> np.ndarray:
    return offsets[:, None] + np.arange(width)


def _refuse(allocation: Allocation, found: np.ndarray, who: np.ndarray, what: str) -> None:
    race = (found != NOBODY) & (found != who)
    if race.any():
        raise EmulationError(f"race: thread {who[race][0]} {what}, in {allocation.name}")
