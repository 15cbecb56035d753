"""What each Triton kernel may cost on each GPU, one row per kernel.

reads, writes: bytes per element, one term per tensor. Two neighbours share an access: 16 bytes for float64 and
    int64, 8 for float32 and int32, 4 for bfloat16.
sums: what each of 256 lanes stores, once in all rows of a chunk.
f64, fma: float64 instructions and multiply-adds per element, as NVIDIA/AMD if they differ. The source has two
    multiply-adds, in the division by a reciprocal on NVIDIA. The others are part of division instructions: AMD's in
    float64, and all in float32, where errors are compared.
registers: per thread (AMD: vector registers), in units of 8, the granularity of NVIDIA's allocation.
Spills, shared memory and barriers are not allowed. There may be fewer registers; everything else must be equal.
    Registers and float64 instructions are compared with the Triton that they were measured with.
"""

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from gpu_targets import VERSION
from machine_code import Statistics

from revdeq.kernels import gpu
from revdeq.kernels.gpu import exact, float64, launch
from revdeq.kernels.half_step import LANES, Coefficients, wide
from revdeq.kernels.radix import Radix

MEASURED_WITH = (3, 7)

TABLE = """
kernel                         reads        writes   sums  f64    fma   registers:  sm_80  sm_90  gfx942
relax                          8+4          8+4      -     5      0                 32     32     40
relax, f in float64            8+8          8+8      -     3      0                 32     40     40
relax, f in bfloat16           8+2          8+2      -     5      0                 32     32     40
relax, gamma                   8+4+4        8+4      -     8      0                 40     40     56
relax, small                   8+4          8+4      -     5      0                 24     24     16
relax_norms                    8+4          8+4      8+8   10     0                 32     32     48
invert                         8+4          8+4      -     7/15   2/5               40     40     48
invert_adjoint                 8+4+4+4      8+4+4+4  -     7/15   2/5               40     40     48
invert_adjoint, no seed        8+4+4+4      8+4+4    -     7/15   2/5               40     40     48
invert_adjoint, f in float64   8+8+8+8      8+8+8+8  -     8/16   2/5               40     40     56
invert_adjoint, f in bfloat16  8+2+4+2      8+2+4+2  -     7/15   2/5               48     48     40
invert_adjoint, gamma          8+4+4+4+4+4  8+4+4+4  -     10/18  2/5               40     40     40
invert_compare                 8+4+4+4+4    4+4      4     10/18  7/10              56     56     40
exact encode                   4            8        -     0      0                 24     24     24
exact decode                   8            4        -     0      0                 24     24     16
exact relax                    8+4          8+4      -     0      0                 40     40     40
exact relax, spill             8+4          8+4+4    -     0      0                 32     32     32
exact relax, gamma             8+4+4        8+4      -     0      0                 40     40     40
exact relax, small             8+4          8+4      -     0      0                 32     32     32
exact relax_norms              8+4          8+4      4+4   0      0                 40     40     40
exact invert                   8+4          8+4      -     0      0                 32     32     32
exact invert_adjoint           8+4+4+4      8+4+4+4  -     0      0                 32     32     40
exact invert_adjoint, spill    8+4+4+4+4    8+4+4+4  -     0      0                 32     32     40
exact invert_adjoint, gamma    8+4+4+4+4+4  8+4+4+4  -     0      0                 32     32     40
exact invert_compare           8+4+4+4+4    4+4      4     0      5                 40     40     40
"""

FEW, MANY = launch.SMALL - 2, 2**22  # elements: kernels depend on their number in no other way but whether it is even
RADIX = Radix.nearest(0.8, 24)


def zeros(dtype: torch.dtype, n: int = MANY) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device="cpu").expand(n)


