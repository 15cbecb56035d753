"""`python -m revdeq train PRESET`."""

import contextlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from .. import ReconstructionError, training
from ..training import checkpoint, data
from ..training.presets import PRESETS, SettingError, parsed


def add_options(parser: ArgumentParser) -> None:
    paper, small = ([p.name for p in PRESETS.values() if bool(p.quoted) == is_papers] for is_papers in (True, False))
    parser.add_argument("preset", help=f"the paper's, for GPUs: {', '.join(paper)}; for CPUs: {', '.join(small)}")
    add_common_options(parser, "change a setting; an unknown one, --set x=0, lists them all")
    parser.add_argument("--out", type=Path, metavar="RUN", help="the folder of the run (default: runs/PRESET)")
    parser.add_argument("--resume", action="store_true", help="continue the run, with its settings")


def add_common_options(parser: ArgumentParser, setting: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with the files of the data set")
    parser.add_argument("--download", action="store_true", help="download the data set into DIR if it is not there")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")


def run(arguments: Namespace) -> int:
    with explained():
        out, preset = arguments.out or Path("runs") / arguments.preset, training.configured(arguments.preset)
        if arguments.resume and (out / "last.pt").exists():
            saved = checkpoint.load(out / "last.pt")
            if saved["preset"]["name"] == preset.name:
                preset = checkpoint.preset_of(saved)
                arguments.data = arguments.data or (saved["folder"] and Path(saved["folder"]))
        preset = preset.changed(parsed(arguments.set))
        download(arguments, preset.data)
        training.train(preset, arguments.data, out, arguments.resume, arguments.device)
    return 0


def download(arguments: Namespace, name: str) -> None:
    sources = data.DATASETS[name].sources
    if arguments.download and sources:
        if arguments.data is None:
            raise SettingError("--download: pass the folder to download to, --data DIR")
        data.download(sources, arguments.data)


ERRORS = (OSError, SettingError, data.DataError, training.CheckpointError, training.Diverged, ReconstructionError)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Context manager: what a user can mend is a message, and the exit code 1."""
    try:
        yield
    except ERRORS as error:
        sys.exit(str(error))
