"""Command line: `python -m revdeq demo`, `doctor`, `train`, `evaluate`, `generate`, `classify`."""

import argparse
import sys

from .cli.commands import COMMANDS
from .cli.output import while_it_is_read


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
    with while_it_is_read():
        sys.exit(main())
