"""The fused half-step and its inverse beside unfused PyTorch, torch.compile and a copy of the same bytes.

    pytest bench/test_update.py --quick    # less than a minute; all sizes without --quick

Every provider is checked against plain PyTorch before it is timed. The numbers are from rounds in which the providers
take turns: `extra_info` of pytest-benchmark's JSON has the time over fused and GB/s, and the table at the end shows the
former. The rounds of its own table and of --benchmark-compare are made one provider after the other. Freed memory is
kept: otherwise the time of unfused updates is that of the system's page faults.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from table import device, markdown
from turns import one_thread, ratio, ratios, take_turns

from revdeq import kernels
from revdeq.kernels.backends import backend_for
from revdeq.kernels.half_step import Coefficients
from revdeq.kernels.radix import Radix

DEVICE = device()
BETA = torch.tensor(0.8).item()
"""A float32 number, so that plain PyTorch uses the same coefficients as the kernels, which round it."""
ALPHA = 1 - BETA
DIRECTIONS = ("forward", "backward")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES, QUICK_SIZES, BFLOAT16_SIZES = (12, 16, 20, 24), (12, 20), (16, 24)
PROVIDERS = ("fused", "unfused", "unfused, in place", "torch.compile", "in the solver", "exact state", "copy")
CLOCK = one_thread()
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # the compiler's own
    pytest.mark.benchmark(timer=CLOCK),
]


@dataclass(frozen=True)
class Case:
    """direction: forward or backward. exponent: log2 of the number of elements."""

    direction: str
    dtype: str
    exponent: int

    @property
    def title(self):
        return f"half-step, {self.direction}, {self.dtype}"

    @property
    def bytes_moved(self):
        """The least that the computation reads and writes."""
        size = DTYPES[self.dtype].itemsize
        per_element = 2 * 8 + 2 * size if self.direction == "forward" else 2 * 8 + 2 * 4 + 4 * size
        return per_element * 2**self.exponent


def cases(quick):
    sizes = {"float32": QUICK_SIZES if quick else SIZES, "bfloat16": () if quick else BFLOAT16_SIZES}
    return [Case(d, dtype, k) for d in DIRECTIONS for dtype in DTYPES for k in sizes[dtype]]


def pytest_generate_tests(metafunc):
    chosen = cases(metafunc.config.getoption("--quick"))
    names = [f"{case.direction}-{case.dtype}-{case.exponent}" for case in chosen]
    metafunc.parametrize("measured", chosen, indirect=True, scope="module", ids=names)


def unfused_forward(y, f):
    y = ALPHA * y + BETA * f.double()
    return y, y.to(f.dtype)


def in_place_forward(y, f, read):
    y.mul_(ALPHA).add_(f.double().mul_(BETA))
    read.copy_(y)


def unfused_backward(y, f, adjoint, vjp):
    y, adjoint = (y - BETA * f.double()) / ALPHA, ALPHA * adjoint + BETA * vjp.float()
    return y, y.to(f.dtype), adjoint, adjoint.to(f.dtype)


def in_place_backward(y, f, adjoint, vjp, read, seed):
    y.sub_(f.double().mul_(BETA)).div_(ALPHA)
    read.copy_(y)
    adjoint.mul_(ALPHA).add_(vjp.float() * BETA)
    seed.copy_(adjoint)


@functools.cache
def compiled(function):
    return torch.compile(function, dynamic=True)


def forward(y, f, *rest):
    """What each provider does with tensors of its own, and returns: the new state, and what f reads next."""

    def by(update):
        state, read = y.clone(), torch.empty_like(f)

        def run():
            update(state, f, read)
            return state, read

        return run

    def fused():
        state = y.clone()
        return lambda: (state, kernels.relax(state, f, BETA))

    return {
        "fused": fused(),
        "unfused": lambda: unfused_forward(y, f),
        "unfused, in place": by(in_place_forward),
        "torch.compile": by(compiled(in_place_forward)),
    }


def backward(y, f, adjoint, vjp):
    """The same: the state before, what f reads next, its adjoint, and the seed of the next product."""

    def by(update):
        state, gradient, read, seed = y.clone(), adjoint.clone(), torch.empty_like(f), torch.empty_like(f)

        def run():
            update(state, f, gradient, vjp, read, seed)
            return state, read, gradient, seed

        return run

    def fused():
        state, gradient = y.clone(), adjoint.clone()

        def run():
            read, seed = kernels.invert_adjoint(state, f, gradient, vjp, BETA)
            return state, read, gradient, seed

        return run

    return {
        "fused": fused(),
        "unfused": lambda: unfused_backward(y, f, adjoint, vjp),
        "unfused, in place": by(in_place_backward),
        "torch.compile": by(compiled(in_place_backward)),
    }


def in_the_solver(state, direction, y, f, adjoint, vjp):
    """What the solver calls for a state, past torch's dispatcher and without checks. It is checked by the tests."""
    step = Radix.nearest(BETA, 24) if state == "exact" else Coefficients.rounded(BETA)
    half_step = backend_for(DEVICE).states[state].encoded(y, step)
    read, gradient, seed = torch.empty_like(f), adjoint.clone(), torch.empty_like(f)

    def relax():
        half_step.done = 0  # never spills a remainder; the bits become meaningless, which does not change the time
        half_step.relax(f, None, read)

    def invert_adjoint():
        half_step.done = 1
        half_step.invert_adjoint(f, None, read, gradient, vjp, None, seed)

    return relax if direction == "forward" else invert_adjoint


