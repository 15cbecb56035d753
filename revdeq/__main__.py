"""Command line: `python -m revdeq demo`, `doctor`, `train`, `evaluate`."""

import argparse
import importlib
import sys

from .cli.commands import evaluate, train


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m revdeq", description="Reversible deep equilibrium models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="what depth costs and what it is good for, measured and trained in a minute")
    commands.add_parser("doctor", help="which kernels run on this machine, and whether they are right")
    for command in (train, evaluate):
        its_parser = commands.add_parser(command.__name__, help=command.__doc__, description=command.__doc__)
        its_parser.set_defaults(run=command(its_parser))
    arguments = parser.parse_args()
    try:
        if arguments.command in ("demo", "doctor"):
            arguments.run = importlib.import_module(f"revdeq.cli.{arguments.command}").run
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        print(f"{error}: pip install matplotlib numpy pillow scikit-learn tiktoken tqdm", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
