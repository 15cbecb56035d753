"""A program written for torchdeq whose solver is swapped: one import, and one line where the solver is made.

    python -m revdeq.examples.swap_torchdeq            # needs torchdeq: pip install 'revdeq[demo,torchdeq]'
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchdeq
from torch import Tensor, nn

import revdeq.torchdeq  # after this, torchdeq has a core "reversible"
from revdeq.baselines import stored_graph
from revdeq.demo import Digits
from revdeq.measure import devices, peak_memory

EVALUATIONS = 16


class Classifier(nn.Module):
    """As in torchdeq's own examples: deq(f, z0) gives a list of states, the last of which is the fixed point."""

    def __init__(self, deq: Callable[..., Any], width: int = 128) -> None:
        super().__init__()
        self.deq = deq
        self.inject, self.layer, self.head = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        x = self.inject(images.flatten(1))
        z, _ = self.deq(lambda z: self.norm(torch.tanh(self.layer(z)) + x), torch.zeros_like(x))
        return self.head(z[-1])


def gradient(model: nn.Module, digits: Digits) -> Tensor:
    loss = F.cross_entropy(model(digits.images), digits.labels)
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