IN_THE_SOLVER = {"in the solver": "float64", "exact state": "exact"}


def providers(case):
    """Functions by provider, checked."""
    generator, n = torch.Generator().manual_seed(0), 2**case.exponent
    types = torch.float64, DTYPES[case.dtype], torch.float32, DTYPES[case.dtype]
    data = [torch.randn(n, generator=generator).to(DEVICE, dtype) for dtype in types]
    make = forward if case.direction == "forward" else backward
    expected = make(*data)["unfused"]()
    for name, run in make(*data).items():
        # A compiler may contract a multiply-add, and a GPU divides by multiplying: a few roundings of the result.
        close = 0.0 if name == "fused" and DEVICE.type == "cpu" else 4 * torch.finfo(DTYPES[case.dtype]).eps
        for found, wanted in zip(run(), expected, strict=True):
            assert torch.allclose(found, wanted, rtol=close, atol=close), f"{name} is wrong"
    if case.direction == "backward":  # repeated inversion would run into infinity, which is slow on some CPUs
        data[0].zero_(), data[1].zero_()
    source, target = (torch.ones(case.bytes_moved // 8, device=DEVICE) for _ in range(2))
    ours = {name: in_the_solver(state, case.direction, *data) for name, state in IN_THE_SOLVER.items()}
    return {**make(*data), **ours, "copy": lambda: target.copy_(source)}


@pytest.fixture(scope="module")
def measured(request, results):
    """A case, its functions by provider, and their times in turns."""
    case, quick = request.param, request.config.getoption("--quick")
    runs = providers(case)
    times = take_turns(runs, 0.5 if quick else 2.0, rounds=(5, 25), clock=CLOCK)
    for name, seconds in times.items():
        results.add(case.title, name, 2**case.exponent, "seconds", seconds)
        results.add(case.title, name, 2**case.exponent, "time over fused", ratios(seconds, times["fused"]))
    return case, runs, times


@pytest.mark.parametrize("provider", PROVIDERS)
def test_half_step(benchmark, measured, provider):
    case, runs, times = measured
    benchmark.group = f"{case.title}, 2^{case.exponent}"
    benchmark.extra_info["time over fused"] = ratio(times[provider], times["fused"])
    benchmark.extra_info["GB/s"] = case.bytes_moved / sorted(times[provider])[len(times[provider]) // 2] / 1e9
    benchmark.pedantic(runs[provider], rounds=5, iterations=max(1, round(1e-3 / min(times[provider]))))


BESIDE = ("unfused, in place", "torch.compile", "unfused", "copy", *IN_THE_SOLVER)


def table(results, sizes=(), beside=BESIDE):
    """Times over the fused half-step, by the number of elements."""
    sizes = sizes or sorted({row.size for row in results.rows if row.benchmark.endswith("float32")})
    rows = []
    for direction in DIRECTIONS:
        title = f"half-step, {direction}, float32"
        fused = [1e6 * results.median(title, "fused", n, "seconds") for n in sizes]
        rows.append([f"{direction}: fused, microseconds", *(f"{us:,.0f}" for us in fused)])
        for name in beside:
            over = [results.median(title, name, n, "time over fused") for n in sizes]
            rows.append([f"{direction}: {name}", *(f"{ratio:.1f}x" for ratio in over)])
    return markdown(["time over the fused half-step", *(f"2^{n.bit_length() - 1}" for n in sizes)], rows)


def few(results):
    """Beside what the solver calls, and the best that plain PyTorch can do."""
    return table(results, [2**k for k in SIZES], ("in the solver", *BESIDE[:2]))
