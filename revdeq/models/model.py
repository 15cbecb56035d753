"""What every model has: weights, settings and a card that can be shared, by the mixin of huggingface_hub."""

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
"""Settings that the weights of a tuned layer bring with them."""
KIND = "kind"
"""Where the configuration has the name of the class."""
NEEDED = "needs huggingface_hub and safetensors: pip install 'revdeq[hub]'"
CARD = """\
---
{{ card_data }}
---

# {{ title }}

{{ nature }} ({{ paper_url }}), made with revdeq (`pip install 'revdeq[hub]'`).

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
"""Of a folder that is damaged, or of a name that the Hub does not have."""
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
            """In place of the one that is not installed: it says so when it is used, and not before."""

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
    """A model that `save_pretrained`, `from_pretrained` and `push_to_hub` share, with the keywords it was made with."""

    trained: Mapping[str, Any] | None = None
    """What a checkpoint holds beside the weights, where the model comes from one: "preset", "update", "metric",
    "shapes" and "data"."""

    def __init_subclass__(cls, **more: Any) -> None:
        # A block is code, which is not shared: its name is, so that a reader knows what to pass.
        names = {kind: (name_of, lambda name: name) for kind in (type, FunctionType)}
        super().__init_subclass__(**{"coders": names, **more})

    def save_pretrained(self, save_directory: Any, *, config: Any = None, **more: Any) -> Any:
        if (Path(save_directory) / "last.pt").exists():
            raise ValueError(
                f"save_directory = {str(save_directory)!r} is the folder of a run, whose config.json would be lost: "
                "choose another"
            )
        if config is None:
            config = {**self._settings(), KIND: type(self).__name__}
            if self.trained is not None:
                tensors = {"data": DATA} if "data" in self.trained else {}
                config["trained"] = {**self.trained, **tensors}
        return super().save_pretrained(save_directory, config=config, **more)

    def _settings(self) -> dict[str, Any]:
        """The keywords it was made with, and the coefficients in use, which may have been tuned since."""
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
            if folder is not None and not (folder / "config.json").is_file():  # the mixin would go on without
                raise FileNotFoundError("there is no config.json in it")
            return super().from_pretrained(name, asked=more, **more)
        except UNREADABLE as error:
            if folder is not None:
                raise ValueError(f"{name} cannot be read as a model that save_pretrained wrote: {error}") from error
            raise OSError(f"there is no folder {name}, and it cannot be read from the Hub: {error}") from error

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, asked: Any = None, config: Any = None, strict: bool = True, **more: Any
    ) -> Any:
        """asked: what the user changes, which `more` has beside all else in the configuration."""
        config = dict(config or {})
        trained, kind = config.pop("trained", None), config.pop(KIND, cls.__name__)
        if kind not in [each.__name__ for each in cls.__mro__]:
            raise ValueError(f"{model_id} holds a {kind}, not a {cls.__name__}: use {kind}.from_pretrained")
        more = {key: value for key, value in more.items() if key not in ("config", "trained", KIND)}
        asked = asked or {}
        if isinstance(more.get("block"), str) and "block" not in asked:
            raise TypeError(
                f"{model_id} was saved with block={more['block']!r}, which is code, and no file holds code: pass the "
                f"class, from_pretrained({model_id!r}, block={more['block'].rpartition(':')[2]})"
            )
        if isinstance(more.get("state"), dict):
            more["state"] = Exact(**more["state"])
        # A layer's own are no keywords of a model, which has one for all.
        of_layers = {name: more.pop(name) for name in COEFFICIENTS if isinstance(more.get(name), list)}
        with contextlib.redirect_stdout(sys.stderr):  # the mixin says where it looks
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
            nature = "An explicit model, to compare with reversible deep equilibrium models"
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
    """beta and gamma as they are in use: a number, or one for each layer where they differ."""
    layers = [m for m in model.modules() if isinstance(m, RevDEQ)]
    found = {name: [getattr(layer, name) for layer in layers] for name in COEFFICIENTS if layers}
    return {name: values if len({*values}) > 1 else values[0] for name, values in found.items()}


def use(model: nn.Module, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Set the coefficients that are asked for, once the weights are there, which may have brought others. Those that
    are now others."""
    before = coefficients(model)
    layers = [m for m in model.modules() if isinstance(m, RevDEQ)]
    for name in before.keys() & asked.keys():
        values = asked[name] if isinstance(asked[name], (list, tuple)) else [asked[name]] * len(layers)
        for layer, value in zip(layers, values, strict=True):
            if getattr(layer, name) != value:
                layer.schedule = None  # which would hide it
            setattr(layer, name, value)
    return {name: value for name, value in coefficients(model).items() if value != before[name]}


def as_changed(trained: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a model after its settings changed: what it was trained by, but not how good it is."""
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
    """What belongs to the data, from the file beside the weights, here or on the Hub."""
    import huggingface_hub
    import safetensors.torch

    path = Path(model_id) / DATA
    if not Path(model_id).is_dir():
        names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        path = Path(huggingface_hub.hf_hub_download(model_id, DATA, **{name: more[name] for name in names}))
    return safetensors.torch.load_file(path)
