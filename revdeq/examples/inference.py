"""Inference with a tolerance and a budget of steps: for a batch, for each of its examples, and from a warm start.

python -m revdeq.examples.inference  # 10 s
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revdeq
from revdeq.examples import digits


class Block(nn.Module):
    """f(z, x), a contraction: it has exactly one fixed point, which is reached from every z0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(width, width)))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(z, 0.9 * self.weight / torch.linalg.matrix_norm(self.weight, 2)) + x)


def steps(deq: revdeq.RevDEQ) -> Tensor:
    """The steps that the last call took: of the batch, or of each example."""
    assert deq.last is not None
    return torch.as_tensor(deq.last.steps).float()


def main(updates: int = 40) -> None:
    torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    torch.manual_seed(0)
    images, labels, test_images, test_labels = (x.to(torch.get_default_device()) for x in digits())
    inject, deq, head = nn.Linear(64, 96), revdeq.RevDEQ(Block(96), max_steps=8), nn.Linear(96, 10)
    model = nn.Sequential(nn.Flatten(), inject, deq, head)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(updates):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    deq.tune(inject(images.flatten(1)))  # coefficients for the trained f
    deq.max_steps = 50
    print("tol    per example  steps: mean, min, max  test accuracy")
    with torch.inference_mode():
        for deq.tol in (0.1, 1e-2, 1e-4):
            for deq.per_example in (False, True):  # True: an example's result does not depend on the others
                right = (model(test_images).argmax(1) == test_labels).float().mean()
                each = steps(deq)
                counts = f"{each.mean():16.1f}{each.min():5.0f}{each.max():5.0f}"
                print(f"{deq.tol:<6g} {deq.per_example!s:11} {counts}  {right:13.1%}")

        # For the next frame of a video, or a user's next keystroke, start from the last solution.
        deq.tol, deq.per_example = 1e-3, False
        frame = test_images[:1].flatten(1)
        z, cold = deq(inject(frame)), steps(deq)
        deq(inject(frame + 0.01 * torch.randn(frame.shape)), z0=z)
        print(f"\nThe next frame takes {steps(deq):.0f} steps from the last solution, and {cold:.0f} from zero.")


if __name__ == "__main__":
    main()
