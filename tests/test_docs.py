"""Docstrings name their arguments, examples run, and links lead somewhere."""

import doctest
import importlib
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from sample_data import write_cifar, write_encoding, write_wikitext
from torch import nn

import revdeq

pytest.importorskip("torchdeq", reason="torchdeq is not installed")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = ("revdeq", "revdeq.kernels", "revdeq.baselines", "revdeq.models", "revdeq.training", "revdeq.training.data")


def every():
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing):
                yield pytest.param(thing, id=f"{module.__name__}.{name}")
            for method, value in vars(thing).items() if isinstance(thing, type) else ():
                if inspect.isfunction(value) and value.__doc__ and not method.startswith("_"):
                    yield pytest.param(value, id=f"{module.__name__}.{name}.{method}")


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What examples may use, in a folder with small data sets in `data`."""

    class Block(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, z, x):
            return torch.tanh(self.linear(z) + x)

    for write in (write_cifar, write_wikitext, write_encoding):
        write(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tensors = {"x": torch.randn(4, 8), "z0": torch.zeros(4, 8)}
    return {"torch": torch, "nn": nn, "Path": Path, "revdeq": revdeq, "Block": Block, "f": Block(), **tensors}


@pytest.mark.parametrize("thing", list(every()))
def test_docstrings_name_every_argument_and_their_examples_run(thing, names):
    text, said = inspect.getdoc(thing) or "", []
    taken = inspect.signature(thing).parameters.values() if "Args:" in text else ()
    named = [p.name for p in taken if p.name != "self" and p.kind != p.VAR_KEYWORD]
    assert text and [name for name in named if not re.search(rf"\b{name}\b", text)] == []
    test = doctest.DocTestParser().get_doctest(text, names, thing.__qualname__, None, None)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize(("beta", "steps"), [(0.5, 10), (0.8, 5), (1.25, 5), (0.9, 3), (1.5, 6)])
def test_a_float64_state_is_exact_while_32_bits_are_lost_at_worst(beta, steps):
    assert 2 * steps * math.log2((1 + beta) / abs(1 - beta)) <= 32
    f, x = revdeq.models.ConvBlock(16), torch.randn(2, 16, 4, 4)
    assert revdeq.verify(f, torch.zeros_like(x), x, beta=beta, max_steps=steps).exact


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_in_order(page, names):
    exec("\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_pictures_of_a_page_exist(page):
    found = re.findall(r'(?:\]\(|src="|srcset=")([^)#:">]+)[)#"]', page.read_text(encoding="utf-8"))
    assert [target for target in found if not (page.parent / target).exists()] == []
