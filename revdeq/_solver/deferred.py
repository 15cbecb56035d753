"""Deferred checks of values that are still being computed on a device, without synchronizing.

On the CPU a check runs immediately. On other devices it runs when the first solve begins after the value has arrived,
or at exit.
"""

import atexit
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _device

_pending: list[tuple[Callable[[Tensor], None], _device.Arriving, torch.device]] = []


def report(value: Tensor, decide: Callable[[Tensor], None]) -> None:
    """Check a value now if it is available, otherwise later. During graph capture there is no value to check."""
    if _device.can_look(value):
        decide(value)
    elif not _device.is_capturing(value.device):
        _pending.append((decide, _device.Arriving(value), value.device))


def settle() -> None:
    """Run the pending checks whose values have arrived."""
    for decision in list(_pending):
        decide, arriving, device = decision
        if not _device.is_capturing(device) and arriving.has_come():
            _pending.remove(decision)
            decide(arriving.value)


@atexit.register
def _settle_all() -> None:
    """At exit, errors are printed, because they can no longer be raised."""
    while _pending:
        decide, arriving, device = _pending.pop(0)
        _device.synchronize(device)
        try:
            decide(arriving.value)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
