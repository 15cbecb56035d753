"""Tests that need a GPU, and are skipped without one. CONTRIBUTING.md says how to send results."""

import pytest
import torch
from torch import nn

import revdeq
from revdeq import _device as measure
from revdeq.cli import doctor
from revdeq.kernels import Coefficients, Radix, backends, half_step_for, reference_exact
from revdeq.models import ConvBlock, TransformerBlock

DEVICE = measure.devices()[0]
STATES = ("float64", "exact")

pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="only a GPU can answer, and there is none")
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="takes streams and graphs of CUDA or ROCm")


def blocks(dtype=torch.float32):
    """cuDNN and cuBLAS at the sizes of the paper."""
    torch.manual_seed(0)
    conv, transformer = ConvBlock(32), TransformerBlock(256)
    return {
        "conv": (conv.to(DEVICE, dtype), torch.randn(16, 32, 32, 32, device=DEVICE, dtype=dtype)),
        "transformer": (transformer.to(DEVICE, dtype), torch.randn(8, 128, 256, device=DEVICE, dtype=dtype)),
    }


@pytest.fixture(autouse=True)
def verdicts():
    """Deferred errors of one test do not appear in the next."""
    yield
    measure.synchronize(DEVICE)
    revdeq._solver.deferred.settle()


@pytest.fixture
def matmul_precision():
    """Sets it for one test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_every_kernel_gives_the_bits_of_the_reference_on_the_cpu():
    finding = doctor.same_bits(DEVICE)
    assert finding.works, finding.text
    assert half_step_for(DEVICE).__module__ == "revdeq.kernels.gpu"
    assert half_step_for(DEVICE, "exact").__module__ == "revdeq.kernels.gpu_exact"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("n", [1, 2**20 - 1, 2**24 + 4099])
def test_large_states_give_the_bits_of_the_reference_on_the_cpu(state, n):
    generator = torch.Generator().manual_seed(0)
    initial, f = (torch.randn(n, generator=generator) for _ in range(2))

    def run(half_step, device):
        copy, g = torch.empty(n, device=device), f.to(device)
        step = doctor.STEPS[state]
        if state == "exact":
            bound = half_step(reference_exact.encode(initial, step).to(device), copy, [step])
        else:
            bound = half_step(initial.double().to(device), copy)
        partial = bound.relax_norms(g, None, step)
        there = [bound.state.cpu().clone(), copy.cpu().clone(), partial.cpu().clone()]
        bound.invert(g, step)
        return [*there, bound.state.cpu(), copy.cpu()]

    ours = run(half_step_for(DEVICE, state), DEVICE)
    expected = run(backends.REFERENCE.states[state].HalfStep, torch.device("cpu"))
    assert all(map(doctor.equal_bits, ours, expected))


@pytest.mark.parametrize("state", STATES)
def test_the_gradient_is_that_of_the_stored_graph(state):
    settings = {"float64": {"beta": 0.5, "max_steps": 8}, "exact": {"beta": 0.8, "max_steps": 16}}[state]
    assert doctor.gradient_error(DEVICE, state=state, **settings) <= doctor.GRADIENT_ERROR


@pytest.mark.parametrize("autotuned", [False, True])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", ["conv", "transformer"])
@pytest.mark.parametrize("state", STATES)
def test_f_computes_the_same_in_both_passes(monkeypatch, matmul_precision, state, name, precision, autotuned):
    """cuDNN and cuBLAS choose the same algorithms in both passes. beta = .5 and N = 8 are within float64's range, so
    that any difference comes from f."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", autotuned)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    matmul_precision("high" if precision == "tf32" else "highest")
    f, x = blocks(torch.bfloat16 if precision == "bfloat16" else torch.float32)[name]
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "autocast"):
        f(x, x)  # autotuning times the candidates at the first use of a shape
        report = revdeq.verify(f, torch.zeros_like(x), x, beta=0.5, max_steps=8, state=state)
    assert report.exact, str(report)


def train(f, x, target, state, check):
    """One step of gradient descent, in place, without synchronizing."""
    z = revdeq.solve(f, torch.zeros_like(x), x, beta=0.5, max_steps=6, state=state, check=check).z
    parameters = list(f.parameters())
    grads = torch.autograd.grad((z - target).square().mean(), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, grads, alpha=-0.1)


@needs_cuda
@pytest.mark.parametrize("check", [None, "warn"])
@pytest.mark.parametrize("state", STATES)
def test_a_whole_training_step_is_captured_in_a_graph(state, check):
    """Three replays equal three steps. cuBLAS may choose another algorithm under capture, hence a tolerance: that of
    float32 over the 24 products of a gradient, in each of three steps."""
    f, x = blocks()["transformer"]
    target = torch.randn_like(x)
    start = [p.detach().clone() for p in f.parameters()]

    def reset():
        with torch.no_grad():
            torch._foreach_copy_(list(f.parameters()), start)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels, and lets libraries make their one-time allocations
        for _ in range(3):
            train(f, x, target, state, check)
    torch.cuda.current_stream().wait_stream(side)

    reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(f, x, target, state, check)
    reset()
    for _ in range(3):
        graph.replay()
    captured = [p.detach().clone() for p in f.parameters()]
    reset()
    for _ in range(3):
        train(f, x, target, state, check)
    for ours, expected, before in zip(captured, f.parameters(), start, strict=True):
        change = (expected - before).norm()
        assert change > 0
        assert (ours - expected).norm() <= 3 * 24 * 2.0**-24 * expected.norm() + 1e-4 * change


def free_memory():
    return getattr(torch, DEVICE.type).mem_get_info(DEVICE)[0]


