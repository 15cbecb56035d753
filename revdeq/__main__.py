"""Command line: `python -m revdeq demo`, `train`, `evaluate`, `generate`."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from .commands import evaluate, generate, train


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m revdeq", description="Reversible deep equilibrium models.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small image model three ways and compare (under two minutes)")
    demo.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="where to write the plot (default: %(default)s)"
    )
    for command in (train, evaluate, generate):
        its_parser = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        its_parser.set_defaults(run=command(its_parser))
    arguments = parser.parse_args()
    if arguments.command != "demo":
        return arguments.run(arguments)

    folder = arguments.out.resolve().parent
    if arguments.out.suffix != ".png" or not os.access(folder, os.W_OK):
        demo.error(f"--out {arguments.out}: it must end in .png, in a folder that exists and can be written to")
    if missing := [name for name in ("matplotlib", "sklearn", "tqdm") if importlib.util.find_spec(name) is None]:
        print(f"The demo needs {', '.join(missing)}: pip install 'revdeq[demo]'", file=sys.stderr)
        return 1

    from . import demo as demonstration

    try:
        demonstration.run(arguments.out)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
