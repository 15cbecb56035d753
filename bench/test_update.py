"""The half-steps, as the solver calls them, against unfused PyTorch and against a plain copy of the same bytes.

    pytest bench/test_update.py

A provider is timed only after its result has been checked against the reference. pytest-benchmark's own table
has the fused half-step; for the table of ratios at its end all providers take turns, so that whatever else the
machine does slows all of them down, and a ratio is that of their medians.
"""

import statistics
import timeit

import pytest
import torch

from revdeq import kernels
from revdeq.kernels import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BETA = torch.tensor(0.8, dtype=torch.float32).item()
SIZES = [2**k for k in (12, 16, 20, 22, 24)]


def data(n):
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(n, generator=generator, dtype=torch.float64)
    return [state.to(DEVICE)] + [torch.randn(n, generator=generator).to(DEVICE) for _ in range(4)]


def synchronized(run):
    def wait():
        run()
        torch.cuda.synchronize()

    return wait if DEVICE.type == "cuda" else run


def forward(provider, n):
    state, f, copy, *_ = data(n)
    expected = state.clone()
    reference.relax(expected, f, torch.empty_like(f), BETA)
    if provider in ("fused", "fused with norms"):
        half_step = kernels.half_step(DEVICE)(state, copy, BETA)
        run = half_step.relax if provider == "fused" else half_step.relax_norms
        run(f)
        assert torch.equal(state, expected)
        assert torch.equal(copy, expected.float())
        return lambda: run(f)
    if provider == "unfused":

        def unfused():
            y = (1 - BETA) * state + BETA * f.double()
            return y, y.float()

        assert torch.equal(unfused()[0], expected)
        return unfused
    source, target = (torch.rand(3 * n, device=DEVICE) for _ in range(2))  # 12 bytes in, 12 out
    return lambda: target.copy_(source)


def backward(provider, n):
    state, f, copy, adjoint, vjp = data(n)
    expected, expected_adjoint = state.clone(), adjoint.clone()
    reference.invert_adjoint(expected, f, torch.empty_like(f), expected_adjoint, vjp, BETA)
    if provider == "fused":
        half_step = kernels.half_step(DEVICE)(state, copy, BETA)
        half_step.invert_adjoint(f, adjoint, vjp)
        assert torch.equal(state, expected)
        assert torch.equal(adjoint, expected_adjoint)
        state.zero_(), f.zero_()  # repeated inversion would run into infinity, which is slow on some CPUs
        return lambda: half_step.invert_adjoint(f, adjoint, vjp)
    if provider == "unfused":

        def unfused():
            y = (state - BETA * f.double()) / (1 - BETA)
            return y, y.float(), (1 - BETA) * adjoint + BETA * vjp

        results = unfused()
        assert torch.equal(results[0], expected)
        assert torch.equal(results[2], expected_adjoint)
        return unfused
    source, target = (torch.rand(9 * n // 2, device=DEVICE) for _ in range(2))  # 18 bytes in, 18 out
    return lambda: target.copy_(source)


def take_turns(providers, rounds=15, least=1e-3):
    """Median seconds of each, from rounds of at least a millisecond."""
    calls = {}
    for name, run in providers.items():
        run()
        calls[name] = max(1, int(least / min(timeit.repeat(run, number=1, repeat=5))))
    times = {name: [] for name in providers}
    for _ in range(rounds):
        for name, run in providers.items():
            times[name].append(timeit.timeit(run, number=calls[name]) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


DIRECTIONS = {
    "forward": (forward, ("fused", "unfused", "copy", "fused with norms")),
    "backward": (backward, ("fused", "unfused", "copy")),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_step(benchmark, direction, n):
    prepare, names = DIRECTIONS[direction]
    providers = {name: synchronized(prepare(name, n)) for name in names}
    benchmark.group = f"{direction} half-step, 2^{n.bit_length() - 1}"
    benchmark.extra_info["seconds"] = take_turns(providers)
    benchmark(providers["fused"])