def run(kernel: str, beta: float = 0.8) -> None:
    """Launch the kernel of a row of the table, on tensors that take no memory."""
    name, _, variant = kernel.partition(", ")
    state, operation = ("exact", name.removeprefix("exact ")) if "exact" in name else ("float64", name)
    if operation == "encode":
        gpu.STATES["exact"].encoded(zeros(torch.float32), RADIX)
        return
    if operation == "decode":
        gpu.STATES["exact"](zeros(torch.int64), RADIX).decoded(torch.float32)
        return
    n, gamma = FEW if variant == "small" else MANY, 1.3 if variant == "gamma" else 1.0
    dtype = {"f in float64": torch.float64, "f in bfloat16": torch.bfloat16}.get(variant, torch.float32)
    if state == "exact":
        h: Any = gpu.STATES[state](zeros(torch.int64, n), Radix.nearest(beta, 24, gamma))
        h.done = (h.step.free_half_steps if variant == "spill" else 0) + operation.startswith("invert")
        h._spilled = [zeros(torch.int32, n)]
    else:
        h = gpu.STATES[state](zeros(torch.float64, n), Coefficients.rounded(beta, gamma))
    f, z, seed, adjoint = zeros(dtype, n), zeros(dtype, n), zeros(dtype, n), zeros(wide(dtype), n)
    z, other = (z, adjoint) if gamma != 1 else (None, None)
    adjoints = adjoint, zeros(dtype, n), other, None if variant == "no seed" else seed
    extra = {"invert_adjoint": (f, *adjoints), "invert_compare": (f, torch.ones((), device="cpu"), *adjoints)}
    getattr(h, operation)(f, z, *extra.get(operation, (f,)))


@dataclass(frozen=True)
class Budget:
    kernel: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sums: tuple[int, ...]
    float64: tuple[int, int]
    fused: tuple[int, int]
    registers: dict[str, int]

    def rows(self, found: Statistics) -> int:
        """How many rows of two elements a thread processes, or in a chunk, in each pass through the loop, which the
        compiler may have unrolled."""
        if self.sums:
            return found.accesses["load", 16]
        if "small" in self.kernel:
            return 1
        block = float64.RELAX_BLOCK if self.kernel.startswith("relax") else float64.INVERT_BLOCK
        return (exact.BLOCK if self.kernel.startswith("exact") else block) // LANES

    def on(self, target: str, found: Statistics) -> Statistics:
        """The allowed statistics of a thread in a full block, or in one row of a chunk, given those that were found."""
        amd, rows, accesses = target.startswith("gfx"), self.rows(found), Counter()
        for kind, sizes in (("load", self.reads), ("store", self.writes)):
            for size in sizes:
                accesses[kind, 2 * size] += rows
        for size in self.sums:
            accesses["store", 2 * size] += 1
        if "compare" in self.kernel and not amd:  # AMD uses scalar loads for what all threads share
            accesses["load", 4] += 1
        if self.kernel.startswith(("exact relax", "exact encode")):  # the alarm, which is masked off
            accesses["store", 4] = min(found.accesses["store", 4], 2 * rows)
        allowed = Statistics(
            registers=max(self.registers[target], found.registers if VERSION != MEASURED_WITH else 0),
            spilled=0,
            shared=0,
            barriers=0,
            accesses=accesses,
            float64=2 * rows * self.float64[amd],
            fused=2 * rows * self.fused[amd],
        )
        return allowed if VERSION == MEASURED_WITH else dataclasses.replace(allowed, float64=found.float64)


def parsed(table: str) -> dict[str, Budget]:
    header, *lines = (re.split(r"\s{2,}", line.strip()) for line in table.strip().splitlines())

    def sizes(text: str) -> tuple[int, ...]:
        return () if text == "-" else tuple(map(int, text.split("+")))

    def by_vendor(text: str) -> tuple[int, int]:
        numbers = [int(x) for x in text.split("/")]
        return numbers[0], numbers[-1]

    budgets = {}
    for kernel, reads, writes, sums, f64, fma, *registers in lines:
        columns = sizes(reads), sizes(writes), sizes(sums), by_vendor(f64), by_vendor(fma)
        budgets[kernel] = Budget(kernel, *columns, dict(zip(header[7:], map(int, registers), strict=True)))
    return budgets


BUDGETS = parsed(TABLE)