@pytest.mark.parametrize("state", STATES)
def test_more_than_two_to_the_31_elements(state):
    """Every element is checked, in parts. f and the copy are bfloat16, to fit into more GPUs."""
    n = 2**31 + 4099
    needed = n * (8 + 2 + 2) + 2**30
    if free_memory() < needed:
        pytest.skip(
            f"needs {needed / 2**30:.0f} GiB of free memory on the GPU, of which {free_memory() / 2**30:.0f} are"
        )
    f, copy = torch.ones(n, dtype=torch.bfloat16, device=DEVICE), torch.empty(n, dtype=torch.bfloat16, device=DEVICE)
    f[-1] = 2
    if state == "exact":
        step = Radix.nearest(0.75, 24)
        bound = half_step_for(DEVICE, state)(torch.zeros(n, dtype=torch.int64, device=DEVICE), copy, [step])
    else:
        step = Coefficients.rounded(0.75)
        bound = half_step_for(DEVICE, state)(torch.zeros(n, dtype=torch.float64, device=DEVICE), copy)
    bound.relax(f, None, step)
    assert all((piece == 0.75).all() for piece in copy[:-1].split(2**28))
    assert copy[-1] == 1.5
    bound.invert(f, step)
    assert not any(piece.any() for piece in bound.state.split(2**28))
    assert not any(piece.any() for piece in copy.split(2**28))


@needs_cuda
@pytest.mark.parametrize("state", STATES)
def test_two_streams_do_not_interfere(state):
    f, _ = blocks()["conv"]
    xs = [torch.randn(16, 32, 32, 32, device=DEVICE) for _ in range(2)]

    def gradients(x):
        x = x.detach().requires_grad_()
        z = revdeq.solve(f, torch.zeros_like(x), x, beta=0.8, max_steps=4, state=state).z
        return z.detach(), torch.autograd.grad(z, x, torch.ones_like(z))[0]

    alone = [gradients(x) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    together = []
    for stream, x in zip(streams, xs, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            together.append(gradients(x))
    torch.cuda.synchronize()
    # z depends on forward convolutions only, which are deterministic; cuDNN's backward ones need not be.
    for (z, grad), (expected_z, expected_grad) in zip(together, alone, strict=True):
        assert torch.equal(z, expected_z)
        assert (grad - expected_grad).norm() <= 1e-5 * expected_grad.norm()


@pytest.mark.parametrize("state", STATES)
def test_peak_memory_is_the_same_at_every_depth(state):
    """As counted by the allocator. The exact state at beta = .5 spills nothing in 16 steps; its alarms take 1 KiB per
    step for y and for z."""
    f, x = blocks()["conv"]
    x.requires_grad_()

    def peak(max_steps):
        def step():
            z = revdeq.solve(f, torch.zeros_like(x), x, beta=0.5, max_steps=max_steps, state=state, check=None).z
            torch.autograd.grad(z, [x, *f.parameters()], torch.ones_like(x))

        step()  # one-time allocations
        return measure.peak_memory(step, DEVICE)

    alarms = 16 * 2 * 1024
    assert 0 < peak(16) <= 1.001 * peak(2) + (alarms if state == "exact" else 0)


def test_a_wrong_reconstruction_is_reported_at_a_later_solve(monkeypatch):
    monkeypatch.setattr(revdeq._solver.monitor, "_already_warned", set())
    torch.manual_seed(0)
    f, z0 = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    revdeq.solve(f, z0, beta=0.9, max_steps=20, state="float64", check="raise").z.sum().backward()
    measure.synchronize(DEVICE)
    with pytest.raises(revdeq.ReconstructionError, match='state="exact"'):
        revdeq.solve(f, z0)
    revdeq.solve(f, z0)


def test_an_overflow_is_reported_at_a_later_solve():
    z0 = torch.zeros(3, device=DEVICE)
    revdeq.solve(lambda z: z * 0 + 150.0, z0, state="exact")
    measure.synchronize(DEVICE)
    with pytest.raises(OverflowError, match="overflow in step 1: f reached 150"):
        revdeq.solve(torch.cos, z0)


def test_dropout_is_one_mask_in_both_passes():
    f, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()).to(DEVICE), torch.randn(32, 64, device=DEVICE)
    for state in STATES:
        assert revdeq.verify(f, x, max_steps=6, state=state).exact


@needs_cuda
def test_dropout_under_capture_is_one_mask_for_each_replay():
    """Each replay draws a new mask for all evaluations in both passes: f = mask + 0 z, so that every element of z and
    of the gradient is either 0 or complete."""
    x, z0 = torch.ones(1000, device=DEVICE, requires_grad=True), torch.zeros(1000, device=DEVICE)

    def run():
        z = revdeq.solve(lambda z, x: nn.functional.dropout(x) + 0 * z, z0, x, beta=0.5, max_steps=4).z
        return z.detach(), torch.autograd.grad(z.sum(), x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z, gradient = run()
    masks = []
    for _ in range(2):
        graph.replay()
        whole = 2 * (1 - 0.5**4)
        assert all(torch.isin(t, torch.tensor([0.0, whole], device=DEVICE)).all() for t in (z, gradient))
        assert torch.equal(z, gradient)
        masks.append(z.clone())
    assert not torch.equal(*masks)


@pytest.mark.skipif(DEVICE.type == "cpu" or getattr(torch, DEVICE.type).device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize("state", STATES)
def test_the_second_gpu_while_the_first_is_current(state):
    second = torch.device(DEVICE.type, 1)
    torch.manual_seed(0)
    f, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    results = []
    for device in (DEVICE, second):
        g, z0 = f.to(device), x.to(device).requires_grad_()
        z = revdeq.solve(g, z0, beta=0.5, max_steps=6, state=state).z
        results.append([z.detach().cpu(), torch.autograd.grad(z.sum(), z0)[0].cpu()])
    torch.testing.assert_close(results[0], results[1])
