"""Tests that need a GPU, and are skipped without one. CONTRIBUTING.md says how to send results."""

import pytest
import torch
from torch import nn

import revdeq
from revdeq import _device
from revdeq._solver import check
from revdeq.cli import doctor
from revdeq.kernels import backends
from revdeq.kernels.half_step import Coefficients
from revdeq.kernels.radix import Radix
from revdeq.models import ConvBlock, TransformerBlock

DEVICE = _device.devices()[0]
BOTH_STATES = pytest.mark.parametrize("state", ["float64", "exact"])
STEPS = {"float64": Coefficients.rounded(0.75), "exact": Radix.nearest(0.75, 24)}

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
    _device.synchronize(DEVICE)
    check.settle()


def test_tritons_kernels_give_the_bits_of_the_reference_and_right_gradients():
    assert backends.backend_for(DEVICE) is backends.TRITON
    assert list(doctor.examine(DEVICE)) == []


@BOTH_STATES
@pytest.mark.parametrize("n", [1, 2**20 - 1, 2**24 + 4099])
def test_large_states_give_the_bits_of_the_reference_on_the_cpu(state, n):
    generator = torch.Generator().manual_seed(0)
    initial, f = (torch.randn(n, generator=generator) for _ in range(2))

    def run(backend, device):
        h, copy = backend.states[state].encoded(initial.to(device), STEPS[state]), torch.empty(n, device=device)
        partial = h.relax_norms(f.to(device), None, copy)
        there = [x.to("cpu", copy=True) for x in (h.state, copy, partial)]
        h.invert(f.to(device), None, copy)
        return [*there, h.state.cpu(), copy.cpu()]

    for x, expected in zip(run(backends.TRITON, DEVICE), run(backends.REFERENCE, "cpu"), strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize("autotuned", [False, True])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", ["conv", "transformer"])
@BOTH_STATES
def test_f_computes_the_same_in_both_passes(monkeypatch, request, state, name, precision, autotuned):
    """cuDNN and cuBLAS choose the same algorithms in both passes. beta = .5 and N = 8 are within float64's range, so
    that any difference comes from f."""
    matmul = torch.backends.cuda.matmul
    request.addfinalizer(lambda before=matmul.allow_tf32: setattr(matmul, "allow_tf32", before))
    matmul.allow_tf32 = precision == "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", autotuned)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    f, x = blocks(torch.bfloat16 if precision == "bfloat16" else torch.float32)[name]
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "autocast"):
        f(x, x)  # autotuning times the candidates at the first use of a shape
        report = revdeq.verify(f, torch.zeros_like(x), x, beta=0.5, max_steps=8, state=state)
    assert report.exact, str(report)


