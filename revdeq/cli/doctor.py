"""`python -m revdeq doctor`: which kernels this machine will use, whether they are right, and what to do if not."""

import itertools
import platform
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import __file__, __version__, _device, solve
from ..baselines import stored_graph
from ..kernels import backend, backends

CASES: list[dict[str, Any]] = [
    {"dtype": dtype, "state": state, **options}
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for state in ("float64", "exact")
    for options in ({"beta": 0.5}, {"beta": 0.8, "gamma": 0.7, "tol": 1e-9})  # with a tol it needs norms, too
]
GRADIENT_ERROR = 2 * 16 * 2.0**-24  # float32 rounds each of the 16 products that a gradient sums up, and some cancel


def add_options(_: ArgumentParser) -> None:
    """There are none."""


def run(_: Namespace) -> int:
    """Print the findings and a verdict. Returns 0 if this machine is ready, otherwise 1."""
    built = torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None) or "CPUs only"
    triton = getattr(sys.modules.get("triton"), "__version__", "not installed")  # the kernels have imported it
    say("revdeq", f"{__version__}, {__file__}\nPython {platform.python_version()}, {platform.platform()}")
    say("torch", f"{torch.__version__}, built for {built}\nTriton {triton}, used on GPUs only")
    remedies = list(itertools.chain(*map(examine, _device.devices())))
    print(f"not ready: {'; '.join(remedies)}" if remedies else "ready")
    return int(bool(remedies))


def say(about: str, text: object) -> None:
    print(f"{about:10}" + str(text).replace("\n", f"\n{'':10}"), flush=True)


def examine(device: torch.device) -> Iterator[str]:
    """Prints what is known of a device, and yields a remedy for what makes results there wrong or impossible."""
    say(str(device), _device.name(device))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = backends.backend_for(device)
            say("", f"kernels: {chosen.title}")
            wrong = [case for case in CASES if not agrees(device, case)]
        ours, stored = solved(solve, device, state="float64"), solved(stored_graph, device)
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, stored, strict=True))
    except Exception as failure:
        say("", f"failed: {type(failure).__name__}: {failure}")
        yield f"{device} cannot be used: {failure}"
        return
    for warning in caught:
        say("", warning.message)
    say("", f"results: {f'wrong for {wrong}' if wrong else 'the bits of the reference, for every dtype and state'}")
    say("", f"gradient: {error:.1e} from that of the stored graph")
    if wrong:
        yield f"{chosen.repair}, or set REVDEQ_BACKEND=reference: {chosen.title} on {device} computes other bits"
    if not error <= GRADIENT_ERROR:  # NaN, too
        yield f"do not train on {device}, whose gradient is wrong, and report this output"


def agrees(device: torch.device, case: dict[str, Any]) -> bool:
    found = solved(solve, device, **case)
    with backend("reference"):
        expected = solved(solve, device, **case)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))


def solved(
    method: Callable[..., Any], device: torch.device, dtype: Any = torch.float32, **options: Any
) -> list[Tensor]:
    """A solution and its gradients. f is elementwise, so that the order of a sum cannot change its bits."""
    generator, sizes = torch.Generator().manual_seed(0), (10_007, 7, 600)  # no multiples of a block
    weights, inputs, seeds = ([torch.randn(n, generator=generator).to(device, dtype) for n in sizes] for _ in range(3))
    leaves = [x.requires_grad_() for x in (*weights, *inputs)]

    def f(z: list[Tensor]) -> list[Tensor]:
        return [torch.tanh(w * a) + x for w, a, x in zip(weights, z, inputs, strict=True)]

    found = method(f, [torch.zeros_like(x) for x in inputs], max_steps=8, **options)
    z = getattr(found, "z", found)
    return [*(x.detach() for x in z), *torch.autograd.grad(z, leaves, seeds)]
