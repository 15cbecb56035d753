"""Presets: the experiments of the paper, and small ones for a CPU.

A preset is plain data, which is saved with a run. `--set key=value` changes an argument of the model or of the data
set, or a field of `Training`.
"""

import ast
import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .. import Options, RevDEQ
from ..baselines import Anderson
from ..models import MODELS
from .data import DATASETS


class SettingError(ValueError):
    """A preset or setting does not exist, or its value is invalid."""


@dataclass(frozen=True)
class Training:
    """Training settings.

    Args:
        epochs: The maximum number of passes through the data.
        updates: The maximum number of updates; None is as many as the epochs have.
        batch: The number of examples (images, sequences or puzzles) per update, over all processes.
        lr: The learning rate of AdamW: initial (plateau) or peak (cosine).
        weight_decay: Of AdamW.
        schedule: "plateau" halves lr when the mean loss of 200 updates has not improved 10 times in a row, and ends the
            training below 1e-6; "cosine" warms up linearly for `warmup` updates and decays to 0.
        warmup: The number of warm-up updates.
        clip: The maximum norm of the gradient; None disables clipping.
        autocast: None or "bfloat16".
        seed: For the initial parameters, the order of the data, augmentation, dropout and noise.
        evaluation_batches: The number of batches of a split to evaluate on; None uses all.
        log_every: The number of updates between rows of metrics; each row has their mean.
        evaluate_every: The number of updates between evaluations; None is an epoch.
        save_every: The number of updates between checkpoints; every evaluation saves one, too.
    """

    epochs: int = 100
    updates: int | None = None
    batch: int = 64
    lr: float = 1e-3
    weight_decay: float = 1e-4
    schedule: str = "plateau"
    warmup: int = 0
    clip: float | None = None
    autocast: str | None = None
    seed: int = 0
    evaluation_batches: int | None = None
    log_every: int = 20
    evaluate_every: int | None = None
    save_every: int = 200

    def __post_init__(self) -> None:
        counts = ("epochs", "updates", "batch", "evaluation_batches", "log_every", "evaluate_every", "save_every")
        for names, holds, must in (
            (counts, lambda x: type(x) is int and x >= 1, "an integer of at least 1"),
            (("warmup", "seed"), lambda x: type(x) is int and x >= 0, "an integer of at least 0"),
            (("lr", "clip"), lambda x: type(x) in (int, float) and 0 < x < math.inf, "a positive number"),
            (("weight_decay",), lambda x: type(x) in (int, float) and 0 <= x < math.inf, "a number of at least 0"),
            (("schedule",), lambda x: x in ("plateau", "cosine"), "plateau or cosine"),
            (("autocast",), lambda x: x == "bfloat16", "bfloat16"),
        ):
            for name in names:
                value, is_optional = getattr(self, name), getattr(Training, name) is None
                if not (holds(value) or (value is None and is_optional)):
                    raise SettingError(f"{name}={value!r}: it must be {must}{' or none' if is_optional else ''}")


@dataclass(frozen=True)
class Preset:
    """A model, its data and its training settings.

    Args:
        name: The name of the preset.
        data: A name in `revdeq.training.data.DATASETS`.
        model: A name in `revdeq.models.MODELS`.
        settings: Arguments of the model and of the data set; a name that both have goes to both. In models with one
            equilibrium, max_steps may be a range: with (5, 20), each update draws its number of steps, and evaluations
            take 20.
        training: The training settings.
        quoted: The number of parameters that the paper states.
    """

    name: str
    data: str
    model: str
    settings: Mapping[str, Any]
    training: Training
    quoted: str | None = None

    def flat(self) -> dict[str, Any]:
        """All settings by name."""
        return {"preset": self.name, "model": self.model, **self.settings, **dataclasses.asdict(self.training)}

    @property
    def range_of_steps(self) -> tuple[int, int] | None:
        """The smallest and the largest number of steps of an update, if max_steps is a range."""
        steps = self.settings.get("max_steps")
        if self.model == "multi-scale" or not isinstance(steps, (tuple, list)):
            return None
        if len(steps) != 2 or not all(type(n) is int for n in steps) or not 1 <= steps[0] <= steps[1]:
            raise SettingError(f"max_steps={steps!r}: a range is two integers of at least 1 in ascending order")
        return steps[0], steps[1]

    def changed(self, changes: Mapping[str, Any]) -> "Preset":
        """The preset with some of its settings changed, and perhaps with another "model"."""
        model = changes.get("model", self.model)
        if model not in MODELS:
            raise SettingError(f"model={model!r}: there are {', '.join(MODELS)}")
        known = arguments_of(model) | DATASETS[self.data].settings
        of_training = {field.name for field in dataclasses.fields(Training)}
        for key, value in changes.items():
            if key not in known | of_training | {"model"}:
                names = ", ".join(sorted({*known, *of_training, "model"}))
                raise SettingError(f"{key}={value!r}: {self.name} has no such setting; it has {names}")
        settings = {k: v for k, v in {**self.settings, **changes}.items() if k in known}  # another model takes others
        training = replace(self.training, **{k: v for k, v in changes.items() if k in of_training})
        quoted = self.quoted if model == self.model else None
        return replace(self, model=model, settings=settings, training=training, quoted=quoted)

    def build(self, **shapes: Any) -> nn.Module:
        """A new model. shapes: its arguments that follow from the data, `dataset.shapes`."""
        own = {key: value for key, value in self.settings.items() if key in arguments_of(self.model)}
        solver, evaluations = own.pop("solver", "reversible"), own.pop("evaluations", None)
        if solver not in ("reversible", "torchdeq"):
            raise SettingError(f"solver={solver!r}: it must be reversible or torchdeq")
        if solver == "reversible" and evaluations is not None:
            raise SettingError(f"evaluations={evaluations!r}: it applies to solver=torchdeq; set max_steps")
        if self.range_of_steps is not None:
            own["max_steps"] = self.range_of_steps[1]
        try:
            model = MODELS[self.model](**{**own, **shapes})
            return model if solver == "reversible" else by_torchdeq(model, evaluations)
        except (TypeError, ValueError, ImportError) as error:
            raise SettingError(f"model={self.model!r} cannot be created for {self.data}: {error}") from error


