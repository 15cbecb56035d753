"""Training with Hugging Face's Accelerate: several processes, mixed precision and devices, without changes for revdeq.

torchrun --nproc-per-node 2 -m revdeq.examples.with_accelerate  # 10 s
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import revdeq
from revdeq.examples import digits, needs
from revdeq.models import ConvBlock


def main(epochs: int = 3, precision: str = "bf16") -> None:
    needs("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=precision, cpu=not torch.accelerator.is_available())
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16))
    equilibrium = revdeq.RevDEQ(ConvBlock(16, width=2), beta=0.5, max_steps=4)
    model: nn.Module = nn.Sequential(encoder, equilibrium, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for batch, targets in loader:
            loss = F.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.3f}")
    with torch.no_grad():
        classes = model(test_images.to(accelerator.device)).argmax(1).cpu()
    accelerator.print(f"{(classes == test_labels).float().mean():.1%} of the test digits right")


if __name__ == "__main__":
    main()
