"""What Python spends on a half-step before a GPU hears of it: Triton compiles and launches, but its driver is a stub.

    python bench/launch.py

It needs no GPU. Beside a half-step that Triton launches and one of a kernel that was compiled before, it times the
half-step of a state of five tensors, with a launch for each or with one for all, and torch's own add_ of 16 numbers on
the CPU, the least that an operation of torch costs here.
"""

import contextlib
import functools
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
from table import options
from turns import take_turns

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/tools"))
import gpu_targets

N = 5000


LEAVES = 5


def half_steps():
    """By name, functions that take one."""
    from revdeq.kernels import Coefficients, Radix, gpu, gpu_exact

    f, adjoint, vjp = torch.zeros(N), torch.zeros(N), torch.zeros(N)
    step, radix = Coefficients.rounded(0.8), Radix.nearest(0.8, 24)
    floats = gpu.HalfStep(torch.zeros(N).double(), torch.zeros(N))
    integers = gpu_exact.HalfStep(torch.zeros(N, dtype=torch.int64), torch.zeros(N), [radix] * 2)

    def exact(operation, *arguments):
        integers.done = 1
        operation(*arguments)

    return {
        "relax": lambda: floats.relax(f, None, step),
        "invert_adjoint": lambda: floats.invert_adjoint(f, adjoint, vjp, None, step, step),
        "exact relax": lambda: exact(integers.relax, f, None, radix),
        "exact invert_adjoint": lambda: exact(integers.invert_adjoint, f, adjoint, vjp, None, radix, radix),
    }


def main():
    table, quick = options(__doc__, "fewer rounds")
    if gpu_targets.missing:
        print(f"Nothing to time: {gpu_targets.missing}")
        return
    from stub_driver import stub

    from revdeq.kernels import launch

    torch.set_num_threads(1)
    numbers = torch.zeros(16)
    with pytest.MonkeyPatch.context() as patch:
        stub(patch).calls = Nowhere()

        def by_triton(run):
            known, launch.is_known = launch.is_known, lambda kernel, device: False
            try:
                run()
            finally:
                launch.is_known = known

        providers = {("add_ of torch", ""): lambda: numbers.add_(numbers)}

        def all_leaves(runs, around):
            with around():
                for run in runs:
                    run()

        leaves = [half_steps() for _ in range(LEAVES)]
        for name, run in leaves[0].items():
            providers[name, "by Triton"] = lambda run=run: by_triton(run)
            providers[name, "compiled before"] = run
            runs = [leaf[name] for leaf in leaves]
            for how, around in (("a launch each", contextlib.nullcontext), ("one launch", launch.together)):
                providers[f"{name}, {LEAVES} leaves", how] = functools.partial(all_leaves, runs, around)
        times = take_turns(providers, 1 if quick else 10, least=5e-3, rounds=(9, 99), clock=time.process_time)
    print("\nmicroseconds of Python per half-step, with the driver stubbed out: median")
    for (name, how), seconds in times.items():
        print(f"  {name:32}{how:18}{statistics.median(seconds) * 1e6:8.1f}")
        if table:
            table.add(f"launch, {name}", how or "torch", N, "seconds", seconds)


class Nowhere:
    def append(self, call):
        pass


if __name__ == "__main__":
    main()
