"""The README: its example runs as printed, and its numbers were measured."""

import re
from pathlib import Path

from readme import RESULTS, Numbers, filled

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.startswith("16 evaluations of f, residual 0.0")


def test_the_numbers_are_those_that_were_measured():
    text = README.read_text(encoding="utf-8")
    assert filled(text, Numbers(RESULTS)) == text, "run python bench/readme.py"
