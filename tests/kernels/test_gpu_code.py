"""The machine code of the Triton kernels, cross-compiled for many GPUs: no kernel costs more than its row in budgets.py
allows."""

import ast
import dataclasses
import itertools
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import gpu_targets
import pytest
import torch
from gpu_targets import TARGETS, compiling, skip_without_the_compiler

skip_without_the_compiler()

import budgets  # noqa: E402
import machine_code  # noqa: E402
import triton  # noqa: E402
from budgets import BUDGETS, exact_state, float64_state, measured  # noqa: E402

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
    """The kernels of the selected tests, compiled and disassembled by one thread per core."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {(p["kernel"], p["target"]): None for p in parameters if {"kernel", "target"} <= p.keys()}

    def launched():
        for kernel, target in chosen:
            with compiling(TARGETS[target]) as result:
                BUDGETS[kernel].launch()
            yield result

    jobs, parse, one_at_a_time = [], ast.parse, threading.Lock()

    def parse_alone(*args, **kwargs):
        with one_at_a_time:
            return parse(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", lambda *source, **options: jobs.append((source, options)))
        patch.setattr(gpu_targets, "_compiled", {}, raising=False)
        list(launched())
    with ThreadPoolExecutor(os.cpu_count()) as pool, pytest.MonkeyPatch.context() as patch:
        # In two threads, Python 3.11 may fail: "AST constructor recursion depth mismatch".
        patch.setattr(ast, "parse", parse_alone)
        list(pool.map(lambda job: triton.compile(*job[0], **job[1]), jobs))
        kernels = [kernel for (kernel,) in launched()]  # from Triton's own cache
        return dict(zip(chosen, zip(kernels, pool.map(machine_code.statistics, kernels), strict=True), strict=True))


@ON_EVERY_GPU
def test_a_kernel_stays_within_its_budget(compiled, kernel, target):
    _, found = compiled[kernel, target]
    rows = BUDGETS[kernel].rows_in(found)
    assert rows == BUDGETS[kernel].rows or BUDGETS[kernel].sums
    budget = BUDGETS[kernel].for_this_triton(target, found)
    measured[kernel, target] = found
    where = f"{kernel} on {target}, a thread in a full block, against its row in tests/tools/budgets.py:"
    assert found.within(budget), "\n".join([where, *found.against(budget)])


def test_with_another_triton_only_registers_and_float64_may_grow_a_little(monkeypatch):
    budget = BUDGETS["relax"].on("sm_90", BUDGETS["relax"].rows)
    more = {name: dataclasses.replace(budget, **{name: getattr(budget, name) + 8}) for name in ("registers", "float64")}
    spilled = {name: dataclasses.replace(budget, **{name: 8}) for name in ("spilled", "shared", "barriers", "fused")}
    many = {name: dataclasses.replace(budget, **{name: getattr(budget, name) + 9}) for name in more}
    for version, allowed in (((3, 7), {}), ((3, 5), more), ((3, 9), more)):
        monkeypatch.setattr(budgets, "VERSION", version)
        for cases in (more, spilled, many):
            for name, found in cases.items():
                fits = found.within(BUDGETS["relax"].for_this_triton("sm_90", found))
                assert fits == (cases is allowed), (version, name)
        assert budget.within(BUDGETS["relax"].for_this_triton("sm_90", budget))


@ON_EVERY_GPU
def test_coefficients_are_not_float32_and_no_multiply_add_is_contracted(compiled, kernel, target):
    text, budget = compiled[kernel, target][0].asm, BUDGETS[kernel]
    llir = text["llir"]
    assert "llvm.fma" not in llir and " contract " not in llir
    inverts = kernel.startswith("invert")
    if "ptx" in text:
        assert text["ptx"].count("fma.rn") == 2 * text["ptx"].count("bra USUAL_"), "only those of a quotient"
        assert ("bra USUAL_" in text["ptx"]) == inverts
        assert ".param .f32" not in text["ptx"]
    assert bool(re.search(r"\bfdiv (<\d+ x )?double\b", llir)) == (inverts and "ptx" not in text)
    if budget.integers:
        assert "double" not in llir


def test_each_kernel_moves_the_fewest_possible_bytes():
    """Each tensor is read once, and each that changes is written once."""
    bytes_moved = {kernel: (budget.bytes_read, budget.bytes_written) for kernel, budget in BUDGETS.items()}
    for state in ("", "exact "):
        assert bytes_moved[f"{state}relax"] == (8 + 4, 8 + 4)
        assert bytes_moved[f"{state}invert"] == (8 + 4, 8 + 4)
        assert bytes_moved[f"{state}invert_adjoint"] == (8 + 4 + 4 + 4, 8 + 4 + 4)
        assert bytes_moved[f"{state}invert_compare"] == (8 + 4 + 4 + 4 + 4, 4 + 4 / 16)
        assert sum(bytes_moved[f"{state}relax, gamma"]) == 28
        assert sum(bytes_moved[f"{state}invert_adjoint, gamma"]) == 44
        assert sum(bytes_moved[f"{state}invert_adjoint, seed"]) == 40
    assert bytes_moved["relax_norms"] == (12, 12 + 16 / 16)
    assert bytes_moved["exact relax_norms"] == (12, 12 + 8 / 16)


@pytest.mark.parametrize("launch", [float64_state, exact_state])
def test_another_beta_or_gamma_compiles_nothing_new(monkeypatch, launch):
    """Including bits that are divisible by 16, coefficients that are 1 or negative, and p = 1."""
    compilations = []
    monkeypatch.setattr(gpu_targets, "_compiled", {})
    monkeypatch.setattr(triton, "compile", lambda *source, **options: compilations.append(source))

    def sweep(betas, gammas):
        with compiling(TARGETS["sm_90"]):
            for beta, gamma in zip(betas, itertools.cycle(gammas)):
                for operation in ("relax", "relax_norms", "invert", "invert_adjoint", "invert_compare"):
                    launch(operation, beta=beta, gamma=gamma)

    sweep([0.8], [1.0])
    sweep([0.8], [1.3])
    assert len(compilations) == 10
    sweep([i / 16 for i in range(1, 32) if i != 16], [1.0])
    sweep([i / 16 for i in range(1, 32) if i != 16], [0.5, 1.5, 0.123, 1.9])
    if launch is float64_state:  # 1 - beta uses all bits of a float64
        sweep([1.1e-9, 2.3e-9, 3.7e-9], [1.0])
    assert len(compilations) == 10


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_loops_are_counted_as_often_as_they_run(target):
    """16 rows of two elements, each with its loads and stores, however far the compiler unrolled the loop."""
    with compiling(TARGETS[target]) as compiled:
        exact_state("relax_norms")
    budget = BUDGETS["exact relax_norms"]
    passes = budget.passes(compiled[0])
    once, all_of_them = (machine_code.executed(compiled[0], n) for n in (1, passes))
    assert sum(it.access == ("load", 16) for it in all_of_them) == budget.rows
    assert len(once) < len(all_of_them) < passes * len(once) or passes == 1


@pytest.mark.parametrize("target", ["sm_90", *(pytest.param(x, marks=pytest.mark.full) for x in ("sm_80", "gfx942"))])
def test_frozen_examples_cost_few_registers(target):
    """And no spills, shared memory or barriers."""
    seed = budgets.zeros(torch.float32)
    for launch in (float64_state, exact_state):
        for operation in ("relax", "relax_norms", "invert", "invert_adjoint"):
            more = {"seed": seed} if operation == "invert_adjoint" else {}
            found = []
            for examples in (0, 64):
                with compiling(TARGETS[target]) as compiled:
                    launch(operation, examples=examples, **more)
                found.append(machine_code.statistics(compiled[0]))
            plain, frozen = found
            assert frozen.spilled == frozen.shared == frozen.barriers == 0, operation
            assert frozen.registers <= plain.registers + 16, (operation, plain.registers, frozen.registers)


def test_a_chunk_begins_at_a_64_bit_offset():
    """So that tensors may have more than 2^31 elements."""
    with compiling(TARGETS["sm_90"]) as compiled:
        for operation in ("relax", "relax_norms", "invert_adjoint", "invert_compare"):
            float64_state(operation)
            exact_state(operation)
    for kernel in compiled:
        (program,) = re.findall(r"(%\S+) = tt.get_program_id", kernel.asm["ttir"])
        uses = re.findall(rf"= (\S+) .*{program}\b", kernel.asm["ttir"])
        assert uses and set(uses) == {"arith.extsi"}
