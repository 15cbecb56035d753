"""Presets: the experiments of the paper, and small ones for a CPU.

A preset is plain data, saved in the folder of a run and in its checkpoints. `--set key=value` changes an argument of
the model or of the data set, or a field of `Training`.
"""

import ast
import dataclasses
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from torch import nn

from .._solver.options import Exact
from ..models import MODELS
from ..models.blocks import name_of
from ..models.equilibrium import OPTIONS

SCHEDULES = ("plateau", "cosine", "constant")
SHORT = {"steps": "max_steps"}
"""Aliases of settings; `steps` is from version 0.1.0."""
MEANT = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "num_epochs": "epochs",
    "iterations": "updates",
    "num_steps": "updates",
    "steps": "updates",
    "grad_clip": "clip",
    "gradient_accumulation_steps": "accumulate",
    "wd": "weight_decay",
    "warmup_steps": "warmup",
    "eval_every": "evaluate_every",
    "amp": "autocast",
    "precision": "autocast",
}
"""Names from other libraries, to suggest ours."""
OF_INPUTS = {"features", "dimensions", "vocabulary"}
"""Arguments of models that follow from the data."""
AUTOCAST = (None, "bfloat16", "float16")
TUNED = ("pair", "schedule")


class SettingError(ValueError):
    """A preset or setting does not exist, or its value is invalid."""


