"""Command line: `python -m revdeq demo`, `doctor`, `train`, `evaluate`."""

import argparse
import importlib
import sys

COMMANDS = {
    "demo": "what depth costs and what it is good for, measured and trained in a minute",
    "doctor": "which kernels run on this machine, whether they are right, and what to do if not",
    "train": "train a preset: the paper's, or a small one for a CPU; works under torchrun",
    "evaluate": "the accuracy or the perplexity of a trained model, or the share of puzzles that it solves",
}
"""Each is a module of revdeq.cli, which is imported when it runs: their requirements differ."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m revdeq", description="Reversible deep equilibrium models.")
    commands = parser.add_subparsers(dest="command")
    parsers = {name: commands.add_parser(name, help=text, description=text) for name, text in COMMANDS.items()}
    try:
        if sys.argv[1:] and (name := sys.argv[1]) in COMMANDS:
            command = importlib.import_module(f"revdeq.cli.{name}")
            command.add_options(parsers[name])
        arguments = parser.parse_args(sys.argv[1:] or ["--help"])
        return command.run(arguments)
    except ModuleNotFoundError as error:
        print(f"{error}: pip install matplotlib scikit-learn tqdm", file=sys.stderr)
    except ImportError as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("\nInterrupted. A training continues with --resume.", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
