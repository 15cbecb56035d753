"""No kernel costs more, on any GPU, than its row in budgets.py allows. It takes a compiler, and no GPU."""

import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
from gpu_targets import TARGETS, compiling, skip_without_the_compiler

skip_without_the_compiler()

import triton  # noqa: E402
from budgets import BETA, BUDGETS, measured  # noqa: E402
from machine_code import statistics  # noqa: E402

CASES = [
    pytest.param(kernel, target, marks=() if budget.compiled_by_default(target) else pytest.mark.full)
    for target in TARGETS
    for kernel, budget in BUDGETS.items()
]
on_every_gpu = pytest.mark.parametrize(("kernel", "target"), CASES)


@pytest.fixture(scope="module")
def compiled(request):
    """The kernels of the tests that were chosen, compiled by as many threads as there are cores."""
    chosen = {
        (item.callspec.params["kernel"], item.callspec.params["target"]): []
        for item in request.session.items
        if item.path == request.path and "target" in getattr(item, "callspec", item).__dict__.get("params", {})
    }
    with pytest.MonkeyPatch.context() as patch:
        for (kernel, target), job in chosen.items():
            patch.setattr(triton, "compile", lambda *source, job=job, **options: job.append((source, options)))
            with compiling(TARGETS[target]):
                BUDGETS[kernel].launch()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(triton.compile, *source, **options) for ((source, options),) in chosen.values()]
    return dict(zip(chosen, (job.result() for job in jobs), strict=True))


@on_every_gpu
def test_it_stays_within_its_budget(compiled, kernel, target):
    found = statistics(compiled[kernel, target])
    measured[kernel, target] = found
    budget = BUDGETS[kernel].on(target)
    assert found.within(budget), "\n".join(
        [
            f"{kernel} on {target} is not within its budget (tests/budgets.py); a thread in a full block:",
            *found.against(budget),
        ]
    )


@on_every_gpu
def test_it_multiplies_by_beta_in_float64_and_contracts_nothing(compiled, kernel, target):
    text, budget = compiled[kernel, target].asm, BUDGETS[kernel]
    llir, last = text["llir"], text.get("ptx") or text["amdgcn"]
    assert "llvm.fma" not in llir and "contract" not in llir and "fma.rn" not in last
    divides = re.search(r"\bfdiv\b|\.div\.", llir)
    assert bool(divides) == budget.divides, "a division where there should be none, or none where there should be one"
    if budget.integers:
        assert "double" not in llir
        return
    for number in (budget.beta, 1 - budget.beta):
        bits = struct.pack(">d", number).hex()
        assert number == 0.5 or f"double 0x{bits.upper()}" in llir
        if "ptx" in text:
            assert f"0d{bits.upper()}" in last
        else:
            assert f"0x{bits[:8]}" in last


def test_the_way_back_of_the_state_is_the_way_there():
    """What the table says of bytes, added up: the physical limit of each pass."""
    limits = {"relax": (12, 12), "invert": (12, 12), "invert_adjoint": (20, 16), "exact relax": (12, 12)}
    for kernel, (read, written) in limits.items():
        assert (BUDGETS[kernel].bytes_read, BUDGETS[kernel].bytes_written) == (read, written)
    assert BETA != 0.8  # as the solver rounds it
