"""Checks that wait for a value from a device: in several threads, in a fork, and at the end of a process."""

import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch

from revdeq import _device
from revdeq._solver import deferred


@pytest.fixture(autouse=True)
def later(monkeypatch):
    """Checks of CPU tensors are deferred, too."""
    monkeypatch.setattr(deferred, "_pending", [])
    monkeypatch.setattr(_device, "can_look", lambda x: False)


def test_two_threads_report_each_result_once_and_only_after_it_arrived(monkeypatch):
    """Both check the first value at the same time; the second has not arrived."""
    both, asked = threading.Barrier(2), []

    def slowly():
        asked.append(1)
        try:
            both.wait(0.5)  # the other thread checks now, if it can
        except threading.BrokenBarrierError:
            both.reset()
        return True

    looks, decided = iter([slowly, lambda: False]), []
    monkeypatch.setattr(_device, "Arriving", lambda value: SimpleNamespace(value=value, has_come=next(looks)))
    deferred.report(torch.tensor(1.0), lambda x: decided.append(float(x)))
    deferred.report(torch.tensor(2.0), lambda x: decided.append(float(x)))
    threads = [threading.Thread(target=deferred.settle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decided == [1.0]
    assert len(deferred._pending) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_nothing_pending_and_its_own_lock(monkeypatch):
    """Even if another thread held the lock."""
    deferred.report(torch.tensor(1.0), lambda x: None)
    with deferred._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if not deferred._pending and deferred._lock.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(deferred._pending) == 1


LAST_SOLVE = """
    import atexit
    atexit.register(print, "handlers of others run")
    import torch, revdeq
    from revdeq import _device
    atexit.register(print, "also those that came later")
    _device.can_look = lambda x: False
    torch.manual_seed(0)
    f = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    settings = {{"beta": {beta}, "max_steps": 20, "state": "float64", "check": {check!r}}}
    revdeq.solve(f, torch.randn(5, 8), **settings).z.sum().backward()
"""


@pytest.mark.parametrize(
    ("check", "beta", "told"),
    [
        ("warn", 0.9, "ReconstructionWarning: the backward pass failed to reconstruct z0"),
        ("raise", 0.9, "ReconstructionError: the backward pass failed to reconstruct z0"),
        ("raise", 0.5, ""),
    ],
)
def test_a_warning_of_the_last_solve_comes_at_the_end_of_the_process(check, beta, told):
    program = textwrap.dedent(LAST_SOLVE.format(check=check, beta=beta))
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert told in done.stderr and bool(told) == bool(done.stderr)
    assert done.stdout.splitlines() == ["also those that came later", "handlers of others run"]
