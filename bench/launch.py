"""The host's time for launching a half-step: Triton compiles and launches, but its driver is a stub.

    python bench/launch.py

It needs no GPU. It times a half-step launched by Triton, one launched from our cache, and torch's add_ of 16 numbers on
the CPU, the cheapest operation of torch. The times include Triton's launcher up to its call into C, if this Triton has
it in Python. The rest, C and the driver, is added as an estimate.
"""

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

DRIVER = 2.0
"""An estimate in microseconds, not measured here, for unpacking a kernel's arguments in C and the driver's
cuLaunchKernelEx, if the GPU's queue is not full."""


def half_steps():
    """Functions that take a half-step, by name."""
    from revdeq.kernels import Coefficients, Radix, gpu, gpu_exact

    f, adjoint, vjp, seed = (torch.zeros(N) for _ in range(4))
    step, radix = Coefficients.rounded(0.8), Radix.nearest(0.8, 24)
    floats = gpu.HalfStep(torch.zeros(N).double(), torch.zeros(N))
    integers = gpu_exact.HalfStep(torch.zeros(N, dtype=torch.int64), torch.zeros(N), [radix] * 2)

    def exact(operation, *arguments):
        integers.done = 1
        operation(*arguments)

    return {
        "relax": lambda: floats.relax(f, None, step),
        "invert_adjoint": lambda: floats.invert_adjoint(f, adjoint, vjp, None, step, step, seed),
        "exact relax": lambda: exact(integers.relax, f, None, radix),
        "exact invert_adjoint": lambda: exact(integers.invert_adjoint, f, adjoint, vjp, None, radix, radix, seed),
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
        launcher = with_tritons_launcher(stub(patch), patch)

        def by_triton(run):
            known, launch.is_known = launch.is_known, lambda kernel, device: False
            try:
                run()
            finally:
                launch.is_known = known

        providers = {("add_ of torch", ""): lambda: numbers.add_(numbers)}
        for name, run in half_steps().items():
            providers[name, "by Triton"] = lambda run=run: by_triton(run)
            providers[name, "compiled before"] = run
        times = take_turns(providers, 1 if quick else 10, least=5e-3, rounds=(9, 99), clock=time.process_time)
    print(f"\nmicroseconds of the host per half-step, {launcher}, the driver stubbed out: median")
    print(f"  {'':50}{'measured':>10}   with {DRIVER:g} for the driver (an estimate)")
    for (name, how), seconds in times.items():
        measured = statistics.median(seconds) * 1e6
        total = f"{measured + DRIVER:8.1f}" if how else ""
        print(f"  {name:32}{how:18}{measured:10.1f}{total}")
        if table:
            table.add(f"launch, {name}", how or "torch", N, "seconds", seconds)


def with_tritons_launcher(driver, patch):
    """Call the driver's stub through Triton's launcher, if possible. Returns whether, in words."""
    from triton.backends.nvidia import driver as nvidia

    driver.calls = Nowhere()
    if not hasattr(nvidia, "annotate_arguments"):  # before 3.7 it was compiled together with the driver's calls
        return "without Triton's launcher"
    for name in ("annotate_arguments", "make_kernel_signature"):  # called once per kernel, and in C
        patch.setattr(nvidia, name, lambda signature: None)
    driver.launcher_cls, driver.launch = nvidia.CudaLauncher, lambda *arguments: None
    return "with Triton's launcher"


class Nowhere:
    def append(self, call):
        pass


if __name__ == "__main__":
    main()
