"""Captured training steps and solves, on a simulated device: a replay has the bits of the eager step."""

import types

import pytest
import torch
from fake_gpu import DEVICE, Graph, driver, emulated
from torch import nn

import revdeq
from revdeq._solver import deferred, monitor

STATES = ("float64", "exact")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(monitor, "_already_warned", set())
    monkeypatch.setattr(deferred, "_pending", [])
    driver.launches.clear()
    driver.replays = 0


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(dropout)

    def forward(self, z, x):
        return self.dropout(torch.tanh(self.linear(self.norm(z)))) + x


class Training:
    """Training steps of one model on a device, from the same initial weights."""

    def __init__(self, dropout, **settings):
        torch.manual_seed(0)
        self.f, self.settings = Block(dropout).to(DEVICE), settings
        self.x, self.target = torch.randn(5, 8).to(DEVICE), torch.randn(5, 8).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.f.parameters(), lr=0.1, momentum=0.9)
        self.start = [p.detach().clone() for p in self.f.parameters()]

    def step(self):
        z = revdeq.solve(self.f, torch.zeros_like(self.x), self.x, max_steps=2, **self.settings).z
        self.optimizer.zero_grad(set_to_none=False)
        (z - self.target).square().mean().backward()
        self.optimizer.step()

    def begin_again(self):
        driver.manual_seed_all(1)
        with torch.no_grad():
            for p, start in zip(self.f.parameters(), self.start, strict=True):
                p.copy_(start)
                self.optimizer.state[p]["momentum_buffer"].zero_()

    def weights(self, take, count=3):
        self.begin_again()
        for _ in range(count):
            take()
        return [p.detach().cpu() for p in self.f.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("state", STATES)
def test_replays_of_a_training_step_have_the_bits_of_eager_steps(state, dropout):
    with emulated():
        training = Training(dropout, state=state, beta=0.8, check="raise")
        training.step()  # compiles kernels, and creates the optimizer's state
        graph = Graph()
        with driver.device(DEVICE), driver.graph(graph):
            training.step()
        expected = training.weights(training.step)
        launches = driver.launches.copy()
        assert all(map(torch.equal, training.weights(graph.replay), expected))
        assert driver.launches == launches and driver.replays == 3, "the host launches nothing"
        training.x.copy_(torch.randn(5, 8))
        for_other_data = training.weights(training.step)
        assert not any(map(torch.equal, for_other_data, expected))
        assert all(map(torch.equal, training.weights(graph.replay), for_other_data))


def test_a_first_launch_during_capture_names_the_remedy():
    with emulated(), driver.device(DEVICE):
        training = Training(0.0)
        with pytest.raises(RuntimeError, match="_relax.*_kernel .* run the captured code once before"):
            with driver.graph(Graph()):
                training.step()


def solved(f, x, capture, **settings):
    """The results of a solve and its backward pass, on the CPU."""
    f.zero_grad()
    x = x.detach().to(DEVICE).requires_grad_()
    z0 = (0.1 * x).detach().requires_grad_()
    solution = revdeq.solve(f, z0, x, capture=capture, **settings)
    (solution.z.square().sum() + solution.y.sum()).backward()
    tensors = solution.z, solution.y, solution.change, x.grad, z0.grad, *(p.grad for p in f.parameters())
    return solution.steps, [t.detach().cpu() for t in tensors if t is not None]


@pytest.mark.parametrize("settings", [{}, {"gamma": 0.7}, {"tol": 0.3, "max_steps": 9}], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_captured_steps_have_the_bits_of_eager_ones(state, settings):
    settings = {"state": state, "beta": 0.9, "max_steps": 3, "check": "raise", **settings}
    with emulated():
        torch.manual_seed(0)
        f, inputs = Block().to(DEVICE), [torch.randn(3, 8) for _ in range(3)]
        solved(f, inputs[0], True, **settings)  # as usual
        solved(f, inputs[0], True, **settings)  # records
        for x in inputs[1:]:
            driver.launches.clear()
            driver.replays = 0
            steps, ours = solved(f, x, True, **settings)
            assert driver.replays == 2 * steps
            assert (
                not {"_relax_kernel", "_relax_norms_kernel", "_invert_kernel", "_compare_kernel"}
                & driver.launches.keys()
            )
            expected = solved(f, x, False, **settings)
            assert steps == expected[0] and all(map(torch.equal, ours, expected[1]))
        driver.synchronize(DEVICE)
        deferred.settle()


@pytest.fixture(scope="class")
def emulator():
    with emulated():
        yield


@pytest.mark.usefixtures("emulator")
class TestRecordedSteps:
    def test_captured_steps_spill_remainders(self):
        settings = {"state": "exact", "beta": 63 / 64, "max_steps": 7, "check": "raise"}
        torch.manual_seed(0)
        f, x = Block().to(DEVICE), torch.randn(2, 8)
        for _ in range(3):
            driver.replays = 0
            ours = solved(f, x, True, **settings)
        assert driver.replays == 14
        assert all(map(torch.equal, ours[1], solved(f, x, False, **settings)[1]))

    def test_solves_may_follow_each_other_in_any_order(self):
        """Two forward passes and then two backward passes, one of them twice. Autograd adds up the gradients of eager
        solves per evaluation, and those of captured solves once per solve: roundings differ."""
        torch.manual_seed(0)
        f, x = Block().to(DEVICE), [torch.randn(2, 8).to(DEVICE).requires_grad_() for _ in range(2)]

        def gradients(capture):
            z = [revdeq.solve(f, torch.zeros_like(a), a, max_steps=2, capture=capture).z for a in x]
            twice = torch.autograd.grad(z[0].sum(), [x[0], f.linear.weight], retain_graph=True)
            both = torch.autograd.grad(z[0].sum() + (2 * z[1]).sum(), [*x, f.linear.weight])
            return [g.cpu() for g in (*twice, *both)]

        for _ in range(2):
            gradients(True)
        driver.replays = 0
        *ours, of_both = gradients(True)
        assert driver.replays == 2 * 2 + 3 * 2
        *expected, of_both_as_usual = gradients(False)
        assert all(map(torch.equal, ours, expected))
        assert (of_both - of_both_as_usual).norm() <= 8 * torch.finfo(torch.float32).eps * of_both.norm()

    def test_without_a_gradient(self):
        f, x = Block().to(DEVICE), torch.randn(2, 8).to(DEVICE)
        with torch.no_grad():
            results = [revdeq.solve(f, torch.zeros_like(x), x, max_steps=n, capture=True) for n in (2, 3, 5)]
            expected = revdeq.solve(f, torch.zeros_like(x), x, max_steps=5)
        assert driver.replays == 3 + 5
        assert torch.equal(results[-1].z.cpu(), expected.z.cpu()) and not results[-1].z.requires_grad

    def test_captured_steps_report_a_wrong_reconstruction(self):
        """The float64 state cannot invert these steps."""
        f, x = Block().to(DEVICE), torch.randn(2, 8)
        with pytest.warns(revdeq.ReconstructionWarning, match="failed to reconstruct z0"):
            for _ in range(3):
                monitor._already_warned.clear()
                deferred._pending.clear()
                solved(f, x, True, state="float64", beta=1 - 1e-6, max_steps=3)
            driver.synchronize(DEVICE)
            deferred.settle()

    def test_captured_steps_report_an_overflow(self):
        f, x = Block().to(DEVICE), torch.ones(2, 8)
        for size in (1, 1, 500):
            solved(f, size * x, True, state="exact", max_steps=2)
        driver.synchronize(DEVICE)
        with pytest.raises(
            OverflowError, match=r"overflow in one of 2 steps: f reached 500.*Exact\(fraction_bits=21\)"
        ):
            deferred.settle()

    def test_new_weights_are_read_and_moved_weights_are_captured_again(self):
        f, x = Block().to(DEVICE), torch.randn(2, 8)
        for _ in range(2):
            solved(f, x, True, max_steps=2)
        with torch.no_grad():
            f.linear.weight.mul_(0.5)
        assert all(map(torch.equal, solved(f, x, True, max_steps=2)[1], solved(f, x, False, max_steps=2)[1]))
        f.linear.weight = nn.Parameter(0.3 * f.linear.weight.detach())
        for _ in range(3):
            driver.replays = 0
            ours = solved(f, x, True, max_steps=2)
        assert driver.replays == 4
        assert all(map(torch.equal, ours[1], solved(f, x, False, max_steps=2)[1]))

    @pytest.mark.parametrize(
        "settings", [{"keep": 1}, {"aux": True}, {"indexed": True}, {"backward_steps": 1}], ids=str
    )
    def test_an_option_that_cannot_be_captured_is_an_error(self, settings):
        (name,) = settings

        class WithAux(Block):
            def forward(self, z, x, evaluation=0):
                out = super().forward(z, x)
                return (out, out.sum()) if name == "aux" else out

        with pytest.warns(RuntimeWarning, match=f"runs as usual, because {name} = .*: leave it out"):
            solved(WithAux().to(DEVICE), torch.randn(2, 8), True, max_steps=2, **settings)

    def test_an_argument_that_may_change_is_not_captured(self):
        class Scaled(Block):
            def forward(self, z, x, scales):
                return scales.first * super().forward(z, x)

        x, scales = torch.randn(2, 8, device=DEVICE), types.SimpleNamespace(first=0.5)
        with pytest.warns(RuntimeWarning, match="of type SimpleNamespace.*pass a tensor"):
            revdeq.solve(Scaled().to(DEVICE), torch.zeros_like(x), x, scales, max_steps=2, capture=True)

    def test_what_cannot_be_captured_warns_once_and_runs_as_usual(self, recwarn):
        x = torch.randn(2, 8)

        def told(f, times=1):
            recwarn.clear()
            driver.replays = 0
            expected = solved(f, x, False, max_steps=2)[1]
            for _ in range(times):
                assert all(map(torch.equal, solved(f, x, True, max_steps=2)[1], expected))
            assert driver.replays == 0
            (warning,) = recwarn
            return str(warning.message)

        class Looks(Block):
            def forward(self, z, x):
                return super().forward(z, x) * (1 if x.sum() > 1e9 else 0.5)

        class Outside(Block):
            def forward(self, z, x):
                return super().forward(z, x) + outside

        outside = torch.ones(8, device=DEVICE, requires_grad=True)
        assert "f cannot be captured (RuntimeError: to wait for" in told(Looks().to(DEVICE), times=3)
        assert "neither an argument nor a parameter of f: pass it" in told(Outside().to(DEVICE), times=3)
        hooked = Block().to(DEVICE)
        hooked.linear.register_forward_hook(lambda *args: None)
        assert "f has hooks" in told(hooked)
        driver.manual_seed_all(0)
        recwarn.clear()
        solved(Block(0.5).to(DEVICE), x, True, max_steps=2)
        assert "f draws random numbers" in str(recwarn[0].message)


def test_capture_on_the_cpu_warns():
    with pytest.warns(RuntimeWarning, match="z0 is on cpu, which has no CUDA graphs: move"):
        revdeq.RevDEQ(Block(), max_steps=2, capture=True)(torch.randn(2, 8))
