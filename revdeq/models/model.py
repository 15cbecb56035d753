"""Base class of all models: sharing of weights, settings and a model card by huggingface_hub's mixin."""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from .._solver.layer import RevDEQ
from .._solver.options import Exact
from .blocks import name_of

DATA = "data.safetensors"
COEFFICIENTS = ("beta", "gamma")
"""Settings that are part of the weights of a tuned layer."""
KIND = "kind"
"""The key of the class name in the configuration."""
NEEDED = "needs huggingface_hub and safetensors: pip install huggingface_hub safetensors"
CARD = """\
---
{{ card_data }}
---

# {{ title }}

{{ nature }} ({{ paper_url }}), made with revdeq for PyTorch and its extra `hub`.

    import revdeq

    model = revdeq.models.{{ kind }}.from_pretrained("{{ address }}")
{% if results %}
{{ results }}
{% endif %}
| setting | value |
|---|---|
{{ settings }}
"""

UNREADABLE: tuple[type[Exception], ...] = (OSError, json.JSONDecodeError, UnicodeDecodeError)
"""Raised for a damaged folder, or for a name that is not on the Hub."""
if TYPE_CHECKING:
    from huggingface_hub import PyTorchModelHubMixin as Mixin
else:
    try:
        import safetensors.torch
        from huggingface_hub import PyTorchModelHubMixin as Mixin
        from huggingface_hub.errors import HFValidationError

        UNREADABLE = (*UNREADABLE, HFValidationError, safetensors.SafetensorError)
    except ImportError:

        class Mixin:
            """Raises when it is used without huggingface_hub."""

            def __init_subclass__(cls, **_: Any) -> None:
                super().__init_subclass__()

            def save_pretrained(self, *_: Any, **__: Any) -> None:
                raise ImportError(f"save_pretrained {NEEDED}")

            @classmethod
            def from_pretrained(cls, *_: Any, **__: Any) -> None:
                raise ImportError(f"from_pretrained {NEEDED}")

            def push_to_hub(self, *_: Any, **__: Any) -> None:
                raise ImportError(f"push_to_hub {NEEDED}")


class Model(
    Mixin,
    nn.Module,
    library_name="revdeq",
    paper_url="https://arxiv.org/abs/2509.12917",
    tags=["deep-equilibrium-model"],
    model_card_template=CARD,
):
    """A model with `save_pretrained`, `from_pretrained` and `push_to_hub`."""

    trained: Mapping[str, Any] | None = None
    """The entries of its checkpoint other than the weights, if it was loaded from one: "preset", "update", "metric",
    "shapes" and "data"."""

    def __init_subclass__(cls, **more: Any) -> None:
        # A block is code and is not shared. Its name is, for the error message of from_pretrained.
        names = {kind: (name_of, lambda name: name) for kind in (type, FunctionType)}
        super().__init_subclass__(**{"coders": names, **more})

    def save_pretrained(self, save_directory: Any, *, config: Any = None, **more: Any) -> Any:
        if (Path(save_directory) / "last.pt").exists():
            raise ValueError(
                f"save_directory = {str(save_directory)!r} is the folder of a run, whose config.json would be "
                f"overwritten: "
                "choose another folder"
            )
        if config is None:
            config = {**self._settings(), KIND: type(self).__name__}
            if self.trained is not None:
                tensors = {"data": DATA} if "data" in self.trained else {}
                config["trained"] = {**self.trained, **tensors}
        return super().save_pretrained(save_directory, config=config, **more)

    def _settings(self) -> dict[str, Any]:
        """Its constructor arguments, with the current coefficients."""
        return {**(getattr(self, "_hub_mixin_config", None) or {}), **coefficients(self)}

    def push_to_hub(self, repo_id: str, *, model_card_kwargs: Any = None, **more: Any) -> Any:
        card = {"address": repo_id, **(model_card_kwargs or {})}
        return super().push_to_hub(repo_id, model_card_kwargs=card, **more)

    def _save_pretrained(self, save_directory: Path) -> None:
        super()._save_pretrained(save_directory)
        if self.trained is not None and "data" in self.trained:
            import safetensors.torch

            safetensors.torch.save_file(dict(self.trained["data"]), save_directory / DATA)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **more: Any) -> Any:
        name = pretrained_model_name_or_path
        folder = Path(name) if Path(name).is_dir() else None
        try:
            if folder is not None and not (folder / "config.json").is_file():  # the mixin would ignore it
                raise FileNotFoundError("there is no config.json in it")
            return super().from_pretrained(name, asked=more, **more)
        except UNREADABLE as error:
            if folder is not None:
                raise ValueError(f"{name} is not a model that save_pretrained wrote: {error}") from error
            raise OSError(f"there is no folder {name}, and it cannot be read from the Hub: {error}") from error

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, asked: Any = None, config: Any = None, strict: bool = True, **more: Any
    ) -> Any:
        """asked: the settings that the user overrides; `more` has the whole configuration."""
        config = dict(config or {})
        trained, kind = config.pop("trained", None), config.pop(KIND, cls.__name__)
        if kind not in [each.__name__ for each in cls.__mro__]:
            raise ValueError(f"{model_id} contains a {kind}, not a {cls.__name__}: use {kind}.from_pretrained")
        more = {key: value for key, value in more.items() if key not in ("config", "trained", KIND)}
        asked = asked or {}
        if isinstance(more.get("block"), str) and "block" not in asked:
            raise TypeError(
                f"{model_id} was saved with block={more['block']!r}, and code is not shared: pass the class, "
                f"from_pretrained({model_id!r}, block={more['block'].rpartition(':')[2]})"
            )
        if isinstance(more.get("state"), dict):
            more["state"] = Exact(**more["state"])
        # Coefficients that differ by layer are not constructor arguments.
        of_layers = {name: more.pop(name) for name in COEFFICIENTS if isinstance(more.get(name), list)}
        with contextlib.redirect_stdout(sys.stderr):  # the mixin prints where it looks
            model = super()._from_pretrained(model_id=model_id, strict=strict, **more)
        use(model, of_layers)
        used = use(model, asked)
        if trained is not None:
            now = json.loads(json.dumps(model._hub_mixin_config))
            changed = {key: value for key, value in now.items() if key in asked and config.get(key) != value} | used
            if "data" in trained:
                trained["data"] = _tensors(model_id, more)
            model.trained = as_changed(trained, changed)
        return model

    def generate_model_card(self, *args: Any, **more: Any) -> Any:
        trained = self.trained or {}
        preset = trained.get("preset") or {}
        config = self._settings()
        nature = "A reversible deep equilibrium model"
        if not hasattr(self, "equilibria"):
            nature = "An explicit model, for comparison with reversible deep equilibrium models"
        named = {
            "title": preset.get("name") or type(self).__name__,
            "nature": nature,
            "kind": type(self).__name__,
            "address": "USER/NAME",
            "results": _results(trained, preset),
            "settings": "\n".join(f"| {key} | {value} |" for key, value in sorted(config.items()) if value is not None),
        }
        return super().generate_model_card(*args, **{**named, **more})


