"""Command line: `python -m revdeq demo`."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m revdeq", description="Reversible deep equilibrium models.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small image model three ways and compare (under two minutes)")
    demo.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="where to write the plot (default: %(default)s)"
    )
    arguments = parser.parse_args()

    from . import demo as demonstration

    try:
        demonstration.run(arguments.out)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("revdeq", "torch"):
            raise
        print(f"The demo needs {error.name}: pip install 'revdeq[demo]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
