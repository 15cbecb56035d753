"""Command line: `python -m revdeq demo`, `python -m revdeq doctor`.

A command is a function that adds its options to a parser and returns what to run with them; its docstring is its
help. What a command needs is imported when it runs.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[[argparse.Namespace], int]


def demo(parser: argparse.ArgumentParser) -> Run:
    """train a small image model three ways and compare (under two minutes)"""
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="where to write the plot (default: %(default)s)"
    )

    def run(arguments: argparse.Namespace) -> int:
        out = arguments.out
        if out.suffix != ".png" or not os.access(out.resolve().parent, os.W_OK):
            parser.error(f"--out {out}: it must end in .png, in a folder that exists and can be written to")
        if missing := [name for name in ("matplotlib", "sklearn", "tqdm") if importlib.util.find_spec(name) is None]:
            print(f"The demo needs {', '.join(missing)}: pip install 'revdeq[demo]'", file=sys.stderr)
            return 1
        from . import demo

        demo.run(out)
        return 0

    return run


def doctor(parser: argparse.ArgumentParser) -> Run:
    """what this machine will use and why, and whether it computes right (ten seconds)"""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def run(arguments: argparse.Namespace) -> int:
        from . import doctor

        return doctor.run(as_json=arguments.json)

    return run


COMMANDS = (demo, doctor)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m revdeq", description="Reversible deep equilibrium models.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        its_parser = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        its_parser.set_defaults(run=command(its_parser))
    arguments = parser.parse_args()
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
