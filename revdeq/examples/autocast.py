"""Fine-tuning under autocast: a pretrained model with a new head, with f in bfloat16.

A model learns the digits 0 to 4 in float32. Saved and loaded with a head for all ten, it is fine-tuned in bfloat16.

    python -m revdeq.examples.autocast
"""

import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revdeq
from revdeq._device import devices
from revdeq.cli.demo import Digits
from revdeq.examples import needs
from revdeq.models import ConvBlock


class Classifier(nn.Module):
    def __init__(self, classes: int, channels: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(4, channels))
        self.deq = revdeq.RevDEQ(ConvBlock(channels, width=2), max_steps=4)
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.deq(self.encoder(images)))


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, autocast: bool = False) -> None:
    """The usual loop. float16 would need a GradScaler, as in any training; bfloat16 does not."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(64):
            with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):  # the backward pass is outside
                loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model: nn.Module, digits: Digits) -> float:
    with torch.no_grad(), torch.autocast(digits.images.device.type, torch.bfloat16):
        return (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()


def main() -> None:
    needs("sklearn")  # the digits
    torch.set_default_device(device := devices()[0])
    torch.manual_seed(0)
    digits = Digits.load()
    easy = digits.labels < 5
    pretrained = Classifier(classes=5)
    train(pretrained, digits.images[easy], digits.labels[easy], epochs=2)
    file = io.BytesIO()  # your checkpoint.pt
    torch.save(pretrained.state_dict(), file)

    model = Classifier(classes=10)
    file.seek(0)
    weights = torch.load(file, map_location=device)
    fresh = model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("head")}, strict=False)
    print(f"from the checkpoint: all but {', '.join(fresh.missing_keys)}")
    model.encoder.requires_grad_(False)
    model.deq.tune(model.encoder(digits.images[:64]))  # coefficients for the trained f
    print(f"tuned: beta {model.deq.beta:.2f}, gamma {model.deq.gamma:.2f}")
    print(f"before: {accuracy(model, digits):.1%} of the test digits right")
    train(model, digits.images, digits.labels, epochs=3, autocast=True)
    print(f"after:  {accuracy(model, digits):.1%}, with f in bfloat16 and weights in {model.head[2].weight.dtype}")


if __name__ == "__main__":
    main()
