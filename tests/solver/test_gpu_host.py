"""Solves with the host side of a GPU: threads, streams, events, graphs and generators, on a simulated device."""

import inspect
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_gpu_only
import torch
import torch.nn.functional as F
from fake_gpu import DEVICE, OTHER, Tensor, driver, emulated
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import revdeq
from revdeq import _device
from revdeq._solver import deferred, monitor
from revdeq._solver.places import Filled, Places
from revdeq.baselines import stored_graph

STATES = ("float64", "exact")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Reset the counters, with nothing pending and the other device current."""
    monkeypatch.setattr(monitor, "_already_warned", set())
    monkeypatch.setattr(deferred, "_pending", [])
    driver.waits.clear()
    driver.launches.clear()
    driver.cached_launches = 0
    assert driver.current_device() == OTHER.index != DEVICE.index


def block(device=DEVICE, d=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d, d), nn.Tanh()).to(device)


def solve(device, **settings):
    """Run both passes. Returns what the host waited for, the steps, and all results on the CPU."""
    torch.manual_seed(0)
    f, x = nn.Sequential(nn.Linear(61, 61), nn.Tanh()).to(device), torch.randn(70, 61).to(device).requires_grad_()
    z0 = torch.zeros(70, 61, device=device)
    driver.waits.clear()
    solution = revdeq.solve(lambda z, x: f(z) + x, z0, x, beta=0.8, max_steps=4, check="raise", **settings)
    solution.z.square().sum().backward()
    waits = list(driver.waits)
    tensors = (solution.y, solution.z, x.grad, *(p.grad for p in f.parameters()))
    return waits, solution.steps, [t.detach().cpu() for t in tensors]


@pytest.mark.parametrize("tol", [None, 1e-2])
@pytest.mark.parametrize("state", STATES)
def test_the_whole_gpu_path_gives_the_bits_of_the_cpu_and_waits_once_per_step_with_a_tolerance(state, tol):
    _, _, expected = solve("cpu", state=state, tol=tol)
    with emulated():
        waits, steps, results = solve(DEVICE, state=state, tol=tol)
        driver.synchronize(DEVICE)
        deferred.settle()
    assert all(map(torch.equal, results, expected))
    assert len(waits) == (0 if tol is None else steps), waits
    names = {"relax", "relax_norms", "invert", "compare", *(("encode", "decode") if state == "exact" else ())}
    assert driver.launches.keys() == {f"_{name}_kernel" for name in names}
    assert not deferred._pending


class Operations(TorchDispatchMode):
    """The names of torch's operations on the device: each is at least one kernel, except views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        views = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        here = any(isinstance(x, Tensor) and x.numel() for x in tree_leaves((args, kwargs, out)))
        if here and not views and "empty" not in name:
            self.names[name] += 1
        return out


@pytest.mark.parametrize("state, forward, backward", [("float64", 3, 14), ("exact", 10, 14)])
def test_a_solve_launches_few_torch_kernels(state, forward, backward):
    """For any number of steps: at the start, at the end and for the check. f launches none."""
    scale = torch.ones((), device=DEVICE, requires_grad=True)
    z0, gradient = torch.ones(70, device=DEVICE), torch.ones(70, device=DEVICE)
    for steps in (2, 5):
        with emulated():
            with Operations() as there:
                solution = revdeq.solve(Same.apply, z0, scale, max_steps=steps, state=state)
            with Operations() as back:
                solution.z.backward(gradient)
        assert there.names.total() <= forward, there.names
        assert back.names.total() <= backward, back.names


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, scale):
        return z.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def solve_leaves(device, sizes, **settings):
    """Solve with a state of several tensors, each of which depends on the next. Returns all results on the CPU."""
    torch.manual_seed(0)
    x = [torch.randn(n).to(device).requires_grad_() for n in sizes]
    z0 = {f"leaf {i}": torch.zeros(n, device=device) for i, n in enumerate(sizes)}

    def f(z):
        leaves = list(z.values())
        return {name: 0.4 * leaf.tanh() + 0.2 * leaves[i - 1].mean() + x[i] for i, (name, leaf) in enumerate(z.items())}

    solution = revdeq.solve(f, z0, beta=0.8, max_steps=4, check="raise", **settings)
    sum(z.square().sum() for z in solution.z.values()).backward()
    return [t.detach().cpu() for t in (*solution.z.values(), *solution.y.values(), *(t.grad for t in x))]


SIZES = (1300, 1, 256, 77, 16)


