"""What every Triton kernel may cost on every GPU: one row for each.

reads, writes: bytes per element, a term for each tensor. Two neighbours share an access: 16 bytes for float64 and
    int64, 8 for float32 and int32, 4 for bfloat16.
sums: what each of 256 lanes leaves behind, once in 16 rows. alarm: a store that is masked off unless a value is too
    large.
f64, fma: float64 instructions and multiply-adds per element, on NVIDIA/AMD where they differ. The source has no
    multiply-add: they divide with 8/5 of their own, and AMD converts a float32 to an int64 with one.
registers: per thread (AMD: vector registers), in units of 8, in which NVIDIA allots them. Triton 3.7.1.
Spills, shared memory and barriers: none, anywhere. Registers may be fewer; all else is met exactly.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from machine_code import Statistics

from revdeq.kernels import Coefficients, Radix, backends, half_step

TABLE = """
kernel                              reads      writes  sums  alarm  f64    fma    registers:  sm_75  sm_80  sm_86  sm_89  sm_90  sm_100  sm_120  gfx90a  gfx942  gfx1100
relax                               8+4        8+4     -     -      5      0                     32     32     32     32     32      32      32      24      24       24
relax, f in float64                 8+8        8+8     -     -      3      0                     32     32     32     32     32      32      32      24      24       16
relax, f in bfloat16                8+2        8+2     -     -      5      0                     24     24     24     24     24      24      32      24      24       24
relax_norms                         8+4        8+4     8+8   -      10     0                     64     56     56     56     56      56      56      32      32       32
invert                              8+4        8+4     -     -      13/15  8/5                   40     40     40     40     32      40      40      40      40       32
invert_adjoint                      8+4+4+4    8+4+4   -     -      13/15  8/5                   48     40     40     40     40      40      40      32      32       32
invert_adjoint, beta = .5           8+4+4+4    8+4+4   -     -      5      0                     32     32     32     32     32      32      32      24      24       24
invert_adjoint, f in float64        8+8+8+8    8+8+8   -     -      14/16  8/5                   48     40     40     40     40      40      40      32      32       32
invert_adjoint, f in bfloat16       8+2+4+2    8+2+4   -     -      13/15  8/5                   48     40     40     40     40      40      40      40      40       32
invert_compare                      8+4+4+4+4  4       4+4   -      16/18  8/5                  128    128    128    128    128     120     120      72      72       32
exact relax                         8+4        8+4     -     4      0      0/1                   40     32     40     40     32      32      40      32      32       40
exact relax, spill                  8+4        8+4+4   -     4      0      0/1                   40     32     40     40     32      32      40      32      32       40
exact relax_norms                   8+4        8+4     4+4   4      0      0/1                   96     96     80     80     96      80      96      56      64       48
exact invert                        8+4        8+4     -     -      0      0/1                   32     32     32     32     32      32      32      32      32       32
exact invert_adjoint                8+4+4+4    8+4+4   -     -      0      0/1                   32     32     32     32     32      32      32      32      32       24
exact invert_adjoint, spill         8+4+4+4+4  8+4+4   -     -      0      0/1                   40     32     32     32     32      32      40      32      32       24
exact invert_compare                8+4+4+4+4  4       4+4   -      0      0/2                  160    160    152    152    144     160     152     208     224      112
exact relax, p > 1                  8+4        8+4     -     4      0      0/1                   40     32     40     40     32      32      40      32      32       40
exact relax, spill, p > 1           8+4        8+4+4   -     4      0      0/1                   40     32     40     40     32      32      40      32      32       40
exact relax_norms, p > 1            8+4        8+4     4+4   4      0      0/1                   96     96     80     80     96      96      88      72      72       48
exact invert, p > 1                 8+4        8+4     -     -      0      0/1                   32     32     32     32     32      32      32      32      32       32
exact invert_adjoint, p > 1         8+4+4+4    8+4+4   -     -      0      0/1                   40     32     40     40     32      32      40      32      32       32
exact invert_adjoint, spill, p > 1  8+4+4+4+4  8+4+4   -     -      0      0/1                   40     32     40     40     32      32      40      32      32       24
exact invert_compare, p > 1         8+4+4+4+4  4       4+4   -      0      0/2                  136    128    128    128    128     152     144     224     256      104
"""  # noqa: E501

N = 5000  # its value specialises nothing


def zeros(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(N, dtype=dtype, device="cpu")


def arguments(operation: str, dtype: torch.dtype, step: Any) -> tuple[Any, ...]:
    """What an operation is called with."""
    f, adjoint, other = (zeros(t) for t in (dtype, *[torch.promote_types(dtype, torch.float32)] * 2))
    floor = torch.ones((), device="cpu")
    return {
        "relax": (f, zeros(dtype), step),
        "relax_norms": (f, zeros(dtype), step),
        "invert": (f, step),
        "invert_adjoint": (f, adjoint, zeros(dtype), other, step, step),
        "invert_compare": (f, zeros(dtype), floor, adjoint, zeros(dtype), other, step, step),
    }[operation]


def float64_state(operation: str, dtype: torch.dtype = torch.float32, beta: float = 0.8, gamma: float = 1.0) -> None:
    """Launches an operation on the float64 state."""
    bound = backends.gpu.HalfStep(zeros(torch.float64), zeros(dtype))
    getattr(bound, operation)(*arguments(operation, dtype, Coefficients.rounded(beta, gamma)))


def exact_state(operation: str, beta: float = 0.8, gamma: float = 1.0, spill: bool = False) -> None:
    """The same on the integer state."""
    radix = Radix.nearest(beta, 24, gamma)
    state, copy, aside = zeros(torch.int64), zeros(torch.float32), [zeros(torch.int32)]
    bound = backends.gpu_exact.HalfStep(state, copy, [radix] * 64, aside)
    bound.done = (radix.free_half_steps if spill else 0) + operation.startswith("invert")
    getattr(bound, operation)(*arguments(operation, torch.float32, radix))


LAUNCHES: dict[str, Callable[[], None]] = {
    "relax": functools.partial(float64_state, "relax"),
    "relax, f in float64": functools.partial(float64_state, "relax", torch.float64),
    "relax, f in bfloat16": functools.partial(float64_state, "relax", torch.bfloat16),
    "relax, gamma": functools.partial(float64_state, "relax", gamma=1.3),
    "relax_norms": functools.partial(float64_state, "relax_norms"),
    "invert": functools.partial(float64_state, "invert"),
    "invert_adjoint": functools.partial(float64_state, "invert_adjoint"),
    "invert_adjoint, f in float64": functools.partial(float64_state, "invert_adjoint", torch.float64),
    "invert_adjoint, f in bfloat16": functools.partial(float64_state, "invert_adjoint", torch.bfloat16),
    "invert_adjoint, gamma": functools.partial(float64_state, "invert_adjoint", gamma=1.3),
    "invert_compare": functools.partial(float64_state, "invert_compare"),
    "exact relax": functools.partial(exact_state, "relax"),
    "exact relax, spill": functools.partial(exact_state, "relax", spill=True),
    "exact relax, gamma": functools.partial(exact_state, "relax", gamma=1.3),
    "exact relax_norms": functools.partial(exact_state, "relax_norms"),
    "exact invert": functools.partial(exact_state, "invert"),
    "exact invert_adjoint": functools.partial(exact_state, "invert_adjoint"),
    "exact invert_adjoint, spill": functools.partial(exact_state, "invert_adjoint", spill=True),
    "exact invert_adjoint, gamma": functools.partial(exact_state, "invert_adjoint", gamma=1.3),
    "exact invert_compare": functools.partial(exact_state, "invert_compare"),
}


@dataclass(frozen=True)
class Budget:
    kernel: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sums: tuple[int, ...]
    alarm: tuple[int, ...]
    float64: tuple[int, int]
    fused: tuple[int, int]
    registers: dict[str, int]

    @property
    def launch(self) -> Callable[[], None]:
        return LAUNCHES[self.kernel]

    @property
    def rows(self) -> int:
        """Of two elements, that a thread goes through."""
        return reference.ROWS if self.sums else 4

    @property
    def bytes_read(self) -> float:
        return sum(self.reads)

    @property
    def bytes_written(self) -> float:
        return sum(self.writes) + sum(self.sums) / self.rows

    @property
    def integers(self) -> bool:
        return self.kernel.startswith("exact")

    @property
    def beta(self) -> float:
        return 0.5 if "beta = .5" in self.kernel else BETA

    @property
    def divides(self) -> bool:
        """By 1 - beta, unless that is a power of two."""
        return self.kernel.startswith("invert") and self.beta != 0.5

    def looked_at_by_default(self, target: str) -> bool:
        """The rest takes minutes: pytest -m full."""
        if target in ("sm_90", "gfx942"):
            return not (self.sums and "p > 1" in self.kernel)
        return self.kernel in ("relax", "invert_adjoint", "exact relax, p > 1", "exact invert_adjoint, spill, p > 1")

    def on(self, target: str) -> Statistics:
        """For a thread in a full block."""
        amd = target.startswith("gfx")
        accesses = Counter()
        for kind, sizes, count in (
            ("load", self.reads, self.rows),
            ("store", self.writes, self.rows),
            ("store", self.sums, 1),
        ):
            for size in sizes:
                accesses[kind, 2 * size] += count
        alarms = Counter({("store", size): 2 * self.rows for size in self.alarm})
        return Statistics(
            registers=self.registers[target],
            spilled=0,
            shared=0,
            barriers=0,
            accesses=accesses + alarms if amd else accesses,  # AMD masks a store by an address out of range
            masked=Counter() if amd else alarms,
            float64=2 * self.rows * self.float64[amd],
            fused=2 * self.rows * self.fused[amd],
        )


def parsed(table: str) -> dict[str, Budget]:
    header, *lines = (re.split(r"\s{2,}", line.strip()) for line in table.strip().splitlines())
    targets = header[8:]

    def sizes(text: str) -> tuple[int, ...]:
        return () if text == "-" else tuple(map(int, text.split("+")))

    def by_vendor(text: str) -> tuple[int, int]:
        numbers = [int(x) for x in text.split("/")]
        return numbers[0], numbers[-1]

    budgets = {}
    for kernel, reads, writes, sums, alarm, float64, fused, *registers in lines:
        columns = sizes(reads), sizes(writes), sizes(sums), sizes(alarm), by_vendor(float64), by_vendor(fused)
        budgets[kernel] = Budget(kernel, *columns, dict(zip(targets, map(int, registers), strict=True)))
    return budgets


BUDGETS = parsed(TABLE)
assert BUDGETS.keys() == LAUNCHES.keys(), "a row for each kernel, and a kernel for each row"

measured: dict[tuple[str, str], Statistics] = {}
"""By kernel and target, for the summary at the end of a run."""


def summary(target: str) -> list[str]:
    """What was measured, per element, in a table."""
    lines = [f"{'kernel':<36}{'bytes read':>12}{'written':>10}{'together':>10}{'float64 instr.':>16}{'registers':>11}"]
    for (kernel, where), found in measured.items():
        if where == target:
            elements = 2 * BUDGETS[kernel].rows
            read, written = (found.bytes_of(kind) / elements for kind in ("load", "store"))
            lines.append(
                f"{kernel:<36}{read:>12g}{written:>10g}{read + written:>10g}"
                f"{found.float64 / elements:>16g}{found.registers:>11}"
            )
    return lines if len(lines) > 1 else []
