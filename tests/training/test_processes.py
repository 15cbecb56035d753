"""Several processes: their threads and devices."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from revdeq import _device
from revdeq.training.presets import SettingError
from revdeq.training.processes import Processes

TRAINING = """
    import os, threading
    from pathlib import Path
    import torch
    from torch import nn
    from revdeq.training.processes import Processes

    def threads():
        names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        return [name for name in names if "gloo" in name]

    def train(processes):
        model = processes.wrapped(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        for _ in range(3):
            model(torch.ones(4, 3)).sum().backward()
        assert threads(), "the test has another idea of their names"
        return processes.total(torch.ones(1))

    processes = Processes("cpu")
    with processes.connected():
        total = train(processes)
    assert total == 2
    assert not threads(), threads()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo")
def test_no_thread_of_the_process_group_is_left_at_the_end():
    """At the exit of the interpreter it would be stopped inside C++, which aborts the process: "terminate called
    without an active exception"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TRAINING)],
            env={**os.environ, **address, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


@pytest.mark.parametrize("seen, expected", [(4, "cuda:3"), (1, "cuda:0"), (0, "cpu")])
def test_a_process_uses_its_own_gpu(monkeypatch, seen, expected):
    """A launcher may make only one GPU visible to each process."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(_device, "count", lambda kind: seen if kind == "cuda" else 0)
    assert _device.best() == torch.device(expected)


@pytest.mark.parametrize("device", ["tpu0", "cuda:77"])
def test_a_device_that_does_not_exist(device):
    with pytest.raises(SettingError, match=f"device={device} .*cpu"):
        Processes(device)
