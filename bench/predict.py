"""Predictions, not measurements: what the half-steps would take on GPUs if they ran at the published rates.

    python bench/predict.py

Bytes per element are those of the kernels' budgets, which the tests compare with the machine code. Instructions are
counted in the machine code, compiled here for each GPU, on the path of a full block. Each of four limits gives a time,
and the longest counts: memory bandwidth, instruction issue, float64 instructions and integer instructions. This assumes
that they overlap perfectly, and that the full bandwidth and the boost clock are reached; a copy reaches about nine
tenths of the bandwidth. On a GPU, the measurements of `make bench` replace this.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from table import options

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/tools"))
import gpu_targets

ELEMENTS = 2**24
KERNELS = (
    "relax",
    "relax_norms",
    "invert_adjoint, seed",
    "exact relax",
    "exact relax_norms",
    "exact invert_adjoint, seed",
)
LIMITS = ("bandwidth", "issue", "float64", "integers")


@dataclass(frozen=True)
class Rates:
    """Results per clock of a multiprocessor: instructions issued (its schedulers times 32), float64 arithmetic,
    conversions from and to types of 64 bits, and integer arithmetic without multiplications."""

    issue: int
    float64: int
    conversions: int
    integers: int


# NVIDIA: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"; B300's from its data sheet.
# AMD: white paper "AMD CDNA 3 Architecture": a CU has 4 SIMD units of 16 lanes, which do float64 at the full rate.
TURING_TO_ADA = Rates(issue=128, float64=2, conversions=2, integers=64)
CONSUMER_BLACKWELL = Rates(issue=128, float64=2, conversions=2, integers=128)
RATES = {
    "sm_75": TURING_TO_ADA,
    "sm_80": Rates(issue=128, float64=32, conversions=16, integers=64),
    "sm_86": TURING_TO_ADA,
    "sm_89": TURING_TO_ADA,
    "sm_90": Rates(issue=128, float64=64, conversions=16, integers=64),
    "sm_100": Rates(issue=128, float64=64, conversions=16, integers=64),
    "sm_103": Rates(issue=128, float64=2, conversions=2, integers=64),
    "sm_120": CONSUMER_BLACKWELL,
    "gfx942": Rates(issue=64, float64=64, conversions=64, integers=64),
}


@dataclass(frozen=True)
class Gpu:
    target: str
    bandwidth: float
    multiprocessors: int
    clock: float


GPUS = {
    "T4": Gpu("sm_75", 320e9, 40, 1.59e9),  # data sheet "NVIDIA T4"; white paper "NVIDIA Turing GPU Architecture"
    "RTX 3090": Gpu("sm_86", 936e9, 82, 1.695e9),  # white paper "NVIDIA Ampere GA102 GPU Architecture"
    "A10": Gpu("sm_86", 600e9, 72, 1.695e9),  # data sheet "NVIDIA A10"
    "L4": Gpu("sm_89", 300e9, 58, 2.04e9),  # data sheet "NVIDIA L4"
    "L40S": Gpu("sm_89", 864e9, 142, 2.52e9),  # data sheet "NVIDIA L40S"
    "RTX 4090": Gpu("sm_89", 1008e9, 128, 2.52e9),  # white paper "NVIDIA Ada GPU Architecture"
    "RTX 5090": Gpu("sm_120", 1792e9, 170, 2.407e9),  # white paper "NVIDIA RTX Blackwell GPU Architecture"
    "A100 80 GB": Gpu("sm_80", 2039e9, 108, 1.41e9),  # data sheet "NVIDIA A100", SXM: 9.7 TFLOPS of float64
    "H100": Gpu("sm_90", 3350e9, 132, 1.98e9),  # data sheet "NVIDIA H100", SXM: 34 TFLOPS of float64
    "H200": Gpu("sm_90", 4800e9, 132, 1.98e9),  # data sheet "NVIDIA H200", SXM
    "B200": Gpu("sm_100", 8000e9, 148, 1.965e9),  # data sheet "NVIDIA HGX B200": 37 TFLOPS of float64
    "B300": Gpu("sm_103", 8000e9, 148, 1.92e9),  # data sheet "NVIDIA HGX B300": 1.2 TFLOPS of float64
    "MI300X": Gpu("gfx942", 5300e9, 304, 2.1e9),  # data sheet "AMD Instinct MI300X": 81.7 TFLOPS of float64 vectors
}


@dataclass(frozen=True)
class Work:
    """Per element: bytes, all instructions, and instructions of three classes."""

    moved: float
    issued: float
    arithmetic: float
    conversions: float
    integers: float


@functools.cache
def work(kernel, target):
    from budgets import BUDGETS, LAUNCHES
    from machine_code import executed

    with gpu_targets.compiling(gpu_targets.TARGETS[target]) as compiled:
        LAUNCHES[kernel]()
    budget = BUDGETS[kernel]
    way = executed(compiled[0], budget.passes(compiled[0]))
    if target.startswith("gfx"):  # scalar instructions have separate units
        way = [it for it in way if not it.opcode.startswith("s_")]
    counts = [
        len(way),
        sum(it.float64 and not it.conversion for it in way),
        sum(it.conversion for it in way),
        sum(it.integer for it in way),
    ]
    return Work(budget.bytes_read + budget.bytes_written, *(count / (2 * budget.rows) for count in counts))


def seconds(work, gpu):
    """Per element, by each limit."""
    rates, clocks = RATES[gpu.target], gpu.multiprocessors * gpu.clock
    float64 = work.arithmetic / rates.float64 + work.conversions / rates.conversions
    return {
        "bandwidth": work.moved / gpu.bandwidth,
        "issue": work.issued / rates.issue / clocks,
        "float64": float64 / clocks,
        "integers": work.integers / rates.integers / clocks,
    }


def main():
    table, quick = options(__doc__, "the H100 only")
    if gpu_targets.missing:
        print(f"No predictions: {gpu_targets.missing}")
        return
    print(
        "\nPREDICTED, at the published rates, f in float32: ps per element, with the limit if it is not the bandwidth"
    )
    print(f"  {'':12}" + "".join(f"{kernel:>24}" for kernel in KERNELS))
    for name, gpu in GPUS.items():
        if quick and name != "H100":
            continue
        cells = []
        for kernel in KERNELS:
            needed = work(kernel, gpu.target)
            by_limit = seconds(needed, gpu)
            limit = max(by_limit, key=by_limit.get)
            cells.append(f"{by_limit[limit] * 1e12:.1f}" + ("" if limit == "bandwidth" else f" ({limit})"))
            for limit, time in by_limit.items() if table else ():
                quantity, moved = f"predicted seconds by {limit}", round(ELEMENTS * needed.moved)
                called = f"predicted {kernel.removesuffix(', seed')}"
                table.add(called, name, ELEMENTS, quantity, [ELEMENTS * time], bytes_moved=moved)
        print(f"  {name:12}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
