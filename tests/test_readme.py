"""The README: its examples run as printed."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_of_the_readme_run_in_order(capsys):
    names = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)), names)
    assert re.fullmatch(r"16 evaluations of f, change (\d\.\d+e-0\d|0\.0\d+)\n", capsys.readouterr().out)
    assert torch.equal(names["read"], names["y"].float())
