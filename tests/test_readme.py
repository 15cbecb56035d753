"""The README: its example runs as printed."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert re.fullmatch(r"16 evaluations of f, change (\d\.\d+e-0\d|0\.0\d+)\n", capsys.readouterr().out)
