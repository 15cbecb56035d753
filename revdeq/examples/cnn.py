"""An equilibrium layer in an existing CNN, in a plain training loop: the fixed point of one block replaces four blocks.

python -m revdeq.examples.cnn  # 10 s
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revdeq
from revdeq.examples import digits


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


def main(epochs: int = 4) -> None:
    torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    torch.manual_seed(0)
    images, labels, test_images, test_labels = (x.to(torch.get_default_device()) for x in digits())
    ordinary = cnn(nn.Sequential(*[Block(16) for _ in range(4)]))
    equilibrium = cnn(revdeq.RevDEQ(Block(16), beta=0.5, max_steps=4))  # the one line that changes
    for name, model in {"four blocks": ordinary, "equilibrium of one": equilibrium}.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(labels)).split(64):
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean()
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{name:18}  {parameters:6,} parameters  {right:.1%} of the test digits right")


if __name__ == "__main__":
    main()