@dataclass(frozen=True)
class Training:
    """Training settings.

    Args:
        epochs: The maximum number of passes through the data.
        updates: The maximum number of updates; None is as many as the epochs have.
        batch: The number of examples (images or sequences) per update, over all processes.
        accumulate: The number of parts into which a process splits its share of the batch, to save memory. Gradients
            are accumulated; BatchNorm, if the model has any, sees one part at a time.
        lr: The learning rate of AdamW: initial (plateau, constant) or peak (cosine).
        weight_decay: Of AdamW.
        schedule: "plateau" halves lr when the mean loss of 200 updates has not improved 10 times in a row, and stops
            the training below 1e-6; "cosine" warms up linearly for `warmup` updates and decays to 0; "constant".
        warmup: The number of warm-up updates.
        clip: The maximum norm of the gradient; None disables clipping.
        autocast: None, "bfloat16" or "float16" (with a scaled loss).
        compile: Whether to compile f.
        seed: For the initial parameters, the order of the data, augmentation and dropout.
        evaluation_batches: The number of batches of a split to evaluate on; None uses all.
        log_every: The number of updates between rows of metrics; each row has their mean loss.
        evaluate_every: The number of updates between evaluations; None is an epoch.
        save_every: The number of updates between checkpoints; every evaluation saves one, too.
        tune_every: The number of updates between calls of `revdeq.tune`, on the next batch; None never tunes.
        tune: "pair" tunes one beta and gamma, "schedule" a pair for every half-step.

    Raises:
        SettingError: A value is invalid.

    Example:
        >>> revdeq.training.Training(epochs=2, lr=3e-3, schedule="cosine", warmup=100).batch
        64
    """

    epochs: int = 100
    updates: int | None = None
    batch: int = 64
    accumulate: int = 1
    lr: float = 1e-3
    weight_decay: float = 1e-4
    schedule: str = "plateau"
    warmup: int = 0
    clip: float | None = None
    autocast: str | None = None
    compile: bool = False
    seed: int = 0
    evaluation_batches: int | None = None
    log_every: int = 20
    evaluate_every: int | None = None
    save_every: int = 200
    tune_every: int | None = None
    tune: str = "pair"

    def __post_init__(self) -> None:
        for name, values in (("schedule", SCHEDULES), ("autocast", AUTOCAST), ("tune", TUNED)):
            if getattr(self, name) not in values:
                raise SettingError(f"{name}={getattr(self, name)!r}: it must be one of {', '.join(map(str, values))}")
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            accepted = (kind | int) if kind in (float, float | None) else kind
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                kinds = getattr(kind, "__name__", str(kind).replace(" | None", " or none"))
                raise SettingError(f"{name}={value!r}: it must be {kinds}")
        for name in (
            "epochs",
            "updates",
            "batch",
            "accumulate",
            "lr",
            "clip",
            "evaluation_batches",
            "log_every",
            "tune_every",
            "evaluate_every",
            "save_every",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingError(f"{name}={value!r}: it must be larger than 0")
        for name in ("warmup", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SettingError(f"{name}={getattr(self, name)!r}: it must be 0 or larger")
        if self.seed >= 2**63:
            raise SettingError(f"seed={self.seed!r}: it must be below 2**63")


@dataclass(frozen=True)
class Preset:
    """A model, its data and its training settings.

    Args:
        name: The name of the preset.
        data: A name in `revdeq.training.data.DATASETS`.
        model: A name in `revdeq.models.MODELS`.
        settings: Arguments of the model and of the data set; a name that both have goes to both. max_steps may be a
            range: with (5, 20), each update samples its number of steps, and evaluations take 20. block is a class, or
            "module:Class", that returns the f of the model.
        training: The training settings.
        quoted: The number of parameters that the paper states.

    Example:
        >>> training = revdeq.training.Training(updates=100)
        >>> preset = revdeq.training.Preset("mine", "mazes", "puzzle", {"cells": 3, "channels": 16}, training)
        >>> revdeq.models.count_parameters(preset.build(features=3, dimensions=2))
        5426
    """

    name: str
    data: str
    model: str
    settings: Mapping[str, Any]
    training: Training
    quoted: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, for JSON and checkpoints.

        Returns:
            Plain values by name.
        """
        plain: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in self.settings.items()}
        if isinstance(plain.get("state"), Exact):
            plain["state"] = dataclasses.asdict(plain["state"])
        if plain.get("block") is not None:
            plain["block"] = name_of(plain["block"])
        return {**dataclasses.asdict(self), "settings": plain}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Preset":
        """Create a preset from the result of `to_dict`.

        Args:
            saved: The result of `to_dict`, possibly of an earlier version.

        Returns:
            The preset.
        """
        settings, training = renamed(saved["settings"]), dict(saved["training"])
        if "vocabulary" in training:  # version 0.1.0, which had no validation images
            if saved["data"] == "cifar10":
                settings["held_out"] = None
            elif training["vocabulary"] != "full":
                settings["vocabulary"] = training["vocabulary"]
            del training["vocabulary"]
        if isinstance(settings.get("state"), dict):
            settings["state"] = Exact(**settings["state"])
        own = {field.name: saved[field.name] for field in dataclasses.fields(cls) if field.name in saved}
        return cls(**{**own, "settings": settings, "training": Training(**training)})

    def flat(self) -> dict[str, Any]:
        """All settings of the model, the data set and the training in one dict.

        Returns:
            Plain values by name.
        """
        saved = self.to_dict()
        return {"preset": self.name, "model": self.model, **saved["settings"], **saved["training"]}

    @property
    def range_of_steps(self) -> tuple[int, int] | None:
        """The minimum and maximum number of steps, if max_steps is a range; otherwise None."""
        pair, scales = (
            value if isinstance(value, (tuple, list)) else ()
            for value in (self.settings.get("max_steps"), self.settings.get("channels"))
        )
        if len(pair) != 2 or len(scales) == 2:
            return None
        fewest, most = pair
        if not isinstance(fewest, int) or not isinstance(most, int) or not 1 <= fewest <= most:
            raise SettingError(f"max_steps={pair!r}: a range is two integers of at least 1 in ascending order")
        return fewest, most

    def changed(self, changes: Mapping[str, Any]) -> "Preset":
        """The preset with some of its settings changed.

        Args:
            changes: Settings of the model, of the data set or of the training, by name; "block" and "model" too.

        Returns:
            Another preset.

        Raises:
            SettingError: There is no such setting, or its value is invalid.
        """
        from .data import settings as settings_of_data  # needs NumPy, which `--help` does not

        changes, preset = renamed(changes), self
        of_data = settings_of_data(self.data)
        if (model := changes.pop("model", self.model)) != self.model:
            if model not in MODELS:
                raise SettingError(f"model={model!r}: there is no such model{nearest(str(model), MODELS)}")
            # Drop settings that the other model does not have, such as those of a solver.
            known = keywords(model) | of_data
            kept = {k: v for k, v in self.settings.items() if k in known}
            preset = dataclasses.replace(self, model=model, settings=kept, quoted=None)
        of_training = {f.name for f in dataclasses.fields(Training)}
        known = keywords(preset.model) | of_data
        for key in changes:
            if key not in known | of_training:
                every = sorted({*known, *of_training, "model"})
                meant = nearest(key, [*every, *SHORT])
                raise SettingError(f"{self.name} has no setting {key!r}{meant}: it has {', '.join(every)}")
        return dataclasses.replace(
            preset,
            settings={**preset.settings, **{k: v for k, v in changes.items() if k in known}},
            training=dataclasses.replace(self.training, **{k: v for k, v in changes.items() if k in of_training}),
        )

    def build(self, **shapes: Any) -> nn.Module:
        """Create the model.

        Args:
            shapes: Arguments of the model that follow from the data, `dataset.shapes`.

        Returns:
            A new model.

        Raises:
            SettingError: The model cannot be created with these settings.
        """
        if shapes and not fits(self.model, shapes):
            others = ", ".join(name for name in MODELS if fits(name, shapes))
            raise SettingError(f"model={self.model!r} cannot be trained on {self.data}: choose one of {others}")
        known = keywords(self.model)
        own = {key: value for key, value in self.settings.items() if key in known}
        if self.range_of_steps is not None:
            own["max_steps"] = self.range_of_steps[1]
        if isinstance(own.get("block"), str):
            own["block"] = imported(own["block"])
        try:
            return MODELS[self.model](**{**own, **shapes})
        except (TypeError, ValueError, ImportError) as error:
            raise SettingError(f"the model {self.model} cannot be created: {error}") from error


IMAGES = Training(epochs=100, batch=64, lr=3e-4, weight_decay=1e-4, schedule="plateau")
PUZZLES = Training(epochs=1000, schedule="cosine", warmup=100, clip=1.0)
BLOCKS = {"beta": 0.8, "tol": 1e-6}


def _multi_scale(name: str, channels: Any, widths: Any, max_steps: Any, quoted: str) -> Preset:
    settings = {"channels": channels, "widths": widths, "max_steps": max_steps, **BLOCKS}
    return Preset(name, "cifar10", "multi-scale", settings, IMAGES, quoted)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "cifar10-single",
            "cifar10",
            "single-scale",
            {"channels": 64, "width": 2, "max_steps": 4, **BLOCKS},
            dataclasses.replace(IMAGES, lr=1e-3),
            "170K",
        ),
        _multi_scale("cifar10-170k", (32, 32, 32, 32), (1, 2, 2, 1), (1, 4, 4, 1), "170K"),
        _multi_scale("cifar10-5m", (64, 128, 128, 256), (2, 4, 4, 2), (1, 4, 4, 1), "5M"),
        _multi_scale("cifar10-10m", (128, 256, 256, 128), (1, 3, 3, 1), (4, 4, 4, 4), "10M"),
        Preset(
            "wikitext103-94m",
            "wikitext-103",
            "language",
            {"d": 1024, "heads": 8, "length": 512, "dropout": 0.1, "max_steps": 6, "beta": 0.5, "tol": 1e-3},
            Training(epochs=40, batch=32, lr=1e-3, weight_decay=0.1, schedule="cosine", warmup=4000, save_every=1000),
            "94M",
        ),
        # For two cores: seconds per epoch of 5,000 images, and minutes per epoch of WikiText-2.
        Preset(
            "cifar10-tiny",
            "cifar10",
            "multi-scale",
            {"channels": (8, 16, 32, 64), "widths": (1, 1, 1, 1), "max_steps": (1, 2, 2, 1), "beta": 0.8},
            Training(epochs=30, batch=64, lr=3e-3, weight_decay=1e-4, schedule="cosine", warmup=50),
        ),
        Preset(
            "wikitext2-tiny",
            "wikitext-2",
            "language",
            {
                "d": 128,
                "heads": 4,
                "length": 64,
                "vocabulary": 8192,
                "dropout": 0.1,
                "wide_heads": False,
                "form": "pre-norm",
                "max_steps": 4,
                "beta": 0.8,
            },
            Training(
                epochs=2,
                batch=32,
                lr=3e-3,
                weight_decay=0.1,
                schedule="cosine",
                warmup=100,
                clip=1.0,
                evaluate_every=500,
            ),
        ),
        # Trained on small puzzles with random numbers of steps, to solve larger ones with more steps.
        Preset(
            "prefix-tiny",
            "prefix-sums",
            "puzzle",
            {"bits": 16, "channels": 48, "noise": 1.0, "max_steps": (5, 20), "beta": 0.8},
            dataclasses.replace(PUZZLES, lr=4e-3, updates=500, batch=32, evaluate_every=100),
        ),
        Preset(
            "maze-tiny",
            "mazes",
            "puzzle",
            {"cells": 4, "longest_of": 8, "channels": 32, "max_steps": (6, 18), "beta": 0.8},
            dataclasses.replace(PUZZLES, lr=3e-3, updates=2000, batch=16, evaluate_every=500),
        ),
    )
}
"""The presets by name. `python -m revdeq train --help` lists them."""


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
        raise SettingError(f"there is no preset {name!r}{nearest(name, PRESETS)}: there are {', '.join(PRESETS)}")
    return PRESETS[name].changed(changes or {})


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {SHORT.get(key, key): value for key, value in settings.items()}


def keywords(model: str) -> set[str]:
    """The arguments of the model's constructor that can be settings."""
    parameters = {*inspect.signature(MODELS[model]).parameters}
    of_inputs = OF_INPUTS - {"vocabulary"}  # also a setting of the data
    return (parameters | (OPTIONS if "options" in parameters else set())) - {"classes", "options"} - of_inputs


def fits(model: str, shapes: Mapping[str, Any]) -> bool:
    """Whether a model can read data with these shapes."""
    takes = inspect.signature(MODELS[model]).parameters.keys()
    return shapes.keys() <= takes and takes & OF_INPUTS == shapes.keys() & OF_INPUTS


def imported(name: str) -> Any:
    """Import "module:Class". This runs the module, so the name must come from the user."""
    module, colon, path = name.partition(":")
    if not colon or not module or not path or module.endswith(".py"):
        raise SettingError(
            f"block={name!r}: it must be module:Class, for example mine:Block for class Block in mine.py"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"block={name!r} cannot be imported: {error}. Run from the folder that contains {module}.py, or install it"
        ) from error
    return found


def nearest(name: str, names: Iterable[str]) -> str:
    names = list(names)
    close = [MEANT[name]] if MEANT.get(name) in names else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


EXACT = re.compile(r"(?:revdeq\.)?Exact\((?:fraction_bits=)?(\d+)\)")


def parsed(assignments: Iterable[str]) -> dict[str, Any]:
    """["steps=8", "tol=none"] as {"steps": 8, "tol": None}: numbers, tuples, true, false, none, Exact(20), or text."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise SettingError(f"--set {assignment}: it must be key=value")
        if match := EXACT.fullmatch(text):
            changes[key.strip()] = Exact(int(match[1]))
            continue
        try:
            changes[key.strip()] = ast.literal_eval({"none": "None", "true": "True", "false": "False"}.get(text, text))
        except (ValueError, SyntaxError):
            changes[key.strip()] = text
    return changes
