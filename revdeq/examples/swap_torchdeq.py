"""A torchdeq program with another solver: an import, which adds the core "reversible", and one changed line.

python -m revdeq.examples.swap_torchdeq
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revdeq._device import devices, peak_memory
from revdeq.baselines import stored_graph
from revdeq.cli.demo import Digits
from revdeq.examples import needs

EVALUATIONS = 16


class Classifier(nn.Module):
    """As in torchdeq's examples: deq(f, z0) returns a list of states, the last of which is the fixed point."""

    def __init__(self, deq: Callable[..., Any], width: int = 128) -> None:
        super().__init__()
        self.deq = deq
        self.inject, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(width, width)))
        self.evaluations = 0

    def forward(self, images: Tensor) -> Tensor:
        x = self.inject(images.flatten(1))
        weight = 0.9 * self.weight / torch.linalg.matrix_norm(self.weight, 2)  # a contraction, for implicit gradients

        def f(z: Tensor) -> Tensor:
            self.evaluations += 1
            return torch.tanh(F.linear(z, weight) + x)

        z, _ = self.deq(f, torch.zeros_like(x))
        return self.head(z[-1])


def train(model: nn.Module, digits: Digits) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        loss = F.cross_entropy(model(digits.images), digits.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()


def gradient(model: nn.Module, digits: Digits) -> Tensor:
    loss = F.cross_entropy(model(digits.images), digits.labels)
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def iterated(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[list[Tensor], None]:
    """The stored graph of torchdeq's iteration, which evaluates f once more at the end."""
    for _ in range(EVALUATIONS + 1):
        z = f(z)
    return [z], None


def reversibly_iterated(f: Callable[[Tensor], Tensor], z0: Tensor) -> tuple[list[Tensor], None]:
    """The stored graph of the reversible core's iteration."""
    return [stored_graph(f, z0, beta=0.5, max_steps=EVALUATIONS // 2)], None


def main() -> None:
    needs("sklearn", "torchdeq")
    import torchdeq

    import revdeq.torchdeq  # noqa: F401, the import that adds the core

    torch.set_default_device(device := devices()[0])
    digits = Digits.load()
    before = torchdeq.get_deq(f_solver="fixed_point_iter", f_max_iter=EVALUATIONS, ift=True, b_max_iter=EVALUATIONS)
    after = torchdeq.get_deq(core="reversible", f_max_iter=EVALUATIONS, beta=0.5)  # the one line that changes
    print("                   test accuracy  evaluations  peak memory  of the stored graph  gradient error")
    for name, deq, stored in (
        ("before, implicit", before, iterated),
        ("after, reversible", after, reversibly_iterated),
    ):
        torch.manual_seed(0)
        model, reference = Classifier(deq), Classifier(stored)
        accuracy, model.evaluations = train(model, digits), 0
        reference.load_state_dict(model.state_dict())
        ours, evaluations, exact = gradient(model, digits), model.evaluations, gradient(reference, digits)
        peaks = [peak_memory(partial(gradient, m, digits), device) / 2**20 for m in (model, reference)]
        print(
            f"{name:17}  {accuracy:13.1%}  {evaluations:11}  {peaks[0]:7.1f} MiB  {peaks[1]:15.1f} MiB  "
            f"{(ours - exact).norm() / exact.norm():14.1e}"
        )
    print("The reversible core evaluates f again in the backward pass, and its gradient is that of the steps that ran.")
    print("torchdeq's gradient is that of the fixed point, which these iterations only approximate.")
    print("The reversible core stores no history, but two float64 states, which exceed the graph of this small f.")


if __name__ == "__main__":
    main()