@pytest.mark.parametrize("gamma", [1.0, 1.3])
@pytest.mark.parametrize("tol", [None, 1e-9])
@pytest.mark.parametrize("state", STATES)
def test_each_tensor_of_a_state_takes_one_launch_per_half_step(state, tol, gamma):
    settings = {"state": state, "tol": tol, "gamma": gamma}
    expected = solve_leaves("cpu", SIZES, **settings)
    with emulated():
        assert all(map(torch.equal, solve_leaves(DEVICE, SIZES, **settings), expected))
        driver.synchronize(DEVICE)
        deferred.settle()
    half_steps = {
        "relax": 7 if tol is None else 4,
        "relax_norms": 1 if tol is None else 4,
        "invert": 6,
        "compare": 2,
    }
    if state == "exact":
        half_steps |= {"encode": 1, "decode": 1}
    assert driver.launches == {f"_{name}_kernel": len(SIZES) * count for name, count in half_steps.items()}


def test_one_launch_per_half_step_in_an_implicit_backward_pass():
    """Its thread does not see the backend that is forced in this one."""
    expected = solve_leaves("cpu", SIZES, gradient="implicit")
    with emulated():
        assert all(map(torch.equal, solve_leaves(DEVICE, SIZES, gradient="implicit"), expected))
    assert driver.launches == {"_relax_kernel": len(SIZES) * 14, "_relax_norms_kernel": len(SIZES) * 2}


def test_the_simulation_refuses_a_launch_while_another_device_is_current(monkeypatch):
    """Otherwise the tests above would prove nothing."""
    monkeypatch.setattr(revdeq.kernels.launch, "_on", lambda device: driver.device(OTHER))
    with emulated(), pytest.raises(RuntimeError, match="a launch on fakegpu:1 with tensors on"):
        solve(DEVICE)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_f_may_capture_a_computed_tensor(state, hooked):
    """The backward pass runs in another thread, where autograd numbers its nodes from 0."""
    torch.manual_seed(0)
    encoder, f, x = nn.Linear(6, 6, device=DEVICE), block(), torch.randn(3, 6, device=DEVICE)
    threads, fired = set(), []

    def gradients(solver):
        encoded = encoder(x)
        if hooked:
            encoded.register_hook(lambda g: fired.append(g))

        def closure(z):
            threads.add(threading.get_ident())
            return f(z) + encoded

        z = solver(closure, torch.zeros(3, 6, device=DEVICE))
        return torch.autograd.grad(z.square().sum(), [*encoder.parameters(), *f.parameters()])

    ours = gradients(lambda *args: revdeq.solve(*args, state=state).z)
    assert len(threads) == 2
    assert len(fired) == hooked
    for gradient, expected in zip(ours, gradients(stored_graph), strict=True):
        # the exact state resolves 6e-8
        assert (gradient - expected).norm() <= (1e-6 if state == "float64" else 1e-5) * expected.norm()


# deferred checks


def lose_the_way(check="raise"):
    settings = {"beta": 0.9, "max_steps": 20, "state": "float64", "check": check}
    revdeq.solve(block(), torch.ones(5, 6, device=DEVICE), **settings).z.sum().backward()


def harmless():
    revdeq.solve(torch.cos, torch.zeros(1))


def arrive(device=DEVICE):
    """The values that are being copied to the host asynchronously."""
    driver.current_stream(device).run()


def test_a_warning_comes_when_the_value_has_arrived_without_waiting():
    lose_the_way()
    harmless()  # checks, and nothing has arrived
    arrive()
    with pytest.raises(revdeq.ReconstructionError, match='state="exact"'):
        harmless()
    harmless()
    lose_the_way("warn")
    harmless()
    arrive()
    with pytest.warns(revdeq.ReconstructionWarning, match='state="exact"'):
        harmless()
    assert not driver.waits


def test_a_pending_value_does_not_delay_another_device():
    def other(value):
        raise ValueError("of the other device")

    lose_the_way()
    deferred.report(torch.zeros(1, device=OTHER), other)
    arrive(OTHER)
    with pytest.raises(ValueError, match="of the other device"):
        harmless()
    arrive()
    with pytest.raises(revdeq.ReconstructionError):
        harmless()


@pytest.mark.parametrize("arrived", [1, 3, 4])
def test_a_value_has_arrived_when_all_of_it_has(arrived):
    arriving = _device.Arriving(torch.arange(4.0).to(DEVICE))
    assert not arriving.has_come()
    arriving.value[:arrived] = torch.arange(4.0)[:arrived]
    assert arriving.has_come() == (arrived == 4)


