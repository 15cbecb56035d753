"""What each Triton kernel may cost on each GPU, one row per kernel.

reads, writes: bytes per element, one term per tensor. Two neighbours share an access: 16 bytes for float64 and
    int64, 8 for float32 and int32, 4 for bfloat16.
sums: what each of 256 lanes stores, once in 16 rows. alarm: a store that is masked off unless a value is too large,
    once in 16 rows if there are sums.
f64, fma: float64 instructions and multiply-adds per element, as NVIDIA/AMD if they differ. The source has two
    multiply-adds, in the division by a reciprocal on NVIDIA. The others are part of division instructions: AMD's in
    float64, and all in float32, where errors are compared.
registers: per thread (AMD: vector registers), in units of 8, the granularity of NVIDIA's allocation.
Spills, shared memory and barriers are not allowed. There may be fewer registers; everything else must be equal.
    Registers and float64 instructions are those of Triton 3.7; other versions may need 8 registers and 20 % more.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_targets import VERSION
from machine_code import Statistics, executed

from revdeq.kernels import Coefficients, Radix, backends, half_step, launch

MEASURED_WITH = (3, 7)

TABLE = """
kernel                          reads         writes   sums  alarm  f64    fma   registers:     sm_75    sm_80    sm_86    sm_89    sm_90   sm_100   sm_103   sm_120   sm_121   gfx90a   gfx942   gfx950  gfx1100  gfx1200  gfx1201
relax                           8+4           8+4      -     -      5      0                       56       40       40       40       40       40       40       40       40       48       48       48       48       48       48
relax, f in float64             8+8           8+8      -     -      3      0                       48       40       40       40       40       40       40       40       40       48       48       48       48       48       48
relax, f in bfloat16            8+2           8+2      -     -      5      0                       48       32       40       40       40       40       40       40       40       56       56       48       48       48       48
relax, gamma                    8+4+4         8+4      -     -      8      0                       64       40       48       48       40       40       40       40       40       64       64       64       64       64       64
relax, small                    8+4           8+4      -     -      5      0                       24       24       24       24       24       32       24       24       24       16       16       16       16       16       16
relax_norms                     8+4           8+4      8+8   -      10     0                       64       48       48       48       48       48       48       56       56       72       72       72       72       72       72
invert                          8+4           8+4      -     -      7/15   2/5                     48       48       48       48       48       40       48       48       48       48       48       48       48       48       48
invert_adjoint                  8+4+4+4       8+4+4    -     -      7/15   2/5                     48       40       40       40       40       48       48       48       48       48       48       48       56       56       56
invert_adjoint, f in float64    8+8+8+8       8+8+8    -     -      8/16   2/5                     40       48       48       48       48       48       48       48       48       64       64       64       64       64       64
invert_adjoint, f in bfloat16   8+2+4+2       8+2+4    -     -      7/15   2/5                     48       48       48       48       48       48       48       48       48       64       64       48       64       64       64
invert_adjoint, gamma           8+4+4+4+4+4   8+4+4    -     -      10/18  2/5                     48       48       48       48       48       48       48       48       48       56       56       56       64       64       64
invert_adjoint, small           8+4+4+4       8+4+4    -     -      7/15   2/5                     40       40       40       40       40       40       40       40       40       32       32       32       32       32       32
invert_adjoint, seed            8+4+4+4       8+4+4+4  -     -      7/15   2/5                     48       48       48       48       48       48       48       48       48       56       56       56       64       64       64
invert_compare                  8+4+4+4+4     4        4     -      10/18  7/10                    64       56       56       56       56       64       64       64       64       64       64       64       56       56       56
exact encode                    4             8        -     4      0      0                       32       24       24       24       24       24       24       24       24       40       40       40       32       32       32
exact decode                    8             4        -     -      0      0                       24       24       24       24       24       24       24       24       24       24       24       24       16       16       16
exact relax                     8+4           8+4      -     4      0      0                       48       40       48       48       48       48       48       40       40       56       56       56       56       56       56
exact relax, spill              8+4           8+4+4    -     4      0      0                       40       40       40       40       40       40       40       40       40       48       56       56       48       48       48
exact relax, gamma              8+4+4         8+4      -     4      0      0                       48       40       48       48       48       48       48       40       40       48       48       48       56       56       56
exact relax, small              8+4           8+4      -     4      0      0                       32       32       32       32       32       32       32       32       32       32       32       32       32       32       32
exact relax_norms               8+4           8+4      4+4   4      0      0                       72       56       56       56       64       56       56       72       72       88       88       88       96       96       96
exact invert                    8+4           8+4      -     -      0      0                       40       32       40       40       32       40       40       40       40       40       40       40       40       40       40
exact invert_adjoint            8+4+4+4       8+4+4    -     -      0      0                       48       32       40       40       40       40       40       40       40       48       48       48       56       56       56
exact invert_adjoint, spill     8+4+4+4+4     8+4+4    -     -      0      0                       48       40       40       40       40       40       40       40       40       40       40       40       56       56       56
exact invert_adjoint, gamma     8+4+4+4+4+4   8+4+4    -     -      0      0                       56       40       40       40       40       48       48       40       40       48       48       48       64       56       56
exact invert_adjoint, small     8+4+4+4       8+4+4    -     -      0      0                       32       32       40       40       32       32       32       40       40       24       24       24       32       32       32
exact invert_adjoint, seed      8+4+4+4       8+4+4+4  -     -      0      0                       56       40       40       40       40       40       40       40       40       48       48       48       56       56       56
exact invert_compare            8+4+4+4+4     4        4     -      0      5                       56       48       48       48       48       48       48       48       48       64       64       64       64       64       64
"""  # noqa: E501

FEW, MANY = launch.SMALL - 1, launch.SMALL  # elements: kernels depend on their number in no other way


def zeros(dtype: torch.dtype, n: int = MANY) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device="cpu").expand(n)


def arguments(operation: str, dtype: torch.dtype, step: Any, n: int, seed: torch.Tensor | None) -> tuple[Any, ...]:
    """The arguments of an operation."""
    f, adjoint, other = (zeros(t, n) for t in (dtype, *[torch.promote_types(dtype, torch.float32)] * 2))
    read, vjp, floor = zeros(dtype, n), zeros(dtype, n), torch.ones((), device="cpu")
    return {
        "relax": (f, read, step),
        "relax_norms": (f, read, step),
        "invert": (f, step),
        "invert_adjoint": (f, adjoint, vjp, other, step, step, seed),
        "invert_compare": (f, read, floor, adjoint, vjp, other, step, step, seed),
    }[operation]


def float64_state(
    operation: str,
    dtype: torch.dtype = torch.float32,
    beta: float = 0.8,
    gamma: float = 1.0,
    n: int = MANY,
    seed: torch.Tensor | None = None,
    examples: int = 0,
) -> None:
    """Launch an operation on the float64 state, or with `each` on this many examples."""
    bound = backends.gpu.HalfStep(zeros(torch.float64, n), zeros(dtype, n))
    if examples:
        bound.each(zeros(torch.int32, examples), 2)
    getattr(bound, operation)(*arguments(operation, dtype, Coefficients.rounded(beta, gamma), n, seed))


def exact_state(
    operation: str,
    beta: float = 0.8,
    gamma: float = 1.0,
    n: int = MANY,
    seed: torch.Tensor | None = None,
    spill: bool = False,
    examples: int = 0,
) -> None:
    """The same on the integer state."""
    radix = Radix.nearest(beta, 24, gamma)
    state, copy, aside = zeros(torch.int64, n), zeros(torch.float32, n), [zeros(torch.int32, n)]
    bound = backends.gpu_exact.HalfStep(state, copy, [radix] * 64, aside)
    bound.done = (radix.free_half_steps if spill else 0) + operation.startswith("invert")
    if examples:
        bound.each(zeros(torch.int32, examples), 2)
    getattr(bound, operation)(*arguments(operation, torch.float32, radix, n, seed))


RADIX = Radix.nearest(0.8, 24)

LAUNCHES: dict[str, Callable[[], None]] = {
    "relax": functools.partial(float64_state, "relax"),
    "relax, f in float64": functools.partial(float64_state, "relax", torch.float64),
    "relax, f in bfloat16": functools.partial(float64_state, "relax", torch.bfloat16),
    "relax, gamma": functools.partial(float64_state, "relax", gamma=1.3),
    "relax, small": functools.partial(float64_state, "relax", n=FEW),
    "relax_norms": functools.partial(float64_state, "relax_norms"),
    "invert": functools.partial(float64_state, "invert"),
    "invert_adjoint": functools.partial(float64_state, "invert_adjoint"),
    "invert_adjoint, f in float64": functools.partial(float64_state, "invert_adjoint", torch.float64),
    "invert_adjoint, f in bfloat16": functools.partial(float64_state, "invert_adjoint", torch.bfloat16),
    "invert_adjoint, gamma": functools.partial(float64_state, "invert_adjoint", gamma=1.3),
    "invert_adjoint, small": functools.partial(float64_state, "invert_adjoint", n=FEW),
    "invert_adjoint, seed": functools.partial(float64_state, "invert_adjoint", seed=zeros(torch.float32)),
    "invert_compare": functools.partial(float64_state, "invert_compare"),
    "exact encode": lambda: backends.gpu_exact.HalfStep.encoded(*[zeros(torch.float32)] * 2, RADIX),
    "exact decode": lambda: backends.gpu_exact.HalfStep.decoded(zeros(torch.int64), torch.float32, RADIX),
    "exact relax": functools.partial(exact_state, "relax"),
    "exact relax, spill": functools.partial(exact_state, "relax", spill=True),
    "exact relax, gamma": functools.partial(exact_state, "relax", gamma=1.3),
    "exact relax, small": functools.partial(exact_state, "relax", n=FEW),
    "exact relax_norms": functools.partial(exact_state, "relax_norms"),
    "exact invert": functools.partial(exact_state, "invert"),
    "exact invert_adjoint": functools.partial(exact_state, "invert_adjoint"),
    "exact invert_adjoint, spill": functools.partial(exact_state, "invert_adjoint", spill=True),
    "exact invert_adjoint, gamma": functools.partial(exact_state, "invert_adjoint", gamma=1.3),
    "exact invert_adjoint, small": functools.partial(exact_state, "invert_adjoint", n=FEW),
    "exact invert_adjoint, seed": functools.partial(exact_state, "invert_adjoint", seed=zeros(torch.float32)),
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
        """How many rows of two elements a thread processes."""
        if self.sums:
            return half_step.ROWS
        if "small" in self.kernel:
            return launch.SMALL_BLOCK // half_step.LANES
        if self.integers:
            return backends.gpu_exact.BLOCK // half_step.LANES
        return (backends.gpu.INVERT_BLOCK if "invert" in self.kernel else backends.gpu.RELAX_BLOCK) // half_step.LANES

    def rows_in(self, found: Statistics) -> int:
        """The number of rows, from the number of 16-byte accesses. In a loop, the rows that the compiler unrolled."""
        return self._rows(found.accesses)

    def _rows(self, accesses: Counter) -> int:
        kind, sizes = ("load", self.reads) if 8 in self.reads else ("store", self.writes)
        return accesses[kind, 16] // sum(size == 8 for size in sizes)

    def passes(self, kernel: Any) -> int:
        """How often the loop must run to process all rows, some of which may come before it."""

        def rows(passes: int) -> int:
            return self._rows(Counter(it.access for it in executed(kernel, passes)))

        return 1 if rows(1) == self.rows else 1 + (self.rows - rows(1)) // (rows(2) - rows(1))

    @property
    def bytes_read(self) -> float:
        return sum(self.reads)

    @property
    def bytes_written(self) -> float:
        return sum(self.writes) + sum(self.sums) / self.rows

    @property
    def integers(self) -> bool:
        return self.kernel.startswith("exact")

    def looked_at_by_default(self, target: str) -> bool:
        """The others take minutes: pytest -m full."""
        if target in ("sm_90", "gfx942"):
            return True
        return self.kernel in ("relax", "exact invert_adjoint, spill")

    def for_this_triton(self, target: str, found: Statistics) -> Statistics:
        """The allowed statistics with the installed version of Triton."""
        budget = self.on(target, self.rows_in(found))
        if VERSION == MEASURED_WITH:
            return budget
        float64 = min(found.float64, 6 * budget.float64 // 5)
        return dataclasses.replace(budget, registers=budget.registers + 8, float64=float64)

    def on(self, target: str, rows: int) -> Statistics:
        """The allowed statistics of a thread in a full block, or in this many rows of a chunk."""
        amd = target.startswith("gfx")
        accesses = Counter()
        for kind, sizes, count in (
            ("load", self.reads, rows),
            ("store", self.writes, rows),
            ("store", self.sums, 1),
        ):
            for size in sizes:
                accesses[kind, 2 * size] += count
        if "compare" in self.kernel and not amd:  # AMD uses scalar loads for what all threads share
            accesses["load", 4] += 1
        alarms = Counter({("store", size): 2 if self.sums else 2 * rows for size in self.alarm})
        return Statistics(
            registers=self.registers[target],
            spilled=0,
            shared=0,
            barriers=0,
            accesses=accesses + alarms if amd else accesses,  # AMD masks a store by an address out of range
            masked=Counter() if amd else alarms,
            float64=2 * rows * self.float64[amd],
            fused=2 * rows * self.fused[amd],
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
assert BUDGETS.keys() == LAUNCHES.keys(), "each kernel needs a row, and each row a kernel"

measured: dict[tuple[str, str], Statistics] = {}
"""Statistics by kernel and target, for the summary at the end of a run."""


def summary(target: str) -> list[str]:
    """What was measured, per element, in a table."""
    lines = [f"{'kernel':<36}{'bytes read':>12}{'written':>10}{'together':>10}{'float64 instr.':>16}{'registers':>11}"]
    for (kernel, where), found in measured.items():
        if where == target:
            budget = BUDGETS[kernel]
            read, written, elements = budget.bytes_read, budget.bytes_written, 2 * budget.rows_in(found)
            lines.append(
                f"{kernel:<36}{read:>12g}{written:>10g}{read + written:>10g}"
                f"{found.float64 / elements:>16g}{found.registers:>11}"
            )
    return lines if len(lines) > 1 else []
