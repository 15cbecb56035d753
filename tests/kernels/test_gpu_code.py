"""What the compiler makes of the Triton kernels, for GPUs that need not be here: no kernel costs more than its row in
budgets.py allows."""

import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor

import gpu_targets
import pytest
import torch
from gpu_targets import TARGETS, compiling, skip_without_the_compiler

skip_without_the_compiler()

import machine_code  # noqa: E402
import triton  # noqa: E402
from budgets import BUDGETS, float64_state, measured  # noqa: E402

from revdeq.kernels import gpu  # noqa: E402

ON_EVERY_GPU = pytest.mark.parametrize(
    ("kernel", "target"),
    [
        pytest.param(kernel, target, marks=() if budget.looked_at_by_default(target) else pytest.mark.full)
        for target in TARGETS
        for kernel, budget in BUDGETS.items()
    ],
)


@pytest.fixture(scope="module")
def compiled(request):
    """The kernels of the tests that were chosen, compiled and read by as many threads as there are cores."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {(p["kernel"], p["target"]): None for p in parameters if {"kernel", "target"} <= p.keys()}

    def launched():
        for kernel, target in chosen:
            with compiling(TARGETS[target]) as result:
                BUDGETS[kernel].launch()
            yield result

    jobs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", lambda *source, **options: jobs.append((source, options)))
        patch.setattr(gpu_targets, "_compiled", {}, raising=False)
        list(launched())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: triton.compile(*job[0], **job[1]), jobs))
        kernels = [kernel for (kernel,) in launched()]  # from Triton's own cache
        return dict(zip(chosen, zip(kernels, pool.map(machine_code.statistics, kernels), strict=True), strict=True))


@ON_EVERY_GPU
def test_a_kernel_stays_within_its_budget(compiled, kernel, target):
    (_, found), budget = compiled[kernel, target], BUDGETS[kernel].on(target)
    measured[kernel, target] = found
    where = f"{kernel} on {target}, a thread in a full block, against its row in tests/tools/budgets.py:"
    assert found.within(budget), "\n".join([where, *found.against(budget)])


@ON_EVERY_GPU
def test_beta_is_a_float64_and_no_multiply_add_is_contracted(compiled, kernel, target):
    text, budget = compiled[kernel, target][0].asm, BUDGETS[kernel]
    llir, last = text["llir"], text.get("ptx") or text["amdgcn"]
    assert "llvm.fma" not in llir and " contract " not in llir and "fma.rn" not in last
    assert bool(re.search(r"\bfdiv\b|\.div\.", llir)) == budget.divides
    if budget.integers:
        assert "double" not in llir
        return
    for number in {budget.beta, 1 - budget.beta}:
        bits = struct.pack(">d", number).hex()
        if "ptx" in text:
            assert f"0d{bits.upper()}" in last
        elif number != 0.5:  # which AMD's instructions have built in
            assert f"0x{bits[:8]}" in last
            assert f"0x{bits.upper()}" in llir


def test_the_bytes_are_the_least_that_each_pass_can_do_with():
    """Each tensor is read once, and each that changes is written once."""
    bytes_moved = {kernel: (budget.bytes_read, budget.bytes_written) for kernel, budget in BUDGETS.items()}
    for state in ("", "exact "):
        assert bytes_moved[f"{state}relax"] == (8 + 4, 8 + 4)
        assert bytes_moved[f"{state}invert"] == (8 + 4, 8 + 4)
        assert bytes_moved[f"{state}invert_adjoint"] == (8 + 4 + 4 + 4, 8 + 4 + 4)
        assert bytes_moved[f"{state}invert_compare"] == (8 + 4 + 4 + 4 + 4, 4 + 8 / 16)
    assert bytes_moved["relax_norms"] == (12, 12 + 16 / 16)
    assert bytes_moved["exact relax_norms"] == (12, 12 + 8 / 16)


def test_a_power_of_two_is_multiplied_and_not_divided():
    with compiling(TARGETS["sm_90"]) as compiled:
        for beta in (0.5, 1.5, 0.8):
            gpu.HalfStep(torch.zeros(4096, dtype=torch.float64), torch.zeros(4096), beta).invert(torch.zeros(4096))
    assert ["div.rn.f64" in kernel.asm["ptx"] for kernel in compiled] == [False, False, True]


def test_a_chunk_begins_at_a_64_bit_offset():
    """So that there may be more than 2^31 elements."""
    with compiling(TARGETS["sm_90"]) as compiled:
        for operation in ("relax", "relax_norms", "invert_adjoint", "invert_compare"):
            float64_state(operation)
    for kernel in compiled:
        products = re.findall(r"arith\.(?:muli|shli) .* : (\w+)", kernel.asm["ttir"])
        assert products and set(products) == {"i64"}