def test_no_event_is_queried_while_another_thread_captures_a_graph():
    """Querying an event, in any thread, would invalidate the capture."""
    lose_the_way()

    def settle():
        with driver.other_stream():
            deferred.settle()

    with driver.recording(DEVICE), ThreadPoolExecutor(1) as other:  # raises if the capture was invalidated
        other.submit(settle).result()
        arrive()
        with pytest.raises(revdeq.ReconstructionError):
            other.submit(settle).result()


@pytest.mark.parametrize(
    "name",
    [
        "a_wrong_reconstruction_is_reported_at_a_later_solve",
        "an_overflow_is_reported_at_a_later_solve",
        "dropout_is_one_mask_in_both_passes",
    ],
)
def test_the_gpu_only_tests_pass_on_the_simulated_gpu(monkeypatch, name):
    """They are skipped without a GPU, so nobody would notice here if they no longer worked."""
    monkeypatch.setattr(test_gpu_only, "DEVICE", DEVICE)
    test = getattr(test_gpu_only, f"test_{name}")
    test(**({"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}))


@pytest.mark.parametrize("value", [500.0, 100.0])
def test_with_a_tolerance_the_solve_itself_reports_an_overflow(value):
    """Of z0 or f: every step synchronizes anyway, and not more than once."""
    z0 = torch.full((3,), value, device=DEVICE)
    what = "z0 is too large for the exact state" if value > 128 else "overflow in step 2: f reached 150"

    def f(z):
        return torch.where(z.abs() > 110, 150.0, 120.0) + 0 * z

    with pytest.raises(OverflowError, match=what):
        revdeq.solve(f, z0, tol=1e-6, max_steps=40, state="exact")
    assert len(driver.waits) == (1 if value > 128 else 2), driver.waits


# graphs


@pytest.mark.parametrize("current", [DEVICE, OTHER])
def test_graph_capture_queries_and_reports_nothing(current):
    lose_the_way()
    pending = list(deferred._pending)
    x = torch.ones(5, 6, device=DEVICE)
    with driver.recording(DEVICE), driver.device(current):  # raises if the capture was invalidated
        f = block()
        revdeq.solve(f, x, beta=0.9, max_steps=20, state="float64", check="raise").z.sum().backward()
        revdeq.solve(f, x, state="exact").z.sum().backward()
    assert deferred._pending == pending
    harmless()
    arrive()
    with pytest.raises(revdeq.ReconstructionError):
        harmless()


def dropping_out(masks):
    def f(z, x):
        dropped = F.dropout(x)
        masks.append(dropped.detach().raw != 0)
        return 0.5 * z + dropped

    return f


@pytest.mark.parametrize("recorded", [False, True])
def test_dropout_is_one_mask_in_both_passes(recorded):
    x, masks = torch.ones(50, device=DEVICE, requires_grad=True), []
    host, before = torch.get_rng_state(), driver.get_rng_state(DEVICE)
    with driver.recording(DEVICE) if recorded else driver.device(OTHER):
        z = revdeq.solve(dropping_out(masks), torch.zeros(50, device=DEVICE), x, max_steps=3).z
        after = driver.get_rng_state(DEVICE)
        driver.set_rng_state(before, DEVICE)
        F.dropout(x)
        assert torch.equal(driver.get_rng_state(DEVICE), after), "where one evaluation leaves it"
        torch.rand(3, device=DEVICE)
        at_last = driver.get_rng_state(DEVICE)
        torch.autograd.grad(z, x, torch.ones(50, device=DEVICE))
    assert len(masks) == 12
    assert all(torch.equal(mask, masks[0]) for mask in masks) and 0 < masks[0].sum() < 50
    assert torch.equal(driver.get_rng_state(DEVICE), at_last)
    assert torch.equal(torch.get_rng_state(), host)


@pytest.mark.parametrize(("home", "draws_on"), [("cpu", DEVICE), (DEVICE, OTHER), (DEVICE, "cpu")])
def test_dropout_on_another_device_than_z0s_is_one_mask(monkeypatch, home, draws_on):
    monkeypatch.setattr(_device, "GPUS", (*_device.GPUS, DEVICE.type))
    x, masks = torch.ones(50, device=home, requires_grad=True), []

    def f(z, x):
        masks.append(torch.rand(50, device=draws_on).lt(0.5).cpu())
        return 0.5 * z + x * masks[-1].to(home)

    z = revdeq.solve(f, torch.zeros(50, device=home), x, max_steps=3).z
    torch.rand(3, device=draws_on)
    before = _device.generator_states(torch.device(home))
    torch.autograd.grad(z, x, torch.ones(50, device=home))
    assert len(masks) == 12
    assert all(torch.equal(mask, masks[0]) for mask in masks) and 0 < masks[0].sum() < 50
    after = _device.generator_states(torch.device(home))
    assert len(after) == 3 and all(map(torch.equal, before, after))


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_cudnn_benchmark_is_off_in_evaluations(monkeypatch, gradient):
    """Each thread would choose its own algorithm. In vector-Jacobian products it may."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    w, seen = torch.full((6,), 0.5, device=DEVICE, requires_grad=True), {"f": [], "products": []}

    def note(where):
        seen[where].append(torch.backends.cudnn.benchmark)

    def f(z):
        note("f")
        out = w * z + 1
        out.register_hook(lambda grad: note("products"))
        return out

    z0 = torch.zeros(6, device=DEVICE)
    revdeq.solve(f, z0, gradient=gradient, max_steps=3).z.sum().backward()
    for solution in revdeq.steps(f, z0, max_steps=2):
        note("products")
        last = solution
    last.z.sum().backward()
    assert not any(seen["f"]) and len(seen["f"]) == (20 if gradient == "exact" else 15)
    assert all(seen["products"]) and len(seen["products"]) > 6
    assert torch.backends.cudnn.benchmark


def test_f_may_be_the_first_to_use_a_gpu(monkeypatch):
    """The state of its generator is not known before."""

    def f(z):
        monkeypatch.setattr(_device, "GPUS", (*_device.GPUS, DEVICE.type))
        return 0.5 * z

    assert revdeq.solve(f, torch.ones(3), max_steps=2).steps == 2


def test_a_solve_inside_f_may_draw_in_the_backward_thread():
    """f takes the gradient of an inner solve, in the device's thread, while this thread is in an evaluation."""
    w, done = torch.full((5,), 0.3, device=DEVICE, requires_grad=True), []

    def f(z):
        with torch.enable_grad():
            inner = revdeq.solve(lambda u: F.dropout(w * u + 1), torch.zeros(5, device=DEVICE), max_steps=2).z
            (gradient,) = torch.autograd.grad(inner.sum(), w)
        return 0.5 * z + gradient

    def run():
        revdeq.solve(f, torch.zeros(5, device=DEVICE), max_steps=2)
        done.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert done, "the two threads wait for each other"


def test_memory_is_measured_by_the_devices_allocator():
    def run():
        torch.zeros(1000, device=DEVICE)
        kept = torch.zeros(500, device=DEVICE)
        return kept + 1

    assert _device.peak_memory(run, DEVICE) == 4000
    assert _device.allocated(DEVICE) >= 4000 and _device.allocated(torch.device("cpu")) is None


def test_saved_tensors_of_another_device_are_there_at_any_moment():
    """Another thread may be about to read them."""
    places, filled = Places(), Filled(None)
    places.filled[3] = filled
    tensors, here, there = filled.tensors, torch.zeros(2, device="meta"), torch.zeros(2)
    filled.append(here), filled.append(there)
    places.empty(3, only=here.device)
    assert places.filled[3] is filled and filled.tensors is tensors
    assert tensors[0] is None and tensors[1] is there


@pytest.mark.parametrize("state", STATES)
def test_parts_of_f_on_the_cpu(state):
    """Their nodes have a separate queue in the backward pass, and may run late."""
    torch.manual_seed(0)
    table, part, index, whole = nn.Embedding(5, 6), nn.Linear(6, 6), torch.tensor([0, 3, 1]), nn.Linear(6, 6).to(DEVICE)

    def f(z):
        known = torch.tanh(part(table(index))).to(DEVICE)
        there_and_back = torch.tanh(part(z.to("cpu"))).to(DEVICE)
        return torch.tanh(whole(z) + known) + 0.1 * there_and_back

    parameters, start = [table.weight, *part.parameters(), *whole.parameters()], torch.zeros(3, 6).to(DEVICE)
    grads = []
    for z in (revdeq.solve(f, start, max_steps=4, state=state).z, stored_graph(f, start, max_steps=4)):
        grads.append([g.cpu() for g in torch.autograd.grad(z.square().sum(), parameters)])
    for ours, expected in zip(*grads, strict=True):
        assert (ours - expected).norm() <= 1e-6 * expected.norm()
