"""Predictions, not measurements: what the half-steps would take on GPUs if they ran at the published rates.

    python bench/predict.py

The float64 instructions per element are counted in the kernels' machine code, compiled for each GPU here, and the bytes
are those of their budgets, which the tests compare with the machine code. The slower of the two decides. That a kernel
reaches the full bandwidth is an assumption: a copy reaches nine tenths of it or so. What `make bench` measures on a GPU
replaces this.
"""

import sys
from pathlib import Path

from table import options

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/tools"))
import gpu_targets

ELEMENTS = 2**24
GPUS = {
    "T4": ("sm_75", 320e9, 0.127e12),
    "A100 80 GB SXM": ("sm_80", 2039e9, 4.85e12),
    "RTX 4090": ("sm_89", 1008e9, 0.645e12),
    "H100 SXM": ("sm_90", 3350e9, 17e12),
    "B200": ("sm_100", 8000e9, 20e12),
    "MI300X": ("gfx942", 5300e9, 40.8e12),
}
"""Bytes and float64 instructions per second, from the data sheets, which count a multiply-add as two operations."""
KERNELS = ("relax", "invert_adjoint", "exact relax", "exact invert_adjoint")


def per_element(kernel, target):
    """Bytes moved, and float64 instructions."""
    from budgets import BUDGETS, LAUNCHES
    from machine_code import statistics

    with gpu_targets.compiling(gpu_targets.TARGETS[target]) as compiled:
        LAUNCHES[kernel]()
    found, budget = statistics(compiled[0]), BUDGETS[kernel]
    return budget.bytes_read + budget.bytes_written, found.float64 / (2 * budget.rows_in(found))


def main():
    table, quick = options(__doc__, "the H100 only")
    if gpu_targets.missing:
        print(f"No predictions: {gpu_targets.missing}")
        return
    print(f"\nPREDICTED, at the published rates, 2^{ELEMENTS.bit_length() - 1} elements, f in float32")
    print(f"  {'':18}{'bandwidth':>12}" + "".join(f"{kernel:>24}" for kernel in KERNELS))
    for gpu, (target, bandwidth, float64_rate) in GPUS.items():
        if quick and gpu != "H100 SXM":
            continue
        cells = []
        for kernel in KERNELS:
            moved, float64 = per_element(kernel, target)
            seconds = ELEMENTS * max(moved / bandwidth, float64 / float64_rate)
            cells.append(f"{moved:g} B, {seconds * 1e6:.0f} us")
            if table:
                table.add(
                    f"predicted {kernel}", gpu, ELEMENTS, "predicted seconds", [seconds],
                    bytes_moved=round(ELEMENTS * moved),
                )  # fmt: skip
        print(f"  {gpu:18}{bandwidth / 1e9:7.0f} GB/s" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