def arguments_of(model: str) -> set[str]:
    """The arguments of a model that may be settings: those that are plain values and do not follow from the data."""
    names = {*inspect.signature(MODELS[model]).parameters}
    if "options" in names:
        names |= {*inspect.signature(Options).parameters, "solver", "evaluations"}
    return names - {"block", "options", "indexed", "aux", "classes", "features", "dimensions", "vocabulary"}


def by_torchdeq(model: nn.Module, evaluations: int | None) -> nn.Module:
    """The model, whose equilibria are computed by torchdeq now, for comparison."""
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, RevDEQ):
                f: Any = layer.f
                setattr(parent, name, Anderson(f, evaluations=evaluations, max_steps=layer.max_steps, tol=layer.tol))
    return model


def configured(name: str, changes: Mapping[str, Any] | None = None) -> Preset:
    """A preset with some of its settings changed.

    Args:
        name: The name of the preset.
        changes: Settings of the model, of the data set or of the training, by name.

    Returns:
        The preset.

    Raises:
        SettingError: There is no such preset or setting, or its value is invalid.

    Example:
        >>> revdeq.training.configured("cifar10-tiny", {"lr": 1e-3}).training.lr
        0.001
    """
    if name not in PRESETS:
        raise SettingError(f"there is no preset {name!r}: there are {', '.join(PRESETS)}")
    return PRESETS[name].changed(changes or {})


def parsed(assignments: Iterable[str]) -> dict[str, Any]:
    """["max_steps=8", "tol=none"] as {"max_steps": 8, "tol": None}: numbers, tuples, true, false, none, or text."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise SettingError(f"--set {assignment}: it must be key=value")
        try:
            changes[key] = ast.literal_eval({"none": "None", "true": "True", "false": "False"}.get(text, text))
        except (ValueError, SyntaxError):
            changes[key] = text
    return changes


IMAGES = Training(lr=3e-4)
PUZZLES = Training(epochs=1000, schedule="cosine", warmup=100, clip=1.0)
CONV = {"beta": 0.8, "tol": 1e-6}


def _multi_scale(name: str, channels: Any, widths: Any, max_steps: Any, quoted: str) -> Preset:
    settings = {"channels": channels, "widths": widths, "max_steps": max_steps, **CONV}
    return Preset(name, "cifar10", "multi-scale", settings, IMAGES, quoted)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("cifar10-single", "cifar10", "single-scale", {"channels": 64, "width": 2, "max_steps": 4, **CONV},
               replace(IMAGES, lr=1e-3), "170K"),
        _multi_scale("cifar10-170k", (32, 32, 32, 32), (1, 2, 2, 1), (1, 4, 4, 1), "170K"),
        _multi_scale("cifar10-5m", (64, 128, 128, 256), (2, 4, 4, 2), (1, 4, 4, 1), "5M"),
        _multi_scale("cifar10-10m", (128, 256, 256, 128), (1, 3, 3, 1), (4, 4, 4, 4), "10M"),
        Preset(
            "wikitext103-94m", "wikitext-103", "language",
            {"d": 1024, "heads": 8, "length": 512, "dropout": 0.1, "max_steps": 6, "beta": 0.5, "tol": 1e-3},
            Training(epochs=40, batch=32, weight_decay=0.1, schedule="cosine", warmup=4000, save_every=1000), "94M",
        ),
        # For two cores: seconds per epoch of 5,000 images, and minutes per epoch of WikiText-2.
        Preset(
            "cifar10-tiny", "cifar10", "multi-scale",
            {"channels": (8, 16, 32, 64), "widths": (1, 1, 1, 1), "max_steps": (1, 2, 2, 1), "beta": 0.8},
            Training(epochs=30, lr=3e-3, schedule="cosine", warmup=50),
        ),
        Preset(
            "wikitext2-tiny", "wikitext-2", "language",
            {"d": 128, "heads": 4, "length": 64, "vocabulary": 8192, "dropout": 0.1, "wide_heads": False,
             "form": "pre-norm", "max_steps": 4, "beta": 0.8},
            Training(epochs=2, batch=32, lr=3e-3, weight_decay=0.1, schedule="cosine", warmup=100, clip=1.0,
                     evaluate_every=500),
        ),
        # Trained on small puzzles with random numbers of steps, to solve larger ones with more. A float64 state would
        # lose more than 100 bits at the largest N.
        Preset(
            "prefix-tiny", "prefix-sums", "puzzle",
            {"bits": 16, "channels": 48, "noise": 1.0, "max_steps": (5, 20), "beta": 0.8, "state": "exact"},
            replace(PUZZLES, lr=4e-3, updates=500, batch=32, evaluate_every=100),
        ),
        Preset(
            "maze-tiny", "mazes", "puzzle",
            {"cells": 4, "longest_of": 8, "channels": 32, "max_steps": (6, 18), "beta": 0.8, "state": "exact"},
            replace(PUZZLES, lr=3e-3, updates=2000, batch=16, evaluate_every=500),
        ),
    )
}  # fmt: skip
"""The presets by name."""
