"""Decisions on values that are still on their way from a device, which nobody waits for.

On the CPU a decision is made at once. On other devices it is made at the first solve that begins after the value has
arrived, whichever thread that is in, and at the latest when the process ends.
"""

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _device


@dataclass(frozen=True)
class _Decision:
    """decide: raises or warns, or does nothing."""

    decide: Callable[[Tensor], None]
    arriving: _device.Arriving
    device: torch.device


_pending: list[_Decision] = []
_lock = threading.Lock()


def report(value: Tensor, decide: Callable[[Tensor], None]) -> None:
    """Decide on a value now, if it is at hand, or later. While a graph is recorded there is no value to come."""
    if _device.can_look(value):
        decide(value)
    elif not _device.is_capturing(value.device):
        decision = _Decision(decide, _device.Arriving(value), value.device)
        with _lock:
            _pending.append(decision)


def settle() -> None:
    """Handle pending verdicts that have arrived."""
    while (decision := _next_to_arrive()) is not None:
        decision.decide(decision.arriving.value)


def _next_to_arrive() -> _Decision | None:
    if not _pending:  # as it always is on the CPU
        return None
    with _lock:
        for i, decision in enumerate(_pending):
            if not _device.is_capturing(decision.device) and decision.arriving.has_come():
                return _pending.pop(i)
    return None


@atexit.register
def _settle_all() -> None:
    """What the last solves of a process left undecided: a warning as ever, and an error as if none had caught it."""
    while _pending:
        decision = _pending.pop(0)
        _device.synchronize(decision.device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # an error could not be raised to anyone
                decision.decide(decision.arriving.value)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)


def _start_anew() -> None:
    """In a process that was forked: what was on its way arrives with its parent; the lock may be another thread's."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_anew)
