"""What every model has: weights, settings and a card that can be shared, by the mixin of huggingface_hub."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from .._solver.options import Exact
from .blocks import name_of

NEEDED = "needs huggingface_hub and safetensors: pip install 'revdeq[hub]'"
CARD = """\
---
{{ card_data }}
---

# {{ title }}

A reversible deep equilibrium model ({{ paper_url }}), or an explicit one to compare with, of revdeq
(`pip install 'revdeq[hub]'`).

    import revdeq

    model = revdeq.models.{{ kind }}.from_pretrained("{{ address }}")
{% if results %}
{{ results }}
{% endif %}
| setting | value |
|---|---|
{{ settings }}
"""

if TYPE_CHECKING:
    from huggingface_hub import PyTorchModelHubMixin as Mixin
else:
    try:
        import safetensors.torch  # noqa: F401
        from huggingface_hub import PyTorchModelHubMixin as Mixin
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
            config = dict(getattr(self, "_hub_mixin_config", None) or {})
            if self.trained is not None:
                config["trained"] = {key: value for key, value in self.trained.items() if key != "data"}
        return super().save_pretrained(save_directory, config=config, **more)

    def push_to_hub(self, repo_id: str, *, model_card_kwargs: Any = None, **more: Any) -> Any:
        card = {"address": repo_id, **(model_card_kwargs or {})}
        return super().push_to_hub(repo_id, model_card_kwargs=card, **more)

    def _save_pretrained(self, save_directory: Path) -> None:
        super()._save_pretrained(save_directory)
        if self.trained is not None and self.trained.get("data"):
            import safetensors.torch

            safetensors.torch.save_file(dict(self.trained["data"]), save_directory / "data.safetensors")

    @classmethod
    def _from_pretrained(cls, *, model_id: str, config: Any = None, strict: bool = True, **more: Any) -> Any:
        trained = (config or {}).get("trained")
        more = {key: value for key, value in more.items() if key not in ("config", "trained")}
        if isinstance(more.get("state"), dict):
            more["state"] = Exact(**more["state"])
        with contextlib.redirect_stdout(sys.stderr):  # the mixin says where it looks
            model = super()._from_pretrained(model_id=model_id, strict=strict, **more)
        model.trained = trained
        return model

    def generate_model_card(self, *args: Any, **more: Any) -> Any:
        trained = self.trained or {}
        preset = trained.get("preset") or {}
        config = getattr(self, "_hub_mixin_config", None) or {}
        results = ""
        if "metric" in trained and "metric_name" in trained:
            results = (
                f"Trained for {trained['update']:,} updates on {preset.get('data')} (preset {preset.get('name')}): "
                f"{trained['metric_name']} {trained['metric']:.4g} on the split {trained['split']!r}."
            )
        named = {
            "title": preset.get("name") or type(self).__name__,
            "kind": type(self).__name__,
            "address": "USER/NAME",
            "results": results,
            "settings": "\n".join(f"| {key} | {value} |" for key, value in sorted(config.items())),
        }
        return super().generate_model_card(*args, **{**named, **more})
