"""An equilibrium layer in an existing CNN: the fixed point of one block replaces a stack of blocks.

python -m revdeq.examples.cnn
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revdeq
from revdeq._device import devices
from revdeq.cli.demo import Digits
from revdeq.examples import needs


class Block(nn.Module):
    """The usual residual block, with x, the input features, as an additional argument for the equilibrium."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)  # not BatchNorm, whose statistics every evaluation would update

    def forward(self, z: Tensor, x: Tensor | float = 0.0) -> Tensor:
        return self.norm(z + self.second(F.relu(self.first(z) + x)) + x)


def cnn(middle: nn.Module, channels: int = 16) -> nn.Module:
    encoder = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU())
    head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))
    return nn.Sequential(encoder, middle, head)


def train(model: nn.Module, digits: Digits, epochs: int = 4) -> float:
    """The accuracy on the test images. This is the usual training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(digits.labels)).split(64):
            loss = F.cross_entropy(model(digits.images[batch]), digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()


def main() -> None:
    needs("sklearn")  # the digits
    torch.set_default_device(devices()[0])
    torch.manual_seed(0)
    digits = Digits.load()
    ordinary = cnn(nn.Sequential(*[Block(16) for _ in range(4)]))
    equilibrium = cnn(revdeq.RevDEQ(Block(16), beta=0.5, max_steps=4))  # the one line that changes
    for name, model in {"four blocks": ordinary, "equilibrium of one": equilibrium}.items():
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{name:18}  {parameters:6,} parameters  {train(model, digits):.1%} of the test digits right")


if __name__ == "__main__":
    main()
