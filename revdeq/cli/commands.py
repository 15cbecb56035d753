"""The commands of `python -m revdeq`.

A command is a function that adds its options to a parser and returns the function to run; its docstring is its help.
Modules that only one command needs are imported when it runs.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import installing

if TYPE_CHECKING:
    from ..training.presets import Preset

Run = Callable[[argparse.Namespace], int]
NEEDED = ("PIL", "matplotlib", "numpy", "tiktoken", "tqdm")


def demo(parser: argparse.ArgumentParser) -> Run:
    """the cost of training and the benefit of depth, as tables and a plot (four minutes)"""
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="where to write the plot (default: %(default)s)"
    )

    def run(arguments: argparse.Namespace) -> int:
        out = arguments.out
        if out.suffix != ".png" or not os.access(out.resolve().parent, os.W_OK):
            parser.error(f"--out {out}: it must end in .png, in a folder that exists and can be written to")
        if missing := [name for name in ("matplotlib", "sklearn", "tqdm") if importlib.util.find_spec(name) is None]:
            print(f"The demo needs {', '.join(missing)}: {installing(missing)}", file=sys.stderr)
            return 1
        import torch

        from . import demo

        torch.set_num_threads(1)  # its tensors are too small for threads to pay

        demo.run(out)
        return 0

    return run


def doctor(parser: argparse.ArgumentParser) -> Run:
    """which kernels this machine will use and why, and whether they compute correctly (ten seconds)"""
    parser.add_argument("--json", action="store_true", help="print a JSON object only")

    def run(arguments: argparse.Namespace) -> int:
        from . import doctor

        return doctor.run(as_json=arguments.json)

    return run


def train(parser: argparse.ArgumentParser) -> Run:
    """train a preset: the paper's, or a small one for a CPU, optionally with your own block; works under torchrun"""
    from ..training.presets import PRESETS

    quoted, others = ([p.name for p in PRESETS.values() if bool(p.quoted) == paper] for paper in (True, False))
    parser.add_argument(
        "preset", nargs="?", help=f"the paper's, for GPUs: {', '.join(quoted)}; for CPUs: {', '.join(others)}"
    )
    _data_options(parser)
    parser.add_argument("--out", type=Path, metavar="RUN", help="the run's folder (default: runs/PRESET)")
    _block_option(parser)
    _settings_option(parser, "change a setting; an unknown name, --set x=0, lists them all")
    parser.add_argument("--dry-run", action="store_true", help="only predict the memory and the time on GPUs")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue the run in this folder, or in that of --out, with its settings, or for more epochs or updates",
    )
    parser.add_argument("--log", choices=("tensorboard",), help="also write the metrics for TensorBoard, into RUN")

    def run(arguments: argparse.Namespace) -> int:
        from ..training import log
        from ..training.run import train

        preset, out = _chosen(arguments)
        if arguments.dry_run:
            from ..training import dry_run

            print(dry_run.report(preset))
            return 0
        _download(arguments, preset.data)
        callback = log.LOGS[arguments.log](out) if arguments.log else None
        resume = arguments.resume is not None
        train(preset, arguments.data, out, resume, arguments.device, callback=callback)
        return 0

    return _guarded(run)


def _chosen(arguments: argparse.Namespace) -> tuple["Preset", Path]:
    """The preset and the folder of a run, from the name of a preset or from the run to resume."""
    from ..models import MODELS
    from ..training import record
    from ..training.presets import PRESETS, Preset, SettingError, configured
    from ..training.restore import described

    name, out, resume, changes = arguments.preset, arguments.out, arguments.resume, _changes(arguments)
    if resume and name is None and not Path(resume).exists() and resume in PRESETS:
        name = resume  # `train --resume PRESET`
    elif resume and out is not None:
        raise SettingError(f"--resume {resume} --out {out}: pass one folder only")
    elif resume:
        out = Path(resume)
    if out is None and name is None:
        raise SettingError("pass the name of a preset, or --resume RUN with the folder of a run")
    out = out or Path("runs") / name
    before = record.read_config(out) if resume is not None else None
    if before is None and name is None:
        raise SettingError(f"--resume {out}: there is no run to resume, no {out / 'config.json'}")
    if before is None or name not in (None, before["name"]):
        return configured(name, changes), out
    if before["model"] not in MODELS:
        raise SettingError(
            f"{out} is a run of your own model, {before['model']}: continue with revdeq.train(..., resume=True)"
        )
    if arguments.data is None and before["folder"]:
        arguments.data = Path(before["folder"])
    return described(out, Preset.from_dict(before), changes), out


def evaluate(parser: argparse.ArgumentParser) -> Run:
    """the accuracy or perplexity of a trained model"""
    _model_option(parser)
    _data_options(parser)
    _block_option(parser)
    parser.add_argument("--split", default="test", help="test (default) or valid")
    parser.add_argument("--batches", type=int, help="the number of batches to evaluate on (default: all)")
    _settings_option(parser, "override a setting of the training, for example max_steps=80")

    def run(arguments: argparse.Namespace) -> int:
        from .. import training
        from ..training import checkpoint
        from ..training.presets import SettingError
        from ..training.processes import Processes

        if arguments.batches is not None and arguments.batches < 1:
            raise SettingError(f"--batches {arguments.batches}: it must be 1 or larger")
        if arguments.download:
            _download(arguments, checkpoint.load(arguments.run_folder)["preset"]["data"])
        processes = Processes(arguments.device)
        changes = {"evaluation_batches": None, **_changes(arguments)}
        if arguments.batches is not None:
            changes["evaluation_batches"] = arguments.batches
        trained = training.restored(arguments.run_folder, arguments.data, changes, processes.device)
        preset, dataset = trained.preset, trained.dataset
        if arguments.split not in dataset.splits:
            raise SettingError(f"--split {arguments.split}: it must be {' or '.join(dataset.splits)}")
        score = training.evaluate(trained.model, dataset, arguments.split, preset.training, processes)
        print(dataset.describe())
        line = f"{preset.name} at update {trained.update:,}, {arguments.split}: {dataset.metric.name} "
        line += f"{score.metric:.4f}, loss {score.loss:.4f} ({score.targets:,} {dataset.unit})"
        if score.evaluations is not None:
            line += f", {score.evaluations:g} evaluations of f, change {score.change:.1e}"
        print(line)
        return 0

    return _guarded(run)