def coefficients(model: nn.Module) -> dict[str, Any]:
    """The current beta and gamma: one number each, or a list if they differ by layer."""
    layers = [m for m in model.modules() if isinstance(m, RevDEQ)]
    found = {name: [getattr(layer, name) for layer in layers] for name in COEFFICIENTS if layers}
    return {name: values if len({*values}) > 1 else values[0] for name, values in found.items()}


def use(model: nn.Module, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Set the given coefficients, after the weights, which may include others, are loaded. Returns those that
    changed."""
    before = coefficients(model)
    layers = [m for m in model.modules() if isinstance(m, RevDEQ)]
    for name in before.keys() & asked.keys():
        values = asked[name] if isinstance(asked[name], (list, tuple)) else [asked[name]] * len(layers)
        for layer, value in zip(layers, values, strict=True):
            if getattr(layer, name) != value:
                layer.schedule = None  # it would take precedence
            setattr(layer, name, value)
    return {name: value for name, value in coefficients(model).items() if value != before[name]}


def as_changed(trained: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint entries of a model after its settings changed: without the metric."""
    if not changed:
        return dict(trained)
    preset = trained["preset"]
    kept = {key: value for key, value in trained.items() if key not in ("metric", "metric_name", "split")}
    return {**kept, "preset": {**preset, "settings": {**preset["settings"], **changed}}}


def _results(trained: Mapping[str, Any], preset: Mapping[str, Any]) -> str:
    if not trained:
        return ""
    text = f"Trained for {trained['update']:,} updates on {preset['data']} (preset {preset['name']})"
    if "metric" not in trained or "metric_name" not in trained:
        return f"{text}; no evaluation with these settings is known."
    batches = preset["training"].get("evaluation_batches")
    part = f"the first {batches} batches of " if batches else ""
    return f"{text}: {trained['metric_name']} {trained['metric']:.4g} on {part}the split {trained['split']!r}."


def _tensors(model_id: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the data set, such as a vocabulary, from a local folder or from the Hub."""
    import huggingface_hub
    import safetensors.torch

    path = Path(model_id) / DATA
    if not Path(model_id).is_dir():
        names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        path = Path(huggingface_hub.hf_hub_download(model_id, DATA, **{name: more[name] for name in names}))
    return safetensors.torch.load_file(path)
