"""An equilibrium graph neural network: more steps reach further neighbours, in the memory of one evaluation.

The nodes are scikit-learn's digits, linked to their five nearest neighbours. A few have labels; the others have no
features, so that all information about them travels over the links.

    python -m revdeq.examples.graph
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revdeq
from revdeq._device import devices, peak_memory
from revdeq.examples import needs


class Propagate(nn.Module):
    """f(z, x): the mean over the neighbours, with a learned decay per channel, plus the node's own x.

    tanh and the mean do not expand, and the decay is below 1, so f is always a contraction.
    """

    def __init__(self, neighbours: Tensor, channels: int) -> None:
        super().__init__()
        self.neighbours, self.fading = neighbours, nn.Parameter(torch.full((channels,), 3.0))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(self.fading) * z[self.neighbours].mean(1) + x)


class GraphNetwork(nn.Module):
    def __init__(self, neighbours: Tensor, max_steps: int, channels: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Linear(10, channels, bias=False)
        self.deq = revdeq.RevDEQ(Propagate(neighbours, channels), beta=0.8, max_steps=max_steps, state="exact")
        self.head = nn.Sequential(nn.LayerNorm(channels, eps=1e-12), nn.Linear(channels, 10))

    def forward(self, labels: Tensor, shown: Tensor) -> Tensor:
        """The classes of all nodes, from the given labels."""
        return self.head(self.deq(self.encoder(F.one_hot(labels, 10) * shown[:, None].float())))


def train(model: nn.Module, labels: Tensor, known: Tensor, updates: int = 40) -> float:
    """Hide half of the known labels, and predict them from the rest. Returns the accuracy on the unknown labels."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(updates):
        shown = known & (torch.rand(len(known)) < 0.5)
        asked = known & ~shown
        loss = F.cross_entropy(model(labels, shown)[asked], labels[asked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (model(labels, known).argmax(1) == labels)[~known].float().mean().item()


def main() -> None:
    needs("sklearn")
    from sklearn.datasets import load_digits
    from sklearn.neighbors import NearestNeighbors

    torch.set_default_device(device := devices()[0])
    images, digits = load_digits(return_X_y=True)
    neighbours = torch.tensor(NearestNeighbors(n_neighbors=5).fit(images).kneighbors(return_distance=False))
    labels = torch.tensor(digits)
    known = torch.zeros(len(labels), dtype=torch.bool)
    known[torch.cat([(labels == digit).nonzero()[:5, 0] for digit in range(10)])] = True
    print(f"{int(known.sum())} of {len(known):,} labels are known.\n")
    print("steps N  hops  accuracy on the others  peak memory of training")
    for n in (1, 2, 4, 8, 16):
        torch.manual_seed(0)
        accuracy = train(GraphNetwork(neighbours, n), labels, known)
        memory = peak_memory(partial(train, GraphNetwork(neighbours, n), labels, known, updates=1), device)
        print(f"{n:7}  {2 * n:4}  {accuracy:22.1%}  {memory / 2**20:19.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
