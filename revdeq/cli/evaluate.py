"""`python -m revdeq evaluate RUN`."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import training
from ..training import checkpoint
from ..training.presets import SettingError, parsed
from ..training.processes import Processes
from .train import add_common_options, download, explained


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a run, or a checkpoint in it")
    add_common_options(parser, "override a setting of the training, such as max_steps=80")
    parser.add_argument("--split", default="test", help="test (default) or valid")
    parser.add_argument("--batches", type=int, help="the number of batches to evaluate on (default: all)")


def run(arguments: Namespace) -> int:
    with explained():
        download(arguments, checkpoint.load(arguments.run_folder)["preset"]["data"])
        batches = {} if arguments.batches is None else {"evaluation_batches": arguments.batches}
        changes = batches | parsed(arguments.set)
        processes = Processes(arguments.device)
        found = training.restored(arguments.run_folder, arguments.data, changes, processes.device)
        preset, dataset = found.preset, found.dataset
        if arguments.split not in dataset.splits:
            raise SettingError(f"--split {arguments.split}: it must be {' or '.join(dataset.splits)}")
        with processes.connected():
            score = training.evaluate(found.model, dataset, arguments.split, preset.training, processes)
    line = f"{preset.name} at update {found.update:,}, {arguments.split}: {dataset.metric.name} {score.metric:.4f}, "
    line += f"loss {score.loss:.4f} ({score.targets:,} {dataset.unit})"
    if score.evaluations is not None:
        line += f", {score.evaluations:g} evaluations of f, change {score.change:.1e}"
    if processes.is_first:
        print(line)
    return 0
