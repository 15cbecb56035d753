"""The machine code of the Triton kernels, cross-compiled for GPUs: no kernel costs more than its row in budgets.py
allows."""

import dataclasses
import functools
import re

import gpu_targets
import pytest
from gpu_targets import TARGETS, compiling, skip_without_the_compiler

skip_without_the_compiler()

import budgets  # noqa: E402
import machine_code  # noqa: E402
import triton  # noqa: E402
from budgets import BUDGETS  # noqa: E402

FULL = pytest.mark.full
OFTEN = ("relax", "relax_norms", "invert_adjoint", "exact relax", "exact relax_norms", "exact invert_adjoint")
"""The kernels of most half-steps. The others are disassembled for one GPU of each vendor."""
CASES = [(kernel, target) for target in ("sm_90", "gfx942") for kernel in BUDGETS] + [(k, "sm_80") for k in OFTEN]


@functools.cache
def compiled(kernel, target):
    with compiling(TARGETS[target]) as result:
        budgets.run(kernel)
    return result[0]


@pytest.mark.parametrize(("kernel", "target"), CASES)
def test_a_kernel_stays_within_its_budget(kernel, target):
    """A thread in a full block, against the row in tests/tools/budgets.py. No multiply-add is contracted."""
    found, text = machine_code.statistics(compiled(kernel, target)), compiled(kernel, target).asm
    allowed = BUDGETS[kernel].on(target, found)
    assert found.registers <= allowed.registers
    assert dataclasses.replace(found, registers=allowed.registers) == allowed
    llir, inverts = text["llir"], kernel.startswith("invert")
    assert "llvm.fma" not in llir and " contract " not in llir
    if "ptx" in text:
        assert text["ptx"].count("fma.rn") == 2 * text["ptx"].count("bra USUAL_"), "only those of a quotient"
        assert ("bra USUAL_" in text["ptx"]) == inverts
    assert bool(re.search(r"\bfdiv (<\d+ x )?double\b", llir)) == (inverts and "ptx" not in text)


@pytest.mark.parametrize("target", [pytest.param(x, marks=() if x == "sm_80" else FULL) for x in TARGETS])
def test_every_gpu_runs_every_kernel_from_registers(target):
    for kernel in BUDGETS:
        text = machine_code.text_of(compiled(kernel, target))
        assert machine_code.resources(text)[1] == compiled(kernel, target).metadata.shared == 0


@pytest.mark.parametrize("state", ["", "exact "])
def test_another_beta_compiles_nothing_new(monkeypatch, state):
    """Including numbers whose bits are divisible by 16, those that are 1 or negative, and p = 1; and a relaxation by
    f itself, which has no inverse."""
    compilations, kernels = [], ("relax", "relax, gamma", "relax_norms", "invert_adjoint", "invert_compare")
    monkeypatch.setattr(gpu_targets, "_compiled", {})
    monkeypatch.setattr(triton, "compile", lambda *source, **options: compilations.append(source))
    with compiling(TARGETS["sm_90"]):
        for beta in (0.8, *(i / 16 for i in range(1, 32) if i != 16), *(() if state else (1.1e-9, 2.3e-9))):
            for kernel in kernels:
                budgets.run(state + kernel, beta)
        budgets.run("relax", 1.0)
    assert len(compilations) == len(kernels) + (state != "")