def generate(parser: argparse.ArgumentParser) -> Run:
    """text from a trained language model"""
    _model_option(parser)
    parser.add_argument("--prompt", default="", help="the beginning of the text")
    parser.add_argument(
        "--batch",
        type=Path,
        metavar="FILE",
        help="a file with a prompt per line; prints a JSON string per line",
    )
    parser.add_argument("--tokens", type=int, default=100, help="how many to add (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens only")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the top tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="for sampling (default: %(default)s)")
    parser.add_argument(
        "--slide",
        type=int,
        default=1,
        metavar="S",
        help="by how many tokens a full window moves; more is faster (default: %(default)s)",
    )
    parser.add_argument(
        "--tol", type=float, metavar="T", help="stop each position at this relative change, such as 0.1"
    )
    parser.add_argument("--data", type=Path, help="the folder of GPT-2's encoding (default: that of the training)")
    _device_option(parser)
    _block_option(parser)
    _settings_option(parser, "override a setting of the training, for example max_steps=8")

    def run(arguments: argparse.Namespace) -> int:
        from ..training import generate
        from ..training.presets import SettingError

        prompts = [arguments.prompt]
        if arguments.batch is not None:
            if arguments.prompt:
                raise SettingError("--prompt and --batch: pass only one of them")
            try:
                with arguments.batch.open(encoding="utf-8") as file:
                    prompts = [line.rstrip("\n") for line in file]
            except (OSError, UnicodeDecodeError) as error:
                raise SettingError(f"--batch {arguments.batch} cannot be read: {error}") from error
        pieces = generate.generate(
            arguments.run_folder,
            arguments.data,
            prompts,
            arguments.tokens,
            arguments.temperature,
            arguments.seed,
            arguments.top_k,
            arguments.top_p,
            arguments.device,
            _changes(arguments),
            arguments.slide,
            arguments.tol,
        )
        begin, texts = time.perf_counter(), list(prompts)
        if arguments.batch is None:
            print(arguments.prompt, end="", flush=True)
        for added in pieces:
            if arguments.batch is None:
                print(added[0], end="", flush=True)
            else:
                texts = [text + piece for text, piece in zip(texts, added, strict=True)]
        seconds = time.perf_counter() - begin
        print(*(json.dumps(text, ensure_ascii=False) for text in texts if arguments.batch is not None), sep="\n")
        count = arguments.tokens * len(prompts)
        print(f"{count:,} tokens in {seconds:.1f} s, {count / seconds:,.0f} per second", file=sys.stderr)
        return 0

    return _guarded(run)


def classify(parser: argparse.ArgumentParser) -> Run:
    """classify your own images with a model that was trained on CIFAR-10"""
    _model_option(parser)
    parser.add_argument("images", type=Path, nargs="+", help="image files (PNG, JPEG, ...), or folders of them")
    _device_option(parser)
    _block_option(parser)
    _settings_option(parser, "override a setting of the training, for example max_steps=8")

    def run(arguments: argparse.Namespace) -> int:
        from ..training.classify import classify

        guesses = classify(arguments.run_folder, arguments.images, _changes(arguments), arguments.device)
        found = []
        try:
            for guess in guesses:
                found.append((str(guess.file), guess.name, guess.probability))
        finally:  # even if one of them cannot be read
            width = max((len(file) for file, *_ in found), default=4)
            print(f"{'file':{width}}  {'class':12}probability")
            for file, name, probability in found:
                print(f"{file:{width}}  {name:12}{probability:.3f}")
        return 0

    return _guarded(run)


def _model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder",
        type=Path,
        metavar="RUN",
        help="the folder of a run, a folder that save_pretrained wrote, or a checkpoint such as RUN/last.pt",
    )


def _block_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block", metavar="MODULE:CLASS", help="the class of the model's f, which is imported")


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    from ..training.presets import parsed

    return {**parsed(arguments.set), **({"block": arguments.block} if arguments.block else {})}


def _device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")


def _data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with the files of the data set")
    parser.add_argument("--download", action="store_true", help="download the data set into DIR if it is not there")
    _device_option(parser)


def _settings_option(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def _download(arguments: argparse.Namespace, name: str) -> None:
    if arguments.download and arguments.data is not None:
        from ..training.data import DATASETS, download

        download.fetch(DATASETS[name].sources, arguments.data)


def _guarded(run: Run) -> Run:
    """Turns user errors into a line on standard error and an exit code."""

    def guarded(arguments: argparse.Namespace) -> int:
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            print(f"This needs {', '.join(missing)}: {installing(missing)}", file=sys.stderr)
            return 1
        from .._solver.check import ReconstructionError
        from ..training.checkpoint import CheckpointError
        from ..training.data import DataError
        from ..training.presets import SettingError
        from ..training.run import Diverged, Stopped

        try:
            return run(arguments)
        except (CheckpointError, DataError, Diverged, ImportError, ReconstructionError, SettingError) as error:
            print(error, file=sys.stderr)
            return 1
        except BrokenPipeError:  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return 128 + stopped.number

    return guarded


COMMANDS = (demo, doctor, train, evaluate, generate, classify)
