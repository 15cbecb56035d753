"""The public operators and the exact state's object: their values, torch's checks of them, and wrong arguments."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_kernels
import torch
from torch.library import opcheck

from revdeq import kernels
from revdeq.baselines import stored_graph
from revdeq.kernels import ExactState, cpu, reference, reference_exact
from revdeq.kernels.half_step import Coefficients

SOURCES = Path(kernels.__file__).parent / "cpu"
OPERATORS = ("relax", "invert", "invert_adjoint")


def arguments(operator="invert_adjoint", gamma=1.3, read=torch.float32, n=8, permuted=False):
    """What an operator takes, by name."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if read is torch.float64 else torch.float32
    dtypes = {"y": torch.float64, "f_z": read, "adjoint": wide, "vjp": read, "z": read, "other": wide}
    given = {name: torch.randn(2, n, generator=generator).to(dtype) for name, dtype in dtypes.items()}
    if permuted:
        given = {name: x.t().contiguous().t() if name in ("y", "adjoint") else x for name, x in given.items()}
    if operator != "invert_adjoint":
        del given["adjoint"], given["vjp"], given["other"]
    if gamma == 1:
        given = {name: x for name, x in given.items() if name not in ("z", "other")}
    return {**given, "beta": 0.8, "gamma": gamma}


def call(operator, **given):
    """All results: what is written, and what is returned."""
    returned = getattr(kernels, operator)(**given)
    written = [x.clone() for name, x in given.items() if name in ("y", "adjoint")]
    return [*written, *(returned if isinstance(returned, tuple) else (returned,))]


def same(results, expected):
    return len(results) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(results, expected, strict=True)
    )


def test_operators_are_the_half_steps_of_every_backend(backend):
    cases = (1.0, torch.bfloat16), (1.3, torch.float32), (1.3, torch.float64)
    for operator, (gamma, read) in itertools.product(OPERATORS, cases):
        given = arguments(operator, gamma, read)
        y, f_z, z = given["y"].clone(), given["f_z"], given.get("z")
        half_step, copy = reference.HalfStep(y, Coefficients.rounded(0.8, gamma)), torch.empty_like(f_z)
        expected = [y, copy]
        if operator == "invert_adjoint":
            adjoint, seed = given["adjoint"].clone(), torch.empty_like(f_z)
            half_step.invert_adjoint(f_z, z, copy, adjoint, given["vjp"], given.get("other"), seed)
            expected = [y, adjoint, copy, seed]
        else:
            getattr(half_step, operator)(f_z, z, copy)
        with kernels.backend(backend):
            assert same(call(operator, **given), expected)


def test_what_f_reads_next_may_have_another_dtype():
    given = arguments(gamma=1.0)
    _, _, read, seed = call("invert_adjoint", **given | {"f_z": given["f_z"].bfloat16()}, dtype=torch.float32)
    assert read.dtype is torch.float32 and seed.dtype is torch.bfloat16


@pytest.mark.parametrize("operator", OPERATORS)
def test_torch_accepts_the_operators(operator):
    for gamma, permuted in ((1.0, True), (1.3, False)):
        opcheck(getattr(torch.ops.revdeq, operator).default, (), arguments(operator, gamma, permuted=permuted))


def a_step_and_back(y, f_z, adjoint, vjp, beta):
    read = kernels.relax(y, f_z, beta)
    z = kernels.relax(y, read / 2, beta, 0.7, read)
    kernels.invert(y, read / 2, beta, 0.7, read)
    return z, *kernels.invert_adjoint(y, f_z, adjoint, vjp, beta)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the compiler's own
