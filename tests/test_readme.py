"""The README: its example runs as printed, and its numbers were measured."""

import re
from pathlib import Path

import pytest
from readme import PAGES, RESULTS, Numbers, filled

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert re.fullmatch(r"16 evaluations of f, change (\d\.\d+e-0\d|0\.0\d+)\n", capsys.readouterr().out)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_numbers_are_those_that_were_measured(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text, Numbers(RESULTS)) == text, "run python bench/readme.py"
