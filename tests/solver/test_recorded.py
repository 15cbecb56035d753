"""A training step that is recorded as a graph and replayed: on a simulated device, the bits of the step that ran."""

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
    """Steps of one model on a device, from the same beginning."""

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
def test_replays_of_a_training_step_have_the_bits_of_the_steps(state, dropout):
    with emulated():
        training = Training(dropout, state=state, beta=0.8, check="raise")
        training.step()  # compiles kernels, and makes what the optimizer keeps
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


def test_a_first_launch_inside_of_a_recording_names_what_to_do():
    with emulated(), driver.device(DEVICE):
        training = Training(0.0)
        with pytest.raises(RuntimeError, match="_relax.*_kernel .* run what is recorded once before"):
            with driver.graph(Graph()):
                training.step()