def test_compiled_and_exported_programs_compute_the_same():
    tensors = list(arguments(gamma=1.0).values())[:4]
    module = torch.nn.Module()
    module.forward = lambda y, f_z, adjoint, vjp: a_step_and_back(y, f_z, adjoint, vjp, 0.8)

    def run(program, *more):
        own = [x.clone() for x in tensors]
        return [*program(*own, *more), *own]

    expected = run(a_step_and_back, 0.8)
    compiled = torch.compile(a_step_and_back, fullgraph=True)
    for beta in (0.8, 0.6):  # another beta is another graph, or a symbol
        assert same(run(compiled, beta), run(a_step_and_back, beta))
    exported = torch.export.export(module, tuple(x.clone() for x in tensors))
    assert same(run(exported.module()), expected)
    assert same(run(exported.run_decompositions().module()), expected)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_the_loops_of_the_specification_compute_the_gradient_of_the_stored_graph(state):
    torch.manual_seed(0)
    layer, beta, steps = torch.nn.Linear(6, 6), 0.75, 8
    z0, weight = torch.randn(4, 6), torch.randn(4, 6)

    def f(z, *_):
        return torch.tanh(layer(z))

    start = z0.clone().requires_grad_()
    end = stored_graph(f, start, beta=beta, max_steps=steps)
    expected = torch.autograd.grad(end, [start, *layer.parameters()], weight)
    if state == "float64":
        y, z = reference.iterate(f, z0, beta, steps)
        ends = z.float()
        ours = reference.gradient(f, y, z, weight, beta, steps)
        assert torch.equal(y, z0.double()) and torch.equal(z, z0.double())
        y, z = reference.iterate(f, z0, beta, steps)
        reference.invert(f, y, z, beta, steps, torch.float32)
        assert torch.equal(y, z0.double()) and torch.equal(z, z0.double())
    else:
        y, z = ExactState(z0, beta), ExactState(z0, beta)
        rounded = z.read(torch.float32)
        ends = reference_exact.iterate(f, y, z, rounded, steps)
        ours = reference_exact.gradient(f, y, z, y.read(torch.float32), weight, beta, steps)
        assert torch.equal(y.read(torch.float32), rounded) and torch.equal(z.read(torch.float32), rounded)
        reference_exact.iterate(f, y, z, rounded, steps)
        assert torch.equal(reference_exact.invert(f, y, z, y.read(torch.float32), steps), rounded)
    atol = {"float64": 1e-7, "exact": 1e-6}[state]  # of float32, and of 24 fraction bits
    torch.testing.assert_close(ends, end.detach(), rtol=0, atol=atol)
    found = [ours, *(x.grad for x in layer.parameters())]
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-6)


def test_backends_can_be_forced(monkeypatch):
    used = []
    step = reference.HalfStep.relax
    monkeypatch.setattr(reference.HalfStep, "relax", lambda *args: (used.append("reference"), step(*args)))
    with kernels.backend("reference"):
        call("relax", **arguments("relax"))
    monkeypatch.setenv("REVDEQ_BACKEND", "reference")
    call("relax", **arguments("relax"))
    assert len(used) == 2


