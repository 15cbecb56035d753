"""Deferred checks of values that are still being computed on a device, without synchronizing.

On the CPU a check runs immediately. On other devices it runs when the first solve begins after the value has arrived,
in whichever thread, or at exit.
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
    """decide: a function of the value that may warn or raise."""

    decide: Callable[[Tensor], None]
    arriving: _device.Arriving
    device: torch.device


_pending: list[_Decision] = []
_lock = threading.Lock()


def report(value: Tensor, decide: Callable[[Tensor], None]) -> None:
    """Check a value now if it is available, otherwise later. During graph capture there is no value to check."""
    if _device.can_look(value):
        decide(value)
    elif not _device.is_capturing(value.device):
        decision = _Decision(decide, _device.Arriving(value), value.device)
        with _lock:
            _pending.append(decision)


def settle() -> None:
    """Run the pending checks whose values have arrived."""
    while (decision := _next_to_arrive()) is not None:
        decision.decide(decision.arriving.value)


def _next_to_arrive() -> _Decision | None:
    if not _pending:  # always so on the CPU
        return None
    with _lock:
        for i, decision in enumerate(_pending):
            if not _device.is_capturing(decision.device) and decision.arriving.has_come():
                return _pending.pop(i)
    return None


@atexit.register
def _settle_all() -> None:
    """At exit: run the remaining checks. Errors are printed, because they can no longer be raised."""
    while _pending:
        decision = _pending.pop(0)
        _device.synchronize(decision.device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # nobody could catch an error
                decision.decide(decision.arriving.value)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)


def _start_anew() -> None:
    """In a forked process: the pending values belong to the parent, and the lock may be held by one of its threads."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_anew)
