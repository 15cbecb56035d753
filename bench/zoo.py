"""Runs the programs of torchdeq's deq-zoo that work on a CPU, with torchdeq's solvers and with ours.

    git clone https://github.com/locuslab/torchdeq
    pip install configargparse networkx pyyaml scikit-learn scipy termcolor yacs
    python bench/zoo.py torchdeq                    # some minutes; --data DIR has CIFAR-10's binary files

Each program runs unchanged in its own process, with `import revdeq.torchdeq` before its first line and
`--core reversible` on its command line. Nothing is downloaded: images, sounds and videos are generated (and CIFAR-10
without --data), and packages that only report or draw are replaced by dummies. Every solver makes the same number of
evaluations of f in the forward pass, with no tolerance, except that torchdeq's gradients evaluate f a few times more.

evaluations: of f in a forward pass of training, statistics included. loss: the mean of the last quarter of the updates.
time: processor time, the median of the updates. memory: the peak of bytes in tensors, in three updates in another
process.
"""

import argparse
import contextlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import numpy as np
import table
import torch
import torchdeq

import revdeq.torchdeq  # the one import line
from revdeq._device import peak_memory


@dataclass
class Program:
    """own: the flags that its authors use. small: flags that make it fast."""

    script: str
    evaluations: int
    updates: int
    own: str
    small: str


PROGRAMS = {
    "IGNN, chains": Program(
        "ignn/nodeclassification/train_IGNN_chains.py", 16, 100,
        "--f_solver fixed_point_iter --norm_type spectral_norm --norm_clip --grad 5 --tau 0.5", "--fastmode",
    ),
    "INR, image": Program(
        "deq-inr/scripts/train_2d_image.py", 16, 8, "--f_solver fixed_point_iter --grad 3 --norm_type none",
        "--dataset celeba --device cpu --filters siren_like --network_specs 1,128 --input_scale 64 --lr 0.003 "
        "--no_skip_solver",
    ),
    "INR, audio": Program(
        "deq-inr/scripts/train_audio.py", 16, 20, "--f_solver fixed_point_iter --grad 3 --norm_type weight_norm",
        "--device cpu --model_type implicit --use_implicit --filter_type siren_like --n_layers 1 --interm_channels 128 "
        "--input_scale 25000",
    ),
    "INR, video": Program(
        "deq-inr/scripts/train_video.py", 16, 20,
        "--f_solver fixed_point_iter --grad 3 --n_states 2 --norm_type weight_norm",
        "--device cpu --model_type implicit --use_implicit --filter_type siren_like --n_layers 1 --interm_channels 128 "
        "--input_scale 128 --train_batch_size 4096",
    ),
    "MDEQ-small, CIFAR-10": Program(
        "mdeq/mdeq_cifar/main.py", 22, 5, "--norm_type weight_norm --f_solver broyden --grad 5 --tau 0.5",
        "--cfg {folder}/configs/small.yaml WORKERS 0 TRAIN.BATCH_SIZE_PER_GPU 16",
    ),
}  # fmt: skip
SOLVERS = {
    "torchdeq, as its authors run it": "",
    "torchdeq, Anderson, IFT": "--f_solver anderson --b_solver anderson --ift",
    "reversible": "--core reversible",
    "reversible, exact state": "--core reversible --rev_state exact",
}
DUMMIES = (
    "livelossplot", "plyfile", "skimage", "skimage.measure", "skvideo", "skvideo.io", "torch_sparse",
    "torch.utils.tensorboard", "torchprofile", "torchvision", "torchvision.datasets", "torchvision.transforms",
)  # fmt: skip


def run(checkout, name, solver, data, out, only_memory):
    """In the child process: run the program until it has made its updates."""
    program = PROGRAMS[name]
    script = checkout / "deq-zoo" / program.script
    record = Record(3 if only_memory else program.updates)
    prepare(data)
    if "pandas" in script.read_text():  # other packages would find it, and use it
        sys.modules["pandas"] = mock.MagicMock(__spec__=ModuleSpec("pandas", None))
    words = f"{program.own} --f_max_iter {program.evaluations} --b_max_iter {program.evaluations} --f_tol 0 --b_tol 0 "
    words += f"{SOLVERS[solver]} {program.small.format(folder=script.parent)}"
    sys.argv = [str(script), *words.split()]
    sys.path[0] = str(script.parent)
    torch.manual_seed(0), np.random.seed(0)

    def training():
        with contextlib.suppress(Done):
            runpy.run_path(str(script), run_name="__main__")

    if only_memory:
        out.write_text(json.dumps({"bytes": peak_memory(training)}))
    else:
        training()
        out.write_text(json.dumps(record.results()))


class Done(BaseException):
    """The program has made its updates."""


