"""Inference with a tolerance and a budget of steps, for a whole batch or for each of its examples.

python -m revdeq.examples.inference
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revdeq
from revdeq._device import devices
from revdeq.cli.demo import Digits
from revdeq.examples import needs


class Block(nn.Module):
    """f(z, x), a contraction: it has exactly one fixed point, which is reached from every z0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(width, width)))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(z, 0.9 * self.weight / torch.linalg.matrix_norm(self.weight, 2)) + x)


class Classifier(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.inject, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.deq = revdeq.RevDEQ(Block(width), max_steps=8)

    def forward(self, images: Tensor, z0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = self.deq(self.inject(images.flatten(1)), z0=z0)
        return self.head(z), z


def work(model: Classifier) -> tuple[int, float]:
    """The evaluations of f in the last solve, and the relative change of its last step."""
    assert model.deq.last is not None
    return model.deq.last.nfe, model.deq.last.change.item()


def main() -> None:
    needs("sklearn")  # the digits
    torch.set_default_device(devices()[0])
    torch.manual_seed(0)
    digits = Digits.load()
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = F.cross_entropy(model(digits.images)[0], digits.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.deq.tune(model.inject(digits.images.flatten(1)))
    print("tol    budget N  evaluations of f    change  test accuracy")
    with torch.inference_mode():
        for tol, budget in ((0.1, 50), (1e-2, 50), (1e-4, 50), (1e-4, 1)):
            model.deq.tol, model.deq.max_steps = tol, budget
            right = model(digits.test_images)[0].argmax(1) == digits.test_labels
            evaluations, change = work(model)
            print(f"{tol:<6g} {budget:8}  {evaluations:16}  {change:8.0e}  {right.float().mean():13.1%}")

        # Per example, easy images stop before hard ones, and f is then no longer evaluated for them.
        print("\ntol    budget N  evaluations per image: mean, min, max  test accuracy")
        model.deq.per_example = model.deq.compact = True
        for tol, budget in ((0.1, 50), (1e-2, 50), (1e-4, 50)):
            model.deq.tol, model.deq.max_steps = tol, budget
            right = model(digits.test_images)[0].argmax(1) == digits.test_labels
            assert model.deq.last is not None
            each = 2 * model.deq.last.steps
            counts = f"{each.float().mean():27.1f}{each.min():5}{each.max():5}"
            print(f"{tol:<6g} {budget:8}  {counts}  {right.float().mean():13.1%}")
        model.deq.per_example = model.deq.compact = False

        # For the next frame of a video, or a user's next keystroke, start from the last solution.
        model.deq.tol, model.deq.max_steps = 1e-3, 50
        frame = digits.test_images[:1]
        _, z = model(frame)
        cold, _ = work(model)
        model(frame + 0.01 * torch.randn(frame.shape), z0=z)
        print(f"\nThe next frame takes {work(model)[0]} evaluations from the last solution, and {cold} from zero.")


if __name__ == "__main__":
    main()
