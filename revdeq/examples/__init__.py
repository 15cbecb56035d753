"""Programs to copy from: `python -m revdeq.examples` lists them."""

import importlib.util

import torch
from torch import Tensor

PACKAGES = {"sklearn": "scikit-learn", "accelerate": "accelerate"}
"""The modules that examples need besides torch, and how pip calls them."""


def needs(*modules: str) -> None:
    """Exit with a message if one of these modules is not installed."""
    if missing := [PACKAGES[name] for name in modules if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"This example needs {', '.join(missing)}: pip install {' '.join(missing)}")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training, then for tests: handwritten digits of 8 x 8 pixels, a part of scikit-learn."""
    needs("sklearn")
    from sklearn.datasets import load_digits

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, test = images.view(-1, 1, 8, 8).float() / 16, torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]
