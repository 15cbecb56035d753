"""What a user is told: each row does something wrong, and compares the whole text, in which … stands for anything.

Bad input gets an error that names the argument, the value and the remedy. The last test finds every message in the
source, and fails where no row has it.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import pickle
import re
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import revdeq
from revdeq import kernels
from revdeq._solver.state import refuse_device
from revdeq.examples import ddp, needs
from revdeq.kernels import Radix, backends, cpu, operators, reference_exact
from revdeq.models import ConvBlock, LanguageModel, MultiScale, PuzzleModel, SingleScale, Transformer
from revdeq.training import checkpoint, data, record
from revdeq.training.checkpoint import CheckpointError
from revdeq.training.data import DataError, cifar10, download, encoding, wikitext
from revdeq.training.presets import SettingError, configured, parsed
from revdeq.training.processes import Processes

try:
    import torchdeq

    import revdeq.torchdeq
except ImportError:
    torchdeq = None
ROOTS = [Path(revdeq.__file__).parent, Path(kernels.__file__).parent]


def half(z):
    return 0.5 * z


Z, TWO = torch.zeros(3), (torch.zeros(3), torch.zeros(3))
BETA = (
    " must lie in (0, 2) and not 1, also after rounding to float32: outside, the iteration converges for no f; use "
    "revdeq.tune to find a good one"
)
BETA_1 = (
    " must not be 1, also after rounding to float32: 1 - beta is what the backward pass divides by; 0.5 to 0.9 work "
    "well, or use revdeq.tune"
)
REAL = "it must be float32, float64, bfloat16 or float16"
STATEFUL = (
    "would be changed by every evaluation of f, in the backward pass too: put the layer outside f, as the paper does, "
    "or use a normalisation without state (GroupNorm, LayerNorm), or call .eval() on it"
)
NO_WAY_BACK = (
    "the backward pass did not find its way back: it is off by … of the state's size, where "
    "1e-04 can be trusted (beta = 0.9, N = 24 steps), and so the gradient of this solve is not exact. "
    'Either the float64 state was rounded beyond recovery: use state="exact", fewer steps or a beta further from 1. Or '
    "f does not compute the same when it is called again"
)


TRANSFORMED = (
    "solve is inside a transform of torch.func (grad, vmap, ...), which it cannot be: call it outside, with a batch "
    "dimension in place of vmap and with autograd in place of grad"
)


def in_forward_mode():
    with forward_ad.dual_level():
        revdeq.solve(half, Z)


def solving(f=half, z0=Z, *args, **settings):
    return lambda: revdeq.solve(f, z0, *args, **settings)


SOLVE = [
    ("beta is 1", solving(beta=1), ValueError, "beta = 1" + BETA_1),
    ("beta rounds to 1", solving(beta=1 + 1e-9), ValueError, "beta = 1.000000001" + BETA_1),
    ("beta is one", solving(beta=1.0), ValueError, "beta = 1.0" + BETA_1),
    *((f"beta is {b}", solving(beta=b), ValueError, f"beta = {b!r}" + BETA)
      for b in (0, -0.5, 2, 2.5, float("nan"), float("inf"), 1e-60)),
    ("beta is huge", solving(beta=10**400), ValueError, "beta = 1000…" + BETA),
    ("a layer's beta is 1", lambda: revdeq.RevDEQ(half, beta=1), ValueError, "beta = 1" + BETA_1),
    *((f"beta is {b!r}", solving(beta=b), TypeError,
       f"beta = {b!r} must be a number in (0, 2) and not 1: it is the same in all steps")
      for b in (None, 1j, torch.zeros(2))),
    ("beta is text", solving(beta="0.5"), TypeError,
     "beta = '0.5' must be a number in (0, 2) and not 1: it is the same in all steps"),
    ("gamma is text", solving(gamma="1"), TypeError,
     "gamma = '1' must be a number in (0, 2): it is the same in all steps"),
    ("gamma is 0", solving(gamma=0), ValueError,
     "gamma = 0 must lie in (0, 2), also after rounding to float32: outside, the iteration converges for no f; use "
     "revdeq.tune to find a good one"),
    ("an unknown gradient", solving(gradient="ift"), ValueError,
     "gradient = 'ift' must be 'exact', that of the iteration, or 'implicit', that of the fixed point by the implicit "
     "function theorem"),
    ("an option of another gradient", solving(gradient="implicit", keep=2), ValueError,
     "keep = 2 belongs to gradient='exact': with gradient='implicit' leave it out"),
    ("no steps", solving(max_steps=0), ValueError, "max_steps = 0 must be at least 1: a step evaluates f twice"),
    ("fewer than no steps", solving(max_steps=-3), ValueError,
     "max_steps = -3 must be at least 1: a step evaluates f twice"),
    ("a layer's steps are text", lambda: revdeq.RevDEQ(half, max_steps="4"), TypeError,
     "max_steps = '4' must be an integer of at least 1: a step evaluates f twice"),
    ("half a step", solving(max_steps=2.5), TypeError,
     "max_steps = 2.5 must be an integer of at least 1: a step evaluates f twice"),
    ("tol is 0", solving(tol=0), ValueError,
     "tol = 0 must be positive and finite, or None to take exactly max_steps steps"),
    *((f"tol is {t}", solving(tol=t), ValueError,
       f"tol = {t!r} must be positive and finite, or None to take exactly max_steps steps")
      for t in (-1e-3, float("nan"), float("inf"))),
    ("tol is text", solving(tol="1e-3"), TypeError,
     "tol = '1e-3' must be a number, or None to take exactly max_steps steps"),
    ("an unknown check", solving(check="ignore"), ValueError, "check = 'ignore' must be 'warn', 'raise' or None"),
    ("an unknown state", solving(state="float32"), ValueError,
     "state = 'float32' must be 'auto', 'float64', 'exact' or revdeq.Exact(fraction_bits=...)"),
    ("verifying another gradient", lambda: revdeq.verify(half, Z, gradient="implicit"), ValueError,
     "gradient = 'implicit': verify is about gradient='exact', which repeats steps; leave it out"),
    ("no bits", lambda: revdeq.Exact(fraction_bits=0), ValueError,
     "fraction_bits = 0 must be an integer from 1 to 30; 24 is usual"),
    ("beta is no fraction", solving(beta=0.999, state="exact"), ValueError,
     "beta = 0.999 has no usable fraction: state='exact' takes 1 - beta = p / d with d <= 64, neither 0 nor 1; use "
     "beta = 0.5, 0.8 or 0.9, for example"),
    ("f is no function", solving(3), TypeError, "f = 3 must be callable: a module, or a function f(z, *args)"),
    ("a layer of no function", lambda: revdeq.RevDEQ(None), TypeError,
     "f = None must be callable: a module, or a function f(z, *args)"),
    ("an unknown keyword", solving(steps=3), TypeError, "unknown keyword steps = 3: did you mean max_steps?"),
    ("an argument of f by name", solving(x=torch.ones(3)), TypeError,
     "unknown keyword x, a tensor: what f takes beside z is passed by position"),
    ("a layer's unknown keyword", lambda: revdeq.RevDEQ(half, betta=0.5), TypeError,
     "unknown keyword betta = 0.5: did you mean beta?"),
    ("z0 is empty", solving(z0=()), ValueError,
     "z0 = () has no tensor in it: pass a tensor, or a tuple, list or dict of tensors"),
    ("z0 is a number", solving(z0=(Z, 0.0)), TypeError,
     "z0[1] is of type float: it must be a tensor (or a tuple, list or dict of tensors)"),
    ("z0 is integer", solving(z0={"h": [Z, Z.long()]}), TypeError,
     f"z0['h'][1] is torch.int64: {REAL}; use z0['h'][1].float()"),
    ("z0 is complex", solving(z0=Z + 0j), TypeError, f"z0 is torch.complex64: {REAL}; use torch.view_as_real(z0)"),
    ("z0 is boolean", solving(z0=Z > 0), TypeError, f"z0 is torch.bool: {REAL}; use z0.float()"),
    ("z0 is of tokens", solving(z0=torch.tensor([1, 2])), TypeError,
     f"z0 is torch.int64: {REAL}; use z0.float()"),
    ("z0 is sparse", solving(z0=torch.eye(3).to_sparse()), TypeError,
     "z0 has layout torch.sparse_coo: it must be dense; convert it with z0.to_dense()"),
    ("z0 is on two devices", solving(z0=[Z, Z.to("meta")]), ValueError,
     "z0[1] is on meta and the first tensor of z0 on cpu: use one device"),
    ("z0 is nowhere", solving(z0=Z.to("meta")), ValueError,
     "z0 is on the meta device, where nothing is computed: move it to a real one"),
    ("z0 is on a Mac's GPU", lambda: refuse_device("z0", torch.device("mps")), ValueError,
     "z0 is on mps, which has no float64 to keep the states in: move it and f to the CPU"),
    ("z0 is in a vmap", lambda: torch.func.vmap(lambda z: revdeq.solve(half, z).z)(torch.zeros(2, 3)), TypeError,
     TRANSFORMED),
    ("an argument is in a vmap", lambda: torch.func.vmap(lambda x: revdeq.solve(lambda z, x: z / 2 + x, Z, x).z)(
        torch.zeros(2, 3)), TypeError, TRANSFORMED),
    ("a tangent", in_forward_mode, RuntimeError,
     "solve has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp), and a tangent would be lost: "
     "use reverse mode, or call solve outside of the dual level"),
    ("a layer of nothing", lambda: revdeq.RevDEQ(half)(None), TypeError,
     "x is of type NoneType: where it is not a tensor, pass z0, the state to start from"),
    ("f returns another shape", solving(lambda z: z[:2]), ValueError,
     "f's output has shape (2,): it must be shaped like z0, (3,) (which a layer makes from x unless it "
     "is given: deq(x, z0=...))"),
    ("f returns another shape, of two", solving(lambda z: (z[0], z[1][:1]), TWO), ValueError,
     "f's output (leaf 1 of 2) has shape (1,): it must be shaped like z0, (3,) (which a layer makes from x unless it "
     "is given: deq(x, z0=...))"),
    ("f returns another shape, with a gradient", solving(lambda z: z[None], Z.clone().requires_grad_()), ValueError,
     "f's output has shape (1, 3): it must be shaped like z0, (3,) (which a layer makes from x unless it "
     "is given: deq(x, z0=...))"),
    ("f returns two", solving(lambda z: (z, z)), TypeError,
     "f returned ('Tensor', 'Tensor'): it must have the structure of z0, Tensor"),
    ("f returns another container", solving(list, (Z,)), TypeError,
     "f returned ['Tensor']: it must have the structure of z0, ('Tensor',)"),
    ("f returns nothing", solving(lambda z: None), TypeError,
     "f returned NoneType: it must have the structure of z0, Tensor"),
    ("f returns a number", solving(lambda z: (z[0], 3), TWO), TypeError,
     "f's output (leaf 1 of 2) is of type int: it must be a tensor of shape (3,)"),
    ("f returns sparse", solving(lambda z: z.to_sparse()), TypeError,
     "f's output has layout torch.sparse_coo: it must be dense; use to_dense()"),
    ("f returns integers", solving(lambda z: z.long()), TypeError,
     f"f's output is torch.int64: {REAL}; convert it inside f"),
    ("f changes the device", solving(lambda z: z.to("meta")), ValueError,
     "f's output is on meta: it must be where z0 is, on cpu"),
    ("f contains a BatchNorm", solving(nn.BatchNorm1d(3), torch.zeros(2, 3)), RuntimeError,
     f"f contains a BatchNorm in training mode, whose running statistics {STATEFUL}"),
    ("f contains an InstanceNorm", solving(nn.InstanceNorm1d(2, track_running_stats=True), torch.zeros(2, 2, 3)),
     RuntimeError, f"f contains an InstanceNorm in training mode, whose running statistics {STATEFUL}"),
    ("f diverges", solving(lambda z: z * 1e30 + 1, tol=1e-3, max_steps=40, state="float64"), FloatingPointError,
     "the norm of the state is not finite after step 2 of at most 40 (beta = 0.5): f returns NaN or infinity, or the "
     "iteration diverges; try a smaller beta, or an f that contracts"),
    ("f is not finite", solving(lambda z: z / 0, state="exact"), FloatingPointError,
     "overflow in step 1: f is not finite in float32; try a smaller beta, or an f that contracts"),
    ("f is large", solving(lambda z: z * 0 + 150, state="exact"), OverflowError,
     "overflow in step 1: f reached 150, but 24 fraction bits hold magnitudes below 128; use "
     "state=revdeq.Exact(fraction_bits=22), or normalise f; or the iteration diverges, and needs other coefficients "
     "(revdeq.tune)"),
    ("z0 is large", solving(z0=Z + 500, state="exact"), OverflowError,
     "z0 does not fit the exact state: z0 reached 500, but 24 fraction bits hold magnitudes below 128; use "
     "state=revdeq.Exact(fraction_bits=21), or normalise z0"),
    ("f is out of all range", solving(lambda z: z * 0 + 3e10, state="exact"), OverflowError,
     "overflow in step 1: f reached 3e+10, but 24 fraction bits hold magnitudes below 128; normalise "
     "f; or the iteration diverges, and needs other coefficients (revdeq.tune)"),
    ("z0 is NaN", solving(z0=Z / 0), FloatingPointError, "z0 is not finite: start from finite numbers"),
    ("a layer's unknown state", lambda: revdeq.RevDEQ(half, state="exat"), ValueError,
     "state = 'exat' must be 'auto', 'float64', 'exact' or revdeq.Exact(fraction_bits=...)"),
    ("x is of integers", lambda: revdeq.RevDEQ(half)(torch.arange(3)), TypeError,
     "x is torch.int64: where it is not of floating point, pass z0, the state to start from"),
    ("z0 is not finite", solving(z0=Z / 0, state="exact"), FloatingPointError,
     "z0 does not fit the exact state: z0 is not finite in float32; start from finite numbers"),
]  # fmt: skip


def changes_a_buffer():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, z):
            self.count += 1
            return 0.5 * z

    revdeq.solve(Counter(), Z)


def another_closure():
    weights = [torch.ones(3, requires_grad=True)]
    loss = revdeq.solve(lambda z: 0.5 * (weights[0] * z) + 1, Z).z.sum()
    weights[0] = torch.full((3,), 2.0, requires_grad=True)
    loss.backward()


def a_step_of_an_optimizer_between():
    weight = torch.ones(3, requires_grad=True)
    loss = revdeq.solve(lambda z: 0.5 * (weight * z) + 1, Z).z.sum()
    with torch.no_grad():
        weight.add_(1)
    loss.backward()


def change_in_place_inside_f():
    def f(z):
        h = torch.tanh(z)
        out = 0.5 * h + weight
        h.add_(1)
        return out

    weight = torch.ones(3, requires_grad=True)
    revdeq.solve(f, Z).z.sum().backward()


def derivative_through_all():
    weight = torch.ones(3, requires_grad=True)
    revdeq.solve(lambda z: weight + torch.autograd.grad((weight * z).square().sum(), weight)[0], Z)


def loss_of_what_is_left_out():
    kept, weight = [], torch.ones(3, requires_grad=True)

    def f(z):
        kept.append((weight * z).square().sum())
        return 0.5 * z + weight

    z = revdeq.solve(f, Z, backward_steps=2).z
    (z.sum() + kept[0]).backward()


def loss_of_what_is_gone():
    kept, weight = [], torch.ones(3, requires_grad=True)

    def f(z):
        kept.append((weight * z).square().sum())
        return 0.5 * z + weight

    revdeq.solve(f, Z)
    kept[3].backward()


class Wrapping(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __tensor_flatten__(self):
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def wrapper_from_f():
    with torch.no_grad():
        revdeq.solve(lambda z: Wrapping(z), Z)


def hidden_tensor():
    w, calls = torch.ones(3, requires_grad=True) * 2, []

    def f(z):
        calls.append(1)
        return 0.1 * z * (w if len(calls) > 1 else 1)

    revdeq.solve(f, Z.clone().requires_grad_()).z.sum().backward()


def second_derivative():
    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(revdeq.solve(lambda z, x: 0.5 * z + x, Z, x).z.sum(), x, create_graph=True)


def lossy(**settings):
    def run():
        x = torch.ones(3, requires_grad=True)
        options = {"beta": 0.9, "max_steps": 24, "state": "float64", **settings}
        z = revdeq.solve(lambda z, x: 0.5 * torch.cos(z) + x, Z, x, **options).z
        z.sum().backward()

    return run


def no_room():
    steps = [Radix.nearest(0.9, 24)] * 64
    half_step = reference_exact.HalfStep(torch.zeros(2**20, dtype=torch.int64), torch.zeros(2**20), steps)
    with mock.patch.object(torch, "empty_like", side_effect=RuntimeError("not enough memory")):
        half_step.make_room()


BACKWARD = [
    ("f counts", changes_a_buffer, RuntimeError, f"f changes its buffers count, which {STATEFUL}"),
    ("what f closes over is replaced", another_closure, RuntimeError,
     "f used another tensor of shape (3,) that requires a gradient in the backward pass than in the forward pass, with "
     "other numbers (a closure whose variables were changed after the solve? torch.func.functional_call or a cached "
     "parametrization around the forward pass alone?): leave what f closes over as it is until the backward pass, or "
     "pass these tensors to f through `args`, or make f a module of its own"),
    ("what f depends on is changed", a_step_of_an_optimizer_between, RuntimeError,
     "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
     "shape (3,), on which f depends, was changed between the forward and the backward pass (a step of an optimizer?), "
     "so that the gradient would be that of another f; change it after the backward pass"),
    ("f changes what it saved", change_in_place_inside_f, RuntimeError,
     "one of the variables needed for gradient computation has been modified by an inplace operation inside f: a "
     "tensor of shape (3,) was changed after an operation had saved it; write x = x.add(y) in place of x.add_(y)"),
    ("f counts its evaluations", hidden_tensor, revdeq.ReconstructionError,
     "f does not compute the same when it is called again: in the backward pass it saved 2 tensors for its derivative, "
     "and in the forward pass 0, in evaluation 1 (a cache that its first evaluation fills? a cached parametrization "
     "around the forward pass alone? a choice by a counter, or by random numbers of Python? .eval() or "
     "requires_grad_() since then?): what f computes must depend on its arguments only; a cache is to be filled before "
     "the solve, by calling f once"),
    ("f differentiates through everything", derivative_through_all, RuntimeError,
     "f asks for a derivative by a tensor on which its state z depends, too, so that it would go through all "
     "evaluations before: ask for it at z.detach().requires_grad_(), where z counts as given"),
    ("a loss of what is left out", loss_of_what_is_left_out, RuntimeError,
     "a gradient arrives inside an evaluation of f that is not differentiated (gradient='implicit', backward_steps), "
     "through something that f computed there and kept (an auxiliary loss, a feature): use gradient='exact' without "
     "backward_steps, or compute it from solution.z"),
    ("a loss of what is gone", loss_of_what_is_gone, RuntimeError,
     "what f kept is all that is left of this solve, and its states are needed to undo its steps: keep its solution "
     "until the backward pass, too"),
    ("f returns a wrapper", wrapper_from_f, TypeError,
     "f's output is a Wrapping, which holds other tensors: return the tensors that it holds"),
    ("a second derivative", second_derivative, RuntimeError,
     "revdeq.solve has no second derivative: call backward without create_graph=True, or differentiate an iteration "
     "that you unroll yourself"),
    ("beyond float64's range", lossy(check="raise"), revdeq.ReconstructionError, NO_WAY_BACK),
    ("beyond float64's range, warned", lossy(), revdeq.ReconstructionWarning, NO_WAY_BACK),
    ("no room for remainders", no_room, MemoryError,
     "the remainders of 64 steps at beta = 0.9 take 28 bytes per element of y and of z, 0.1 GiB in all, for which "
     "there is no memory: use a smaller beta (0.5 takes none up to 32 steps) or fewer steps"),
]  # fmt: skip


def relax(state=None, f=None, copy=None, beta=0.5, gamma=1.0):
    default = torch.zeros(4)
    state = default.double() if state is None else state
    return lambda: operators.relax(state, default if f is None else f, default if copy is None else copy, beta, gamma)


def invert_adjoint(adjoint, vjp):
    state, copy = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3)
    return lambda: operators.invert_adjoint(state, copy, copy.clone(), adjoint, vjp, 0.5)


def other_chunks():
    with mock.patch.object(cpu, "LANES", 128):
        cpu.load(cpu.library._name)


def forced_without_a_state():
    with kernels.backend("reference"):
        kernels.half_step_for(torch.device("cpu"), "decimal")


def forced(name, device="cpu", missing=False, trouble=""):
    def run():
        with contextlib.ExitStack() as stack:
            library = None if missing else mock.Mock()
            gpu = None if missing else mock.Mock(runs_on=lambda device: False)
            stack.enter_context(mock.patch.multiple(cpu, library=library, trouble=trouble))
            stack.enter_context(mock.patch.dict(backends.TRITON.states, float64=gpu))
            stack.enter_context(kernels.backend(name))
            kernels.half_step_for(torch.device(device))

    return run


def launched_first_in_a_recording():
    if backends.launch is None:
        pytest.skip("Triton is not installed")
    kernel = mock.MagicMock(__name__="_relax_kernel")
    kernel.__getitem__.return_value.side_effect = RuntimeError("operation not permitted when stream is capturing")
    with mock.patch.object(backends.launch, "is_capturing", lambda device: True):
        backends.launch._launch_by_triton(kernel, 4, torch.device("cpu"), 1, ())


KERNELS = [
    ("a state of float32", relax(torch.zeros(4)), TypeError, "state is torch.float32: it must be torch.float64"),
    ("f of another shape", relax(f=torch.zeros(5)), ValueError,
     "f has shape (5,) on cpu: it must be shaped like state, (4,), and be on cpu"),
    ("f of integers", relax(f=torch.zeros(4).long()), TypeError, f"f is torch.int64: {REAL}"),
    ("beta is 1", relax(beta=1.0), ValueError,
     "beta is 1.0: it must be in (0, 2) and not 1, where the step has no inverse"),
    ("gamma is 2", relax(gamma=2.0), ValueError,
     "gamma is 2.0: it must be in (0, 2), where 1 is the paper's iteration"),
    ("gamma without what f read", relax(gamma=1.3), ValueError,
     "read is None: where gamma is not 1 it must be what f was given"),
    ("a library of another version", other_chunks, OSError,
     "… has chunks of 16 rows of 256 lanes, not of 16 of 128"),
    ("another layout", relax(torch.zeros(2, 3).double(), torch.zeros(2, 3), torch.zeros(3, 2).t()), ValueError,
     "copy has strides (1, 2): it must be laid out like state, (3, 1)"),
    ("gaps in the state", relax(torch.zeros(8).double()[::2]), ValueError,
     "state has shape (4,) and strides (2,): it must be dense"),
    ("an f with a gradient", relax(f=torch.zeros(4, requires_grad=True)), ValueError,
     "f requires a gradient, which does not flow through a half-step: use f.detach()"),
    ("a copy with a gradient", relax(copy=torch.zeros(4, requires_grad=True)), ValueError,
     "copy requires a gradient, which does not flow through a half-step: use copy.detach()"),
    ("an adjoint of float64", invert_adjoint(torch.zeros(2, 3).double(), torch.zeros(2, 3)), TypeError,
     "adjoint is torch.float64 and vjp is torch.float32: where f reads torch.float32 they must be torch.float32 and "
     "torch.float32"),
    ("an adjoint in another layout", invert_adjoint(torch.zeros(3, 2).t(), torch.zeros(2, 3)), ValueError,
     "adjoint has strides (1, 2): it must be laid out like state, (3, 1)"),
    ("an unknown backend", forced("cuda"), ValueError,
     "backend(name) is 'cuda': expected one of 'triton', 'cpu', …'reference'"),
    ("no compiler", forced("cpu", missing=True), RuntimeError,
     "backend 'cpu' is forced, but the C kernel was not built: install a C compiler and reinstall revdeq"),
    ("another library", forced("cpu", missing=True, trouble="no symbol"), RuntimeError,
     "backend 'cpu' is forced, but the C kernel cannot be loaded (no symbol): reinstall revdeq, which builds it"),
    ("a library without its OpenMP", forced("cpu", missing=True, trouble="libgomp.so.1: No such file"), RuntimeError,
     "backend 'cpu' is forced, but the C kernel cannot be loaded (libgomp.so.1: No such file): install GCC's OpenMP "
     "runtime (libgomp1)"),
    ("C on another device", forced("cpu", "meta"), RuntimeError,
     "backend 'cpu' is forced, but it cannot run on meta tensors: move them to the CPU"),
    ("a state that there is not", forced_without_a_state, RuntimeError,
     "backend 'reference' is forced, but it has no decimal state: use …"),
    ("no Triton", forced("triton", missing=True), RuntimeError,
     "backend 'triton' is forced, but Triton is not installed: install it with `pip install triton` (Linux)"),
    ("Triton without a GPU", forced("triton"), RuntimeError,
     "backend 'triton' is forced, but it cannot run on cpu tensors: move them to a GPU, or set TRITON_INTERPRET=1 "
     "before revdeq is imported"),
    ("a first launch in a recording", launched_first_in_a_recording, RuntimeError,
     "_relax_kernel cannot be compiled or loaded while a graph is recorded (RuntimeError): run what is recorded once "
     "before, with tensors of the same dtypes"),
]  # fmt: skip


def making(model, **settings):
    return lambda: model(**settings)


def reading(*shape, dtype=torch.int64, value=0):
    model = LanguageModel(vocabulary=50, d=8, length=12, heads=2)
    return lambda: model(torch.full(shape, value, dtype=dtype))


def looking(*shape, dtype=torch.float32):
    return lambda: SingleScale(channels=8)(torch.zeros(shape, dtype=dtype))


def without_torchdeq():
    with mock.patch.dict("sys.modules", {"torchdeq": None}):
        SingleScale(channels=8, solver="torchdeq")


def shared_into_a_run(files):
    SingleScale(channels=8).save_pretrained(files.put("last.pt", b"").parent)


def shared_in_part(files):
    SingleScale(channels=8).save_pretrained(files.folder)
    (files.folder / "config.json").unlink()
    SingleScale.from_pretrained(files.folder)


def shared_and_damaged(files):
    SingleScale(channels=8).save_pretrained(files.folder)
    files.put("config.json", b"{")
    SingleScale.from_pretrained(files.folder)


def shared_with_a_block(files):
    SingleScale(channels=8, block=lambda channels, width: ConvBlock(channels)).save_pretrained(files.folder)
    SingleScale.from_pretrained(files.folder)


def shared_as_another(files):
    SingleScale(channels=8).save_pretrained(files.folder)
    PuzzleModel.from_pretrained(files.folder)


MODELS = [
    ("a name that is not public", lambda: revdeq.training.run_away, AttributeError,
     "module 'revdeq.training' has no attribute 'run_away'"),
    ("no channels", making(SingleScale, channels=0), ValueError, "channels = 0 must be an integer of at least 1"),
    ("shared into a run", shared_into_a_run, ValueError,
     "save_directory = 'FOLDER' is the folder of a run, whose config.json would be lost: choose another"),
    ("read as another kind", shared_as_another, ValueError,
     "FOLDER holds a SingleScale, not a PuzzleModel: use SingleScale.from_pretrained"),
    ("shared in part", shared_in_part, ValueError,
     "FOLDER cannot be read as a model that save_pretrained wrote: there is no config.json in it"),
    ("shared and damaged", shared_and_damaged, ValueError,
     "FOLDER cannot be read as a model that save_pretrained wrote: Expecting…"),
    ("neither a folder nor on the Hub", lambda: SingleScale.from_pretrained("sharde", local_files_only=True), OSError,
     "there is no folder sharde, and it cannot be read from the Hub: …"),
    ("shared without its block", shared_with_a_block, TypeError,
     "FOLDER was saved with block='…', which is code, and no file holds code: pass the class, "
     "from_pretrained('FOLDER', block=…)"),
    ("a block that is a name", making(SingleScale, block="mine:Block"), TypeError,
     "block = 'mine:Block' must be the class itself, or a function, that block(channels, width) makes a module f(z, x) "
     "of"),
    ("a block of another signature", making(SingleScale, block=lambda d: nn.Linear(d, d)), TypeError,
     "block = …<lambda> cannot be called as block(channels, width): too many positional arguments; define "
     "__init__(self, channels, width)"),
    ("a block that makes no module", making(LanguageModel, block=float), TypeError,
     "block = builtins:float makes a float: block(d) must make a torch.nn.Module"),
    ("an f of one argument", making(LanguageModel, d=8, length=4, block=lambda d: nn.Linear(d, d)), TypeError,
     "block = …<lambda> makes an f that cannot be called as f(z, x): too many positional arguments; define "
     "forward(self, z, x)"),
    ("channels that do not group", making(SingleScale, channels=25), ValueError,
     "50 channels (channels, or width times channels) cannot be split into 3 groups for GroupNorm: use a multiple of "
     "16, or fewer than 32"),
    ("an unknown form", making(SingleScale, form="code"), ValueError,
     "form = 'code' must be one of 'paper' (as printed), 'authors' (as in the authors' code)"),
    ("negative noise", making(PuzzleModel, noise=-1), ValueError,
     "noise = -1 must be a number of at least 0, of which z is about 1; 0 is none"),
    ("a puzzle in three dimensions", making(PuzzleModel, dimensions=3), ValueError,
     "dimensions = 3 must be 1, for strings, or 2, for images"),
    ("one puzzle", lambda: PuzzleModel(channels=8)(torch.zeros(3, 5, 5)), ValueError,
     "puzzles of shape (3, 5, 5): they must be a batch of shape (B, 3, H, W)"),
    ("an unknown solver", making(SingleScale, solver="newton"), ValueError,
     "solver = 'newton' must be one of 'reversible', 'stored', 'checkpointed', 'torchdeq'"),
    ("tol with the stored graph", making(SingleScale, solver="stored", tol=1e-3), ValueError,
     "tol = 0.001: solver = 'stored' takes all of its steps; use tol=None"),
    ("the exact state of others", making(SingleScale, solver="torchdeq", state="exact"), ValueError,
     "state = 'exact' belongs to solver = 'reversible'; with 'torchdeq' leave it out"),
    ("too few for Anderson", making(SingleScale, solver="torchdeq", evaluations=2), ValueError,
     "evaluations = 2 must be at least 3: the first two start Anderson acceleration"),
    ("torchdeq is missing", without_torchdeq, ImportError,
     "solver = 'torchdeq' needs torchdeq: pip install 'revdeq[torchdeq]', or use solver='reversible'"),
    ("too few scales", making(MultiScale, widths=(1, 2)), ValueError,
     "widths = (1, 2) must be 4 numbers, one for each scale"),
    ("a word for false", making(LanguageModel, d=8, heads=2, wide_heads="no"), ValueError,
     "wide_heads = 'no' must be true or false"),
    ("heads that do not divide", making(LanguageModel, d=30, wide_heads=False), ValueError,
     "d = 30 is not a multiple of heads = 8: change one of them, or use wide_heads=True"),
    ("all is dropped", making(LanguageModel, d=8, dropout=1.0), ValueError,
     "dropout = 1.0 must be a probability in [0, 1); 0 is none"),
    ("too few parameters", lambda: Transformer.sized(100, vocabulary=50, d=8, depth=1), ValueError,
     "parameters = 100 are fewer than the smallest model has, …: use a smaller d or depth"),
    ("one image", looking(3, 16, 16), ValueError,
     "images of shape (3, 16, 16): they must be a batch of shape (B, 3, H, W)"),
    ("images of bytes", looking(1, 3, 16, 16, dtype=torch.uint8), TypeError,
     "images are torch.uint8: scale and normalise them to floating point numbers first"),
    ("one sequence", reading(12), ValueError,
     "tokens of shape (12,): they must be a batch of sequences, (B, T)"),
    ("tokens of float", reading(1, 12, dtype=torch.float32), TypeError,
     "tokens are torch.float32: they must be int64 or int32"),
    ("a long sequence", reading(1, 13), ValueError,
     "tokens of length 13: this model reads at most length = 12; cut them, or make the model with a larger length"),
    ("an unknown token", reading(1, 12, value=50), IndexError,
     "tokens from 50 to 50: they must lie between 0 and vocabulary - 1 = 49"),
]  # fmt: skip


def an_example_without_extras():
    with mock.patch("importlib.util.find_spec", return_value=None):
        needs("sklearn", "torchdeq")


def reloaded_without_torchdeq():
    with mock.patch.dict("sys.modules", {"torchdeq": None}):
        importlib.reload(revdeq.torchdeq)


def core(call=None, **settings):
    return lambda: (call or (lambda deq: None))(torchdeq.get_deq(core="reversible", **settings))


TORCHDEQ = [
    ("torchdeq is not installed", reloaded_without_torchdeq, ModuleNotFoundError,
     "revdeq.torchdeq needs torchdeq: pip install 'revdeq[torchdeq]'"),
    ("fewer than no evaluations", core(f_max_iter=-2), ValueError,
     "f_max_iter = -2 must be a number of evaluations of f, an integer of at least 0"),
    ("half an evaluation", core(f_max_iter=2.5), ValueError,
     "f_max_iter = 2.5 must be a number of evaluations of f, an integer of at least 0"),
    ("a tolerance below zero", core(f_tol=-1.0), ValueError,
     "f_tol = -1.0 must be positive and finite; 0 or None makes all f_max_iter evaluations"),
    ("our name of f_max_iter", core(max_steps=4), TypeError,
     "unknown keyword max_steps = 4: in torchdeq it is called f_max_iter, which counts evaluations of "
     "f, two to a step"),
    ("our name of f_tol", core(tol=0.1), TypeError, "unknown keyword tol = 0.1: in torchdeq it is called f_tol"),
    ("f_tol in one call", core(lambda deq: deq(torch.cos, torch.zeros(2), {"f_tol": 0.1})), TypeError,
     "unknown keyword f_tol = 0.1: in solver_kwargs it is called tol"),
    ("a misspelt keyword", core(f_maxiter=4), TypeError, "unknown keyword f_maxiter = 4: did you mean f_max_iter?"),
    ("a state that is none", core(lambda deq: deq(torch.cos, 3)), TypeError,
     "z_init = 3 must be a tensor, or a tuple or list of tensors"),
    ("one part of two", core(lambda deq: deq(lambda a, b: a, (torch.zeros(2, 2),) * 2)), TypeError,
     "func returned a tensor: z_init has 2 parts, and func must return as many"),
    ("func returns another shape", core(lambda deq: deq(lambda z: z[:1], torch.zeros(2))), ValueError,
     "func's output has shape (1,): it must be shaped like z_init, (2,)"),
    ("func returns NaN", core(lambda deq: deq(lambda z: z + torch.nan, torch.zeros(2)), f_tol=1e-3, f_max_iter=8),
     FloatingPointError,
     "the norm of the state is not finite after step 1 of at most 4 (beta = 0.5): func returns NaN or infinity, or the "
     "iteration diverges; try a smaller beta, or a func that contracts"),
    ("integers to begin with", core(lambda deq: deq(torch.cos, torch.zeros(2, dtype=torch.long))), TypeError,
     "z_init is torch.int64: it must be float32, float64, bfloat16 or float16; use z_init.float()"),
    ("a hook in f", core(lambda deq: deq(torchdeq.get_deq(hook_ift=True), torch.zeros(2))), RuntimeError,
     "func contains a core of torchdeq's with hook_ift=True, whose hook keeps the graph of every evaluation of func "
     "alive: use ift=True there, which has the same gradient"),
] if torchdeq else []  # fmt: skip


def setting(*assignments):
    return lambda: configured("cifar10-tiny", parsed(assignments)).build()


SETTINGS = [
    ("an unknown preset", lambda: configured("cifar10-tinny"), SettingError,
     "there is no preset 'cifar10-tinny' (did you mean cifar10-tiny?): there are …cifar10-tiny, …"),
    ("no value", setting("lr"), SettingError, "--set lr: it must be key=value"),
    ("an unknown setting", setting("stepz=3"), SettingError,
     "cifar10-tiny has no setting 'stepz' (did you mean steps?): it has …"),
    ("an unknown model", setting("model=resnt"), SettingError,
     "model='resnt': there is no such model (did you mean resnet?)"),
    ("a model of other data", lambda: configured("cifar10-tiny", {"model": "transformer"}).build(classes=10),
     SettingError,
     "model='transformer' cannot be trained on cifar10: choose one of single-scale, multi-scale, resnet"),
    ("a block in a file", setting("block=mine.py:Block"), SettingError,
     "block='mine.py:Block': it must be module:Class, mine:Block for class Block in mine.py, for example"),
    ("another name of a setting", setting("learning_rate=1"), SettingError,
     "cifar10-tiny has no setting 'learning_rate' (did you mean lr?): it has …"),
    ("lr is text", setting("lr=fast"), SettingError, "lr='fast': it must be float"),
    ("lr is negative", setting("lr=-1"), SettingError, "lr=-1: it must be larger than 0"),
    ("seed is negative", setting("seed=-1"), SettingError, "seed=-1: it must be 0 or larger"),
    ("a range backwards", setting("steps=(20,5)"), SettingError,
     "max_steps=(20, 5): a range is two integers of at least 1, the smaller one first"),
    ("seed is huge", setting("seed=99999999999999999999"), SettingError,
     "seed=99999999999999999999: it must be below 2**63"),
    ("an unknown device", lambda: Processes("tpu0"), SettingError,
     "--device tpu0: it must be cpu, or cuda or cuda:1 where there is such a GPU"),
    ("an example without its extras", an_example_without_extras, SystemExit,
     "This example needs sklearn, torchdeq: pip install 'revdeq[demo,torchdeq]'"),
    ("an example without torchrun", ddp.main, SystemExit,
     "start it with torchrun: torchrun --nproc-per-node 2 -m revdeq.examples.ddp"),
    ("a device that is not there", lambda: Processes("cuda:77"), SettingError,
     "--device cuda:77: this machine has …; use cpu, or leave it out"),
    ("an unknown schedule", setting("schedule=step"), SettingError,
     "schedule='step': it must be one of plateau, cosine…"),
    ("beta is 1", setting("beta=1"), SettingError, "the model multi-scale cannot be made: beta = 1" + BETA_1),
]  # fmt: skip


class Files:
    """An empty folder, in which a row puts what it needs."""

    def __init__(self, folder):
        self.folder = folder

    def put(self, name, content):
        (self.folder / name).write_bytes(content)
        return self.folder / name


def images(name, content, **settings):
    """CIFAR-10 with one batch replaced."""

    def run(files):
        for other in [*cifar10.TRAIN, cifar10.TEST]:
            files.put(f"{other}.bin", bytes(cifar10.RECORD))
        (files.folder / f"{name.removesuffix('.bin')}.bin").unlink()
        if content is not None:
            files.put(name, content)
        cifar10.Cifar10(files.folder, **settings)

    return run


def text(content, name="wiki.train.tokens"):
    return lambda files: wikitext.text(files.put(name, content).parent, "wiki.train.tokens")


def encoding_of(ranks):
    """An encoding that is read as these ranks."""
    return mock.patch("tiktoken.load.data_gym_to_mergeable_bpe_ranks", return_value=ranks)


def too_many_tokens(files):
    with encoding_of(range(1 << 16)):
        encoding.load(files.folder)


def vocabulary(files):
    with encoding_of({bytes([i]): i for i in range(256)}):
        wikitext.Vocabulary.of(np.zeros(3, np.int64), "some", files.folder)


def unreachable(files, sent=None):
    source = download.Source("set.zip", ("https://example.invalid/set.zip",), "md5", "0" * 32)
    if sent is None:
        answer = mock.patch("urllib.request.urlopen", side_effect=OSError("no route"))
    else:
        body = mock.MagicMock(headers={})
        body.__enter__.return_value = body
        body.read.side_effect = [sent, b""]
        answer = mock.patch("urllib.request.urlopen", return_value=body)
    with answer:
        download.fetch([source], files.folder)


def saving(files):
    files.put("last.pt", b"as it was")
    with mock.patch("revdeq.training.checkpoint.replacing", side_effect=OSError(28, "No space left on device")):
        checkpoint.save(files.folder / "last.pt", {})


def saved(content):
    def run(files):
        torch.save(content, files.folder / "last.pt")
        return checkpoint.load(files.folder / "last.pt")

    return run


def half_a_checkpoint(files):
    saved({"format": checkpoint.FORMAT})(files)
    whole = (files.folder / "last.pt").read_bytes()
    files.put("best.pt", whole)
    checkpoint.load(files.put("last.pt", whole[: len(whole) // 2]))


def damaged_checkpoint(files):
    with zipfile.ZipFile(files.folder / "last.pt", "w") as archive:
        archive.writestr("notes.txt", "of another kind")
    checkpoint.load(files.folder / "last.pt")


def changed_model(files):
    state = {"model": nn.Linear(3, 2).state_dict()}
    checkpoint.load_weights(nn.Linear(2, 2), files.folder / "last.pt", state, {"channels": 32})


def other_weights(files):
    checkpoint.load_weights(nn.Linear(2, 2), files.folder / "last.pt", {"model": nn.Linear(3, 2).state_dict()})


PUT_IT_THERE = "Put it there, packed or unpacked, or let --download (of train and evaluate) fetch it:\n  FOLDER/"

FILES = [
    ("no images", lambda files: cifar10.find(files.folder), DataError,
     f"no CIFAR-10 in FOLDER.\n{PUT_IT_THERE}cifar-10-binary.tar.gz  from  https://…"),
    ("a batch is missing", images("data_batch_4", None), DataError,
     "FOLDER holds data_batch_1.bin, data_batch_2.bin, data_batch_3.bin, data_batch_5.bin, test_batch.bin, but not "
     "data_batch_4.bin (binary version) or data_batch_4 (Python version): CIFAR-10 is data_batch_1 to data_batch_5 and "
     "test_batch"),
    ("a batch is cut off", images("data_batch_3.bin", b"123"), DataError,
     "FOLDER/data_batch_3.bin has 3 bytes, which is not a whole number of CIFAR-10 records of 3,073 bytes (the "
     "official file has 10,000 records, 30,730,000 bytes): it is truncated or not CIFAR-10"),
    ("another data set", images("data_batch_3.bin", b"c" * cifar10.RECORD), DataError,
     "FOLDER/data_batch_3.bin has the label 99: CIFAR-10's are 0 to 9 (is this CIFAR-100, or are its bytes shifted?)"),
    ("no pickle", images("data_batch_3", b"hello"), DataError,
     "FOLDER/data_batch_3 is not a batch of CIFAR-10's Python version (a pickled dict with b'data' and b'labels'): …"),
    ("a malicious pickle", images("data_batch_3", pickle.dumps(print)), DataError,
     "FOLDER/data_batch_3 asks for …builtin….print, which no CIFAR-10 batch needs: it may be malicious and is "
     "not read"),
    ("a pickle of floats", images("data_batch_3", pickle.dumps({b"data": np.zeros(3), b"labels": [0]}, 2)), DataError,
     "FOLDER/data_batch_3 holds an array of dtype …: expected u1, bytes"),
    ("a pickle of other sizes", images("data_batch_3", pickle.dumps({b"data": [0], b"labels": [0]}, 2)), DataError,
     "FOLDER/data_batch_3 holds data of shape (1,) and int64 with 1 labels: expected uint8 of shape (records, 3,072) "
     "and as many labels"),
    ("a damaged archive", lambda files: cifar10.Cifar10(files.put("cifar-10-binary.tar.gz", b"12").parent), DataError,
     "FOLDER/cifar-10-binary.tar.gz (2 bytes) cannot be unpacked: …. It is truncated, damaged or not what its name "
     "says: fetch it again"),
    ("no text", lambda files: wikitext.find("wikitext-2", files.folder), DataError,
     f"no wikitext-2 in FOLDER.\n{PUT_IT_THERE}wikitext-2-v1.zip  from  https://…"),
    ("a split is missing", lambda files: wikitext.tokens(files.folder, "wiki.valid.tokens", files.folder), DataError,
     "FOLDER does not hold wiki.valid.tokens, plain or compressed, which belongs to the data set"),
    ("another split", text(b"", "other"), DataError,
     "FOLDER does not hold wiki.train.tokens, which belongs to the data set"),
    ("no UTF-8", text(b"ab\xff"), DataError,
     "FOLDER/wiki.train.tokens is not UTF-8 text at byte 2: damaged, or still compressed?"),
    ("an empty text", text(b" \n"), DataError,
     "FOLDER/wiki.train.tokens is empty: expected the text of the data set"),
    ("a web page", text(b"<!DOCTYPE html>"), DataError,
     "FOLDER/wiki.train.tokens is a web page: a failed download? Expected the text of the data set"),
    ("no encoding", lambda files: encoding.find(files.folder), DataError,
     f"no GPT-2 encoding in FOLDER.\n{PUT_IT_THERE}gpt2/encoder.json  from  https://…"),
    ("a large encoding", too_many_tokens, DataError,
     "FOLDER/encoder.json has 65,536 tokens: they are kept in 16 bits, GPT-2's are 50,257"),
    ("an unknown vocabulary", vocabulary, DataError,
     "vocabulary='some': it is full, seen (the tokens of the training data), or how many of these to keep, the most "
     "frequent"),
    ("no network", unreachable, DataError,
     "FOLDER/set.zip could not be fetched. Fetch it by other means and put it there:\n"
     "  https://example.invalid/set.zip: no route"),
    ("another file is sent", lambda files: unreachable(files, b"hello"), DataError,
     "FOLDER/set.zip could not be fetched. Fetch it by other means and put it there:\n"
     "  https://example.invalid/set.zip: md5 is 5d41402abc4b2a76b9719d911017c592, expected 0000…0000: what was sent is "
     "damaged or another file"),
    ("a full disk", saving, CheckpointError,
     "FOLDER/last.pt cannot be written: No space left on device. FOLDER/last.pt is as it was: make room and pass "
     "--resume."),
    ("no checkpoint", lambda files: checkpoint.load(files.folder / "last.pt"), CheckpointError,
     "there is no checkpoint FOLDER/last.pt: a run folder has last.pt and best.pt"),
    ("a run's folder", lambda files: checkpoint.load(files.folder), CheckpointError,
     "there is no trained model in FOLDER: none of best.pt, last.pt, model.safetensors"),
    ("no config of a pretrained model", lambda files: checkpoint.load(files.put("model.safetensors", b"").parent),
     CheckpointError, "FOLDER cannot be read as a model that save_pretrained wrote: …"),
    ("a damaged config", lambda files: record.read_config(files.put("config.json", b"{").parent), CheckpointError,
     "FOLDER/config.json cannot be read: …; name the preset and its settings again"),
    ("half a checkpoint", half_a_checkpoint, CheckpointError,
     "FOLDER/last.pt cannot be read as a checkpoint: its end is missing; copy it again. There is FOLDER/best.pt beside "
     "it"),
    ("a damaged checkpoint", damaged_checkpoint, CheckpointError,
     "FOLDER/last.pt cannot be read as a checkpoint: it is damaged (…); copy it again"),
    ("a text as a checkpoint", lambda files: checkpoint.load(files.put("last.pt", b"hello")), CheckpointError,
     "FOLDER/last.pt cannot be read as a checkpoint: it is of another program; name a checkpoint that `python -m "
     "revdeq train` wrote"),
    ("a checkpoint with code", saved({"f": Files}), CheckpointError,
     "FOLDER/last.pt cannot be read as a checkpoint: it is damaged, or holds code, which is not run; get it again, "
     "from a source that you trust"),
    ("another program's checkpoint", saved({"epoch": 3}), CheckpointError,
     "FOLDER/last.pt is not a checkpoint of `python -m revdeq train` (format …)"),
    ("another model's checkpoint", other_weights, CheckpointError,
     "FOLDER/last.pt has the weights of another model: …size mismatch for weight…"),
    ("a model that was changed", changed_model, CheckpointError,
     "FOLDER/last.pt has the weights of another model (was it trained with another than channels=32?): …size mis…"),
    ("no folder", lambda files: data.load("cifar10", None, {}), DataError,
     "cifar10 is read from files: say with --data DIR in which folder they are"),
    ("no image to train on", lambda files: images("data_batch_3.bin", bytes(cifar10.RECORD), held_out=1)(files),
     DataError, "held_out=1: it must be none, or an integer from 2 to 5"),
    ("a maze of one cell", lambda files: data.load("mazes", None, {"cells": 1}), DataError,
     "cells=1: it must be an integer of at least 2"),
    ("a file where the run should be", lambda files: record.make_folder(files.put("run", b"")), CheckpointError,
     "--out FOLDER/run cannot be used as a folder: File exists"),
]  # fmt: skip

if importlib.util.find_spec("tiktoken") is None or importlib.util.find_spec("tqdm") is None:
    FILES = []  # needs revdeq[train]
ROWS = [*SOLVE, *BACKWARD, *KERNELS, *MODELS, *TORCHDEQ, *SETTINGS, *FILES]


def pattern(text):
    return ".*".join(map(re.escape, text.split("…")))


@pytest.mark.parametrize(("act", "kind", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_is_said(act, kind, text, tmp_path):
    catch = pytest.warns if issubclass(kind, Warning) else pytest.raises
    with catch(kind, match=rf"(?s)\A{pattern(text.replace('FOLDER', str(tmp_path)))}\Z"):
        act(Files(tmp_path)) if inspect.signature(act).parameters.get("files") else act()


ELSEWHERE = (
    *(f"solver/test_{name}.py" for name in ("exact", "hosts", "options", "sharded", "tune")),
    *("training/test_data.py", "training/test_train.py", "training/test_own.py", "training/test_share.py"),
    "cli/test_command_line.py",
)
"""Tests of what needs a training, or tools around a solve: of the messages there, three words in a row are compared."""

WITH_TESTS = ("_solver", "cli", "training")

UNSEEN = {
    "f draws random numbers (…) while a graph is recorded, and torch … cannot repeat a draw there, which the backward "
    "pass has to: use torch 2.10 or later, or call .eval() on the layers of f that drop out, or solve outside of the "
    "graph": "needs a GPU: test_gpu_host.py",
    "…, and … run instead, which are slower (an exact state by 2 to 3 times): …":
        "needs an installation without a C compiler: test_operators.py",
    "module … has no attribute …": "as Python says it",
    "a plot needs matplotlib: pip install matplotlib, or 'revdeq[demo]'": "needs an environment without it",
    "a solve has waited … s for its turn to draw random numbers, behind an evaluation of f in another thread that has "
    "not ended: does that f wait for a solve in a thread of its own? Call it in the thread of f, or let f draw nothing":
        "needs threads: test_what_f_keeps.py",
    "save_pretrained …": "needs an environment without huggingface_hub: test_share.py",
    "from_pretrained …": "needs an environment without huggingface_hub: test_share.py",
    "push_to_hub …": "needs an environment without huggingface_hub: test_share.py",
    "… is a …, which holds other tensors: solve for those": "needs a tensor subclass: test_inside_f.py",
    "a gradient arrives at an evaluation of f that the backward pass of its solve has not come to yet, or has left "
    "behind (is there a part of f on another device?): call backward for it by itself, with retain_graph=True":
        "needs two devices",
    "the C kernel cannot be loaded (…), and PyTorch's slower operations run instead: …":
        "needs a broken library",
}  # fmt: skip

MADE_BEFORE = {
    "'\\n'.join(map(str, wrong))",  # of images that cannot be read
    "no_model(model)",  # test_own.py
    "1",  # an exit code
    "text",  # of Monitor, "beyond float64's range"
    "OTHER_TENSORS.format(shape=tuple(before.shape))",  # "what f closes over is replaced"
    "CHANGED.format(shape=tuple(leaf.shape))",  # "what f depends on is changed"
    "MODIFIED.format(shape=tuple(x.shape))",  # "f changes what it saved"
    "OTHER_COUNT.format(again=again, before=evaluation.count, number=evaluation.k + 1)",  # "f counts its evaluations"
    "cannot_write(path, cause)",  # "a full disk"
    "cannot_write(path, error)",
    # "no network"
    "'\\n'.join([f'{target} could not be fetched. Fetch it by other means and put it there:', *reasons])",
}
"""Messages that are put together before they are raised, with the rows that have them."""


def messages():
    """Every message that is raised or warned with: its file, and its text with … where values are put in."""
    for root in ROOTS:
        for file in sorted(root.rglob("*.py")):
            if file.is_relative_to(ROOTS[0] / "kernels") and root == ROOTS[0]:
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                called = ast.unparse(node.func)
                if called in ("parser.error", "warnings.warn", "warnings.warn_explicit") or re.fullmatch(
                    r"[A-Z]\w*(Error|Warning)|Diverged|Stopped|SystemExit|Unreachable", called
                ):
                    yield file.relative_to(root), node.args[0]


def fixed_part(message):
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in message.values)
    return None


def compared_elsewhere(text):
    """Whether three words of the fixed part of a message, as they follow each other, are in one of those tests."""
    words = [part.split()[i : i + 3] for part in text.split("…") for i in range(max(1, len(part.split()) - 2))]
    return any(" ".join(three) in OTHER_TESTS for three in words if len(three) == 3)


OTHER_TESTS = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ELSEWHERE)


@pytest.mark.skipif(not TORCHDEQ or not FILES, reason="needs revdeq[train,torchdeq]")
def test_every_message_of_the_source_has_a_row():
    told, missing = [row[3] for row in ROWS], []
    for file, message in messages():
        text = fixed_part(message)
        if text in UNSEEN or ast.unparse(message) in MADE_BEFORE:
            continue
        if text is not None and any(re.search(pattern(text) + r"\Z", t, re.DOTALL) for t in told):
            continue
        if text is None or file.parts[0] not in WITH_TESTS or not compared_elsewhere(text):
            missing.append(f"{file}: {text or ast.unparse(message)}")
    assert not missing, "add a row that triggers each of these:\n" + "\n".join(missing)


def test_an_error_inside_f_passes_through_and_leaves_the_input_alone():
    z0 = torch.randn(3)
    before, count = z0.clone(), 0

    def fails(z):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyError("something of the user's own")
        return z.mul_(0.5)

    with pytest.raises(KeyError, match="something of the user's own"):
        revdeq.solve(fails, z0)
    assert torch.equal(z0, before)
    assert torch.is_grad_enabled()