class Record:
    """Watches optimizers, losses and cores."""

    def __init__(self, updates):
        self.losses, self.times, self.evaluations, self.start = [], [], [], None
        self.updates = updates
        backward, made = torch.Tensor.backward, torch.optim.Optimizer.__init__

        def watched_backward(loss, *args, **kwargs):
            self.losses.append(loss.item())
            backward(loss, *args, **kwargs)

        def watched_init(optimizer, *args, **kwargs):
            made(optimizer, *args, **kwargs)
            optimizer.register_step_post_hook(self.count)
            self.start = time.process_time()

        torch.Tensor.backward, torch.optim.Optimizer.__init__ = watched_backward, watched_init
        for core in torchdeq.core._core.values():
            core.forward = self.watched(core.forward)

    def watched(self, forward):
        def counting(deq, func, *args, **kwargs):
            count, active = 0, True

            def counted(*z):
                nonlocal count
                count += active
                return func(*z)

            result = forward(deq, counted, *args, **kwargs)
            active = False
            if deq.training:
                self.evaluations.append(count)
            return result

        return counting

    def count(self, optimizer, *args):
        now = time.process_time()
        self.times.append(now - self.start)
        self.start = now
        if len(self.times) == self.updates:
            raise Done

    def results(self):
        return {
            "loss": statistics.mean(self.losses[-max(1, self.updates // 4) :]),
            "seconds": self.times[1:],
            "evaluations": int(statistics.median(self.evaluations)),
        }


def prepare(data):
    """Fake what the programs expect: a GPU, their data and all of their packages."""
    import builtins
    import logging

    logging.disable(logging.WARNING)
    add_deq_args = torchdeq.utils.add_deq_args

    def add_all_args(parser):
        add_deq_args(parser)
        revdeq.torchdeq.add_args(parser)

    torchdeq.utils.add_deq_args = add_all_args
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.cuda.memory_allocated = lambda *args: 0
    torch.autograd.set_detect_anomaly = lambda *args: None  # train_audio.py uses it, and it takes most of the time
    np.int = int
    builtins.params_count = lambda model: None  # train_IGNN_chains.py does not import it
    for name in DUMMIES:
        sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None))
    sys.modules["torchprofile"].profile_macs.return_value = 0
    sys.modules["torchvision"].datasets = sys.modules["torchvision.datasets"]
    sys.modules["torchvision.datasets"].CIFAR10 = lambda root, train, **kwargs: cifar(data, train)

    y, x = np.mgrid[0:128, 0:128] / 128
    image = 0.5 + 0.25 * np.stack([np.sin(20 * x * y), np.cos(15 * x), np.sin(12 * y + 5 * x)], -1)
    Path("data/image").mkdir(parents=True), Path("data/audio").mkdir()
    np.save("data/image/celeba_128_tiny.npy", 255 * image)
    import scipy.io.wavfile

    t = np.arange(4096) / 8000
    sound = np.sin(2 * np.pi * 440 * t) + 0.5 * np.sin(2 * np.pi * 660 * t) * np.exp(-3 * t)
    scipy.io.wavfile.write("data/audio/gt_bach.wav", 8000, (8000 * sound).astype(np.int16))
    video = types.SimpleNamespace(vread=lambda path: 255 * np.stack([np.roll(image[::4, ::4], k, 1) for k in range(8)]))
    sys.modules["skvideo"].io = sys.modules["skvideo.io"] = video


def cifar(data, train):
    if data is None:
        return torch.utils.data.TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(10, (256,)))
    name = "data_batch_1.bin" if train else "test_batch.bin"
    rows = torch.from_numpy(np.fromfile(next(data.rglob(name)), np.uint8)).view(-1, 3073)
    return torch.utils.data.TensorDataset((rows[:, 1:].view(-1, 3, 32, 32) / 255 - 0.47) / 0.2, rows[:, 0].long())


def measured(checkout, name, solver, data):
    """Run the program in two child processes, one of them only to measure its memory."""
    here, row = Path(__file__).resolve().parent, {}
    paths = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TQDM_DISABLE": "1"}
    for only_memory in ("", "memory"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            command = [sys.executable, str(here / "zoo.py"), str(checkout), "--child", name, solver, only_memory]
            command += ["--out", str(out), *(["--data", str(data)] if data else [])]
            child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if not out.exists():
                raise RuntimeError((child.stderr.strip().splitlines() or ["it ended without a message"])[-1])
            row.update(json.loads(out.read_text()))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of torchdeq")
    parser.add_argument("--data", type=Path, help="a folder with CIFAR-10's binary files somewhere in it")
    parser.add_argument("--only", metavar="WORD", default="", help="only programs with this in their name")
    parser.add_argument("--out", type=Path, default=table.results_folder() / "zoo.csv", help="default: %(default)s")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    checkout, data = arguments.checkout.resolve(), arguments.data and arguments.data.resolve()
    if not (checkout / "deq-zoo").is_dir():
        parser.error(f"{checkout} has no deq-zoo: is it a clone of torchdeq?")
    if arguments.child:
        name, solver, only_memory = arguments.child
        return run(checkout, name, solver, data, arguments.out, bool(only_memory))
    failed, results = False, table.Table(arguments.out)
    for name in [name for name in PROGRAMS if arguments.only in name]:
        print(f"\n{name:34}{'evaluations':>12}{'loss':>12}{'time':>12}{'memory':>12}")
        for solver in SOLVERS:
            try:
                row = measured(checkout, name, solver, data)
            except RuntimeError as error:
                print(f"{solver:34}FAILED: {error}", flush=True)
                failed = True
                continue
            n, seconds = row["evaluations"], statistics.median(row["seconds"])
            print(f"{solver:34}{n:12}{row['loss']:12.4g}{seconds:10.3f} s{row['bytes'] / 2**20:8.0f} MiB", flush=True)
            results.add(f"zoo, {name}", solver, n, "seconds", row["seconds"])
            results.add(f"zoo, {name}", solver, n, "loss", [row["loss"]])
            results.add(f"zoo, {name}", solver, n, "bytes", [row["bytes"]])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