def captured(run):
    """A graph of it, and what it returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels, and lets libraries make their one-time allocations
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@needs_cuda
@pytest.mark.parametrize("mode", [None, "warn"])
@BOTH_STATES
def test_a_whole_training_step_is_captured_in_a_graph(state, mode):
    """Three replays equal three steps. cuBLAS may choose another algorithm under capture, hence a tolerance: that of
    float32 over the 24 products of a gradient, in each of three steps."""
    f, x = blocks()["transformer"]
    target, parameters = torch.randn_like(x), list(f.parameters())
    start = [p.detach().clone() for p in parameters]

    def train():
        z = revdeq.solve(f, torch.zeros_like(x), x, beta=0.5, max_steps=6, state=state, check=mode).z
        grads = torch.autograd.grad((z - target).square().mean(), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, grads, alpha=-0.1)

    graph, _ = captured(train)
    results = []
    for step in (graph.replay, train):
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        for _ in range(3):
            step()
        results.append([p.detach().clone() for p in parameters])
    for ours, expected, before in zip(*results, start, strict=True):
        change = (expected - before).norm()
        assert change > 0
        assert (ours - expected).norm() <= 3 * 24 * 2.0**-24 * expected.norm() + 1e-4 * change


@needs_cuda
def test_dropout_under_capture_is_one_mask_for_each_replay():
    """Each replay draws a new mask for all evaluations in both passes: f = mask + 0 z, so that every element of z and
    of the gradient is either 0 or complete."""
    x, z0 = torch.ones(1000, device=DEVICE, requires_grad=True), torch.zeros(1000, device=DEVICE)

    def run():
        z = revdeq.solve(lambda z, x: nn.functional.dropout(x) + 0 * z, z0, x, beta=0.5, max_steps=4).z
        return z.detach(), torch.autograd.grad(z.sum(), x)[0]

    graph, (z, gradient) = captured(run)
    masks, whole = [], torch.tensor([0.0, 2 * (1 - 0.5**4)], device=DEVICE)
    for _ in range(2):
        graph.replay()
        assert torch.isin(z, whole).all() and torch.equal(z, gradient)
        masks.append(z.clone())
    assert not torch.equal(*masks)


@BOTH_STATES
def test_more_than_two_to_the_31_elements(state):
    """Every element is checked, in parts. f and the copy are bfloat16, to fit into more GPUs."""
    n, free = 2**31 + 4099, _device.api(DEVICE).mem_get_info(DEVICE)[0]
    needed = n * (8 + 2 + 2) + 2**30
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free memory on the GPU, of which {free / 2**30:.0f} are")
    f, copy = torch.ones(n, dtype=torch.bfloat16, device=DEVICE), torch.empty(n, dtype=torch.bfloat16, device=DEVICE)
    f[-1] = 2
    kind = backends.TRITON.states[state]
    h = kind(torch.zeros(n, dtype=torch.float64 if state == "float64" else torch.int64, device=DEVICE), STEPS[state])
    h.relax(f, None, copy)
    assert all((piece == 0.75).all() for piece in copy[:-1].split(2**28)) and copy[-1] == 1.5
    h.invert(f, None, copy)
    assert not any(piece.any() for x in (h.state, copy) for piece in x.split(2**28))


def gradients(f, x, state, **settings):
    x = x.detach().requires_grad_()
    z = revdeq.solve(f, torch.zeros_like(x), x, max_steps=4, state=state, **settings).z
    return z.detach(), torch.autograd.grad(z, x, torch.ones_like(z))[0]


@needs_cuda
@BOTH_STATES
def test_two_streams_do_not_interfere(state):
    f, _ = blocks()["conv"]
    xs = [torch.randn(16, 32, 32, 32, device=DEVICE) for _ in range(2)]
    alone = [gradients(f, x, state, beta=0.8) for x in xs]
    torch.cuda.synchronize()
    streams, together = [torch.cuda.Stream() for _ in xs], []
    for stream, x in zip(streams, xs, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            together.append(gradients(f, x, state, beta=0.8))
    torch.cuda.synchronize()
    # z depends on forward convolutions only, which are deterministic; cuDNN's backward ones need not be.
    for (z, grad), (expected_z, expected_grad) in zip(together, alone, strict=True):
        assert torch.equal(z, expected_z)
        assert (grad - expected_grad).norm() <= 1e-5 * expected_grad.norm()


@BOTH_STATES
def test_peak_memory_is_the_same_at_every_depth(state):
    """As counted by the allocator. The exact state at beta = .5 spills nothing in 16 steps."""
    f, x = blocks()["conv"]
    x.requires_grad_()

    def peak(max_steps):
        def step():
            z = revdeq.solve(f, torch.zeros_like(x), x, beta=0.5, max_steps=max_steps, state=state, check=None).z
            torch.autograd.grad(z, [x, *f.parameters()], torch.ones_like(x))

        step()  # one-time allocations
        return _device.peak_memory(step, DEVICE)

    assert 0 < peak(16) <= 1.001 * peak(2)


def test_a_wrong_reconstruction_is_reported_at_a_later_solve():
    torch.manual_seed(0)
    f, z0 = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    revdeq.solve(f, z0, beta=0.9, max_steps=20, state="float64", check="raise").z.sum().backward()
    _device.synchronize(DEVICE)
    with pytest.raises(revdeq.ReconstructionError, match='state="exact"'):
        revdeq.solve(f, z0)
    revdeq.solve(f, z0)


def test_an_overflow_is_reported_at_a_later_solve():
    z0 = torch.zeros(3, device=DEVICE)
    revdeq.solve(lambda z: z * 0 + 150.0, z0, state="exact")
    _device.synchronize(DEVICE)
    with pytest.raises(OverflowError, match="reached 150 and overflowed"):
        revdeq.solve(torch.cos, z0)


def test_dropout_is_one_mask_in_both_passes():
    f, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()).to(DEVICE), torch.randn(32, 64, device=DEVICE)
    for state in STEPS:
        assert revdeq.verify(f, x, max_steps=6, state=state).exact


@pytest.mark.skipif(DEVICE.type == "cpu" or _device.api(DEVICE).device_count() < 2, reason="takes two GPUs")
@BOTH_STATES
def test_the_second_gpu_while_the_first_is_current(state):
    torch.manual_seed(0)
    f, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    results = []
    for device in (DEVICE, torch.device(DEVICE.type, 1)):
        g = f.to(device)
        results.append([t.cpu() for t in gradients(lambda z, x, g=g: g(z) + x, x.to(device), state)])
    torch.testing.assert_close(*results)
