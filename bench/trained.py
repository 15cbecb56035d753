"""Blocks trained by the presets for two cores (the transformer with batches of 8 sequences), and their inputs for real
data.

They are trained once, in some minutes, with the data in REVDEQ_DATA, and saved in runs/bench.
"""

import itertools
import os
from pathlib import Path

import torch

from revdeq.training.presets import configured
from revdeq.training.restore import restored
from revdeq.training.run import train

RUNS = Path(__file__).parent.parent / "runs" / "bench"
SETTINGS = {"cifar10-tiny": {"updates": 300}, "wikitext2-tiny": {"updates": 300, "batch": 8}}
PRESETS = {"trained conv block": "cifar10-tiny", "trained transformer block": "wikitext2-tiny"}
EXAMPLES = {"trained conv block": 32, "trained transformer block": 8}
SCALE = 2
"""The scale of the image model that is used: 32 channels, 8 by 8 pixels, two steps in training."""


def available() -> list[str]:
    if os.environ.get("REVDEQ_DATA"):
        return list(PRESETS)
    print("the trained blocks are left out: set REVDEQ_DATA to a folder with CIFAR-10 and WikiText-2")
    return []


def trained(block: str, batches: int = 1) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """f, in evaluation mode, and its x for batches of validation data."""
    data, out = Path(os.environ["REVDEQ_DATA"]), RUNS / PRESETS[block]
    # Trained once. If the preset has changed, the saved run is rejected.
    preset = configured(PRESETS[block], SETTINGS[PRESETS[block]])
    train(preset, data, out, resume=True, device="cpu")
    found = restored(out / "last.pt", data)
    model = found.model.eval()
    equilibrium = model.scales[SCALE] if hasattr(model, "scales") else model.equilibrium
    seen: list[torch.Tensor] = []
    hook = equilibrium.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in itertools.islice(found.dataset.evaluation("valid", EXAMPLES[block]), batches):
            model(batch.inputs)
    hook.remove()
    return equilibrium.f, [x.clone() for x in seen]
