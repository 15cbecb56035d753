"""The README's example runs as printed."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.startswith("16 evaluations of f, residual 0.0")