def test_autograd_notices_that_a_state_was_changed():
    given = arguments("relax", gamma=1.0)
    w = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
    product = (w * given["y"]).sum()
    kernels.relax(**given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


BAD = {
    "y": {
        TypeError: [lambda y: [0.0], lambda y: y.float(), lambda y: y.to_sparse()],
        ValueError: [strided, lambda y: y[:1].expand(y.shape), lambda y: y.requires_grad_(), torch._neg_view],
    },
    "f_z": {
        TypeError: [lambda x: x.long(), lambda x: x + 0j, lambda x: x.to_sparse()],
        ValueError: [lambda x: x[:, :2], lambda x: x.repeat(2, 1), lambda x: x[0, 0], lambda x: x.requires_grad_()],
    },
    "z": {TypeError: [lambda x: x.double()], ValueError: [lambda x: None, lambda x: x[:1]]},
    "adjoint": {
        TypeError: [lambda x: None, lambda x: x.double()],
        ValueError: [lambda x: x[:1], strided, lambda x: x.t().contiguous().t(), torch._neg_view],
    },
    "vjp": {TypeError: [lambda x: x.double()], ValueError: [lambda x: x[:1], lambda x: x.to("meta")]},
    "other": {TypeError: [lambda x: x.half()], ValueError: [lambda x: None, lambda x: x[:1]]},
    "beta": {TypeError: [lambda _: "0.5"], ValueError: [lambda _: 1, lambda _: 1 - 1e-9, lambda _: float("nan")]},
    "gamma": {ValueError: [lambda _: float("inf")]},
    "dtype": {TypeError: [lambda _: torch.int32, lambda _: "float32"]},
}
"""By argument and error, changes that are wrong."""


def refuse(call, given, name, value, error, what=None):
    """Call with a wrong argument. The error must name it, and nothing may be written."""
    before = {key: x.clone() for key, x in given.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=rf"\b{what or name}\b"):
        call(**{**given, name: value})
    for key, x in before.items():
        assert torch.equal(given[key].detach(), x)


def refuse_all(name):
    """By all operators, and by the methods of an exact state."""
    changes = [(error, change) for error, several in BAD[name].items() for change in several]
    for operator, (error, change) in itertools.product(OPERATORS, changes):
        given = arguments(operator)
        if name in (*given, "dtype"):
            refuse(getattr(kernels, operator), given, name, change(given.get(name)), error)
        of_the_state = {key: given.pop(key) for key in ("y", "beta", "gamma")}
        if name in (*given, "dtype"):
            state = exact_state(of_the_state)
            before = state.read(torch.float64)
            refuse(getattr(state, operator), given, name, change(given.get(name)), error)
            assert torch.equal(state.read(torch.float64), before)


def exact_state(given):
    """One with a half-step to invert."""
    state = ExactState(given["y"].float(), given["beta"], given["gamma"])
    state.relax(torch.zeros(given["y"].shape), torch.zeros(given["y"].shape))
    return state


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named_and_nothing_is_written(backend, name):
    with kernels.backend(backend):
        refuse_all(name)


def test_memory_that_is_written_is_not_shared(backend):
    given = arguments(n=64)
    buffer = torch.zeros(2 * 128 + 1, dtype=torch.float64)
    y = buffer[:128].view(2, 64)
    shared = buffer[:64].view(torch.float32).view(2, 64), buffer[64:].view(torch.float32)[127:255].view(2, 64)
    with kernels.backend(backend):
        for x in shared:
            for name in ("f_z", "z", "adjoint", "vjp", "other"):
                refuse(kernels.invert_adjoint, {**given, "y": y}, name, x, ValueError, f"({name}|y) and y")
        for name in ("f_z", "z", "vjp", "other"):
            refuse(kernels.invert_adjoint, given, name, given["adjoint"], ValueError, f"{name} and adjoint")
        beside = buffer[128:192].view(torch.float32).view(2, 64)
        kernels.relax(y, beside, 0.8, 1.3, beside)  # what is read may be shared, and memory may be adjacent
        turned = y.view(torch.float32)[:, ::2].t().contiguous().t()
        kernels.relax(y, turned, 0.5)


def test_a_tensor_without_memory_is_refused(backend):
    given = arguments("relax", gamma=1.0)
    state = ExactState(torch.zeros(2, 8), 0.8)
    with kernels.backend(backend), pytest.raises(TypeError, match="f_z .*memory"):
        state.relax(torch._efficientzerotensor((2, 8)))
    freed = given["f_z"].clone()
    freed.untyped_storage().resize_(0)
    refuse(kernels.relax, given, "f_z", freed, TypeError)


def test_an_exact_state_checks_what_it_is_made_of():
    zeros = torch.zeros(3)
    for error, name, *given in (
        (TypeError, "y", [0.0], 0.8),
        (TypeError, "y", zeros.int(), 0.8),
        (TypeError, "y", zeros.to_sparse(), 0.8),
        (ValueError, "beta", zeros, 1),
        (ValueError, "beta", zeros, 0.001),
        (ValueError, "gamma", zeros, 0.8, float("nan")),
        (ValueError, "fraction_bits", zeros, 0.8, 1.0, 0),
        (ValueError, "fraction_bits", zeros, 0.8, 1.0, 41),
    ):
        with pytest.raises(error, match=rf"\b{name}\b"):
            ExactState(*given)


def test_an_exact_state_counts_its_half_steps_and_notices_overflow():
    state = ExactState(torch.zeros(3), 0.8)
    with pytest.raises(ValueError, match="inverted"):
        state.invert(torch.zeros(3))
    state.relax(torch.full((3,), 100.0))
    assert not state.overflowed
    state.relax(torch.full((3,), 200.0))
    assert state.overflowed


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="gcc's address sanitizer is loaded as Linux does")
def test_c_stays_within_its_memory(tmp_path):
    """Under gcc's address sanitizer, which must find the error that is made on purpose."""
    library = tmp_path / "sanitized.so"
    sanitizer = "-fsanitize=address", "-O1", "-DCLONES=", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno"
    built = subprocess.run(["gcc", *sanitizer, *SOURCES.glob("*.c"), "-o", library, "-lm"], capture_output=True)
    if built.returncode:
        pytest.skip("gcc has no address sanitizer")
    runtimes = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    settings = {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(library)]
    child = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert "all refused" in child.stdout, child.stdout + child.stderr
    assert child.returncode and "heap-buffer-overflow" in child.stderr


def under_the_sanitizer(library):
    cpu.library = cpu.load(library)
    for name in BAD:
        refuse_all(name)
    test_kernels.compare_all(({"float64": cpu.HalfStep, "exact": cpu.ExactHalfStep}, "cpu"), test_kernels.OPERATIONS)
    print("all refused", flush=True)
    state = torch.zeros(8, dtype=torch.float64)
    cpu.HalfStep(state, Coefficients.rounded(0.5)).relax(torch.zeros(2), None, torch.empty(8))


if __name__ == "__main__":
    under_the_sanitizer(sys.argv[1])
