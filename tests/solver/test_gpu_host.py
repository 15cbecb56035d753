"""Solves with the host side of a GPU: threads, streams, events, graphs and generators, on a simulated device."""

import inspect
import threading

import pytest
import test_gpu_only
import torch
from fake_gpu import DEVICE, OTHER, Graph, driver, emulated
from torch import nn

import revdeq
from revdeq import _device
from revdeq._solver import check
from revdeq.baselines import stored_graph

BOTH_STATES = pytest.mark.parametrize("state", ["float64", "exact"])


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Reset the counters, with nothing pending and the other device current."""
    monkeypatch.setattr(check, "_already_warned", set())
    monkeypatch.setattr(check, "_pending", [])
    driver.waits.clear()
    driver.launches.clear()
    assert driver.current_device() == OTHER.index != DEVICE.index


def solve_leaves(device, **settings):
    """Solve with a state of several tensors, each of which depends on the next. Returns the steps, and all results on
    the CPU."""
    torch.manual_seed(0)
    x = [torch.randn(n).to(device).requires_grad_() for n in (1300, 1, 256, 77, 16)]
    z0 = [torch.zeros_like(leaf) for leaf in x]

    def f(z):
        return [0.4 * leaf.tanh() + 0.2 * z[i - 1].mean() + x[i] for i, leaf in enumerate(z)]

    driver.waits.clear()
    solution = revdeq.solve(f, z0, beta=0.8, max_steps=4, check="raise", **settings)
    sum(z.square().sum() for z in solution.z).backward()
    waits = len(driver.waits)
    return waits, solution.steps, [t.detach().cpu() for t in (*solution.z, *solution.y, *(t.grad for t in x))]


@pytest.mark.parametrize("gamma", [1.0, 1.3])
@pytest.mark.parametrize("tol", [None, 1e-9])
@BOTH_STATES
def test_a_solve_has_the_bits_of_the_cpu_with_one_launch_per_tensor_and_half_step(state, tol, gamma):
    settings = {"state": state, "tol": tol, "gamma": gamma}
    *_, expected = solve_leaves("cpu", **settings)
    with emulated():
        waits, steps, results = solve_leaves(DEVICE, **settings)
        driver.synchronize(DEVICE)
        check.settle()
    assert all(map(torch.equal, results, expected))
    assert waits == (0 if tol is None else steps)
    half_steps = {"relax": 8, "invert": 8} | ({"encode": 2, "decode": 1} if state == "exact" else {})
    assert driver.launches == {f"_{name}_kernel": 5 * count for name, count in half_steps.items()}
    assert not check._pending


class Same(torch.autograd.Function):
    """An f that launches nothing."""

    @staticmethod
    def forward(ctx, z, scale):
        return z.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@BOTH_STATES
def test_a_solve_launches_as_many_torch_kernels_for_any_number_of_steps(state):
    """At the start, at the end and for the check."""
    scale = torch.ones((), device=DEVICE, requires_grad=True)
    z0, gradient, counts = torch.ones(70, device=DEVICE), torch.ones(70, device=DEVICE), []
    for steps in (2, 5):
        driver.operations.clear()
        with emulated():
            revdeq.solve(Same.apply, z0, scale, max_steps=steps, state=state).z.backward(gradient)
        counts.append(driver.operations.copy())
    assert counts[0] == counts[1] and counts[0].total() <= 30, counts


def check_gradients(f, parameters, state):
    """Against those of a stored graph. The exact state resolves 6e-8."""
    grads = []
    for solver in (lambda *args: revdeq.solve(*args, state=state).z, stored_graph):
        z = solver(f(), torch.zeros(3, 6, device=DEVICE))
        grads.append(torch.autograd.grad(z.square().sum(), parameters))
    for ours, expected in zip(*grads, strict=True):
        assert (ours - expected).norm() <= (1e-6 if state == "float64" else 1e-5) * expected.norm()


@BOTH_STATES
def test_f_may_capture_a_computed_tensor(state):
    """The backward pass runs in another thread, where autograd numbers its nodes from 0."""
    torch.manual_seed(0)
    encoder, f, x = nn.Linear(6, 6).to(DEVICE), nn.Linear(6, 6).to(DEVICE), torch.randn(3, 6).to(DEVICE)
    threads, fired = set(), []

    def with_an_encoding():
        encoded = encoder(x)
        encoded.register_hook(fired.append)
        return lambda z: threads.add(threading.get_ident()) or torch.tanh(f(z) + encoded)

    check_gradients(with_an_encoding, [*encoder.parameters(), *f.parameters()], state)
    assert len(threads) == 2 and len(fired) == 2


@BOTH_STATES
def test_parts_of_f_on_the_cpu(state):
    """Their nodes have a separate queue in the backward pass, and may run late."""
    torch.manual_seed(0)
    part, whole = nn.Linear(6, 6), nn.Linear(6, 6).to(DEVICE)

    def f(z):
        return torch.tanh(whole(z)) + 0.1 * torch.tanh(part(z.to("cpu"))).to(DEVICE)

    check_gradients(lambda: f, [*part.parameters(), *whole.parameters()], state)


# deferred checks


def lose_the_way(mode="raise"):
    torch.manual_seed(0)
    f, settings = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(DEVICE), {"beta": 0.9, "max_steps": 20, "check": mode}
    revdeq.solve(f, torch.ones(5, 6, device=DEVICE), state="float64", **settings).z.sum().backward()


def harmless():
    revdeq.solve(torch.cos, torch.zeros(1))


def arrive(device=DEVICE):
    """The values that are being copied to the host asynchronously."""
    driver.current_stream(device).run()


def test_a_warning_comes_when_the_value_has_arrived_without_waiting():
    lose_the_way()
    harmless()  # checks, and nothing has arrived
    assert not driver.waits
    arrive()
    with pytest.raises(revdeq.ReconstructionError, match='state="exact"'):
        harmless()
    lose_the_way("warn")
    harmless()
    arrive()
    with pytest.warns(revdeq.ReconstructionWarning, match='state="exact"'):
        harmless()


def test_a_pending_value_does_not_delay_another_device():
    decided = []
    lose_the_way()
    check.report([torch.ones((), device=OTHER)], decided.append)
    arrive(OTHER)
    harmless()
    assert decided == [[1.0]]
    arrive()
    with pytest.raises(revdeq.ReconstructionError):
        harmless()


@pytest.mark.parametrize("arrived", [1, 3, 4])
def test_a_value_has_arrived_when_all_of_it_has(arrived):
    arriving = _device.Arriving(torch.arange(4.0).to(DEVICE))
    assert not arriving.has_come()
    arriving.value[:arrived] = torch.arange(4.0)[:arrived]
    assert arriving.has_come() == (arrived == 4)


# graphs


@pytest.mark.parametrize("current", [DEVICE, OTHER])
def test_graph_capture_queries_and_reports_nothing(current):
    lose_the_way()
    pending = list(check._pending)
    with driver.device(DEVICE), driver.capturing(Graph()), driver.device(current):  # raises if it was invalidated
        lose_the_way()
        revdeq.solve(torch.cos, torch.ones(5, device=DEVICE, requires_grad=True), state="exact").z.sum().backward()
    assert check._pending == pending
    arrive()
    with pytest.raises(revdeq.ReconstructionError):
        harmless()


# The tests that are skipped without a GPU: nobody would notice here if they no longer worked.


def captured(run):
    """As in test_gpu_only."""
    graph = Graph()
    with driver.device(DEVICE):
        run()
        with driver.capturing(graph):
            return graph, run()


class Sum(nn.Linear):
    def forward(self, z, x):
        return torch.tanh(super().forward(z)) + x


def small_blocks(dtype=torch.float32):
    torch.manual_seed(0)
    return dict.fromkeys(("conv", "transformer"), (Sum(8, 8).to(DEVICE, dtype), torch.randn(5, 8).to(DEVICE, dtype)))


ON_ANY_GPU = {
    "large_states_give_the_bits_of_the_reference_on_the_cpu": {"n": 1301},
    "f_computes_the_same_in_both_passes": {"name": "conv", "precision": "tf32", "autotuned": True},
    "a_whole_training_step_is_captured_in_a_graph": {"mode": "warn"},
    "dropout_under_capture_is_one_mask_for_each_replay": {},
    "a_wrong_reconstruction_is_reported_at_a_later_solve": {},
    "an_overflow_is_reported_at_a_later_solve": {},
    "dropout_is_one_mask_in_both_passes": {},
}


@pytest.mark.parametrize("name", ON_ANY_GPU)
@BOTH_STATES
def test_the_gpu_only_tests_pass_on_the_simulated_gpu(monkeypatch, request, name, state):
    for replaced, by in {"DEVICE": DEVICE, "captured": captured, "blocks": small_blocks}.items():
        monkeypatch.setattr(test_gpu_only, replaced, by)
    test = getattr(test_gpu_only, f"test_{name}")
    given = {"monkeypatch": monkeypatch, "request": request, "state": state, **ON_ANY_GPU[name]}
    with emulated():
        test(**{key: value for key, value in given.items() if key in inspect.signature(test).parameters})
