"""Programs to copy from: `python -m revdeq.examples` lists them."""

import importlib.util

from ..cli.output import installing

PACKAGES = ("sklearn", "torchdeq")
"""The modules that examples need besides torch."""


def needs(*packages: str) -> None:
    """Exit with a message if one of these packages is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"This example needs {', '.join(missing)}: {installing(missing)}")
