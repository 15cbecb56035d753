"""What the compiler makes of the Triton kernels, for GPUs that need not be here."""

import re
import struct

import pytest
import torch
from gpu_targets import TARGETS, compiling, skip_without_the_compiler

skip_without_the_compiler()

from revdeq.kernels import exact, gpu, gpu_exact  # noqa: E402

BETA = torch.tensor(0.8, dtype=torch.float32).item()


def launch(operation, dtype, n=100_003):
    half_step = gpu.HalfStep(torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=dtype), BETA)
    wide = torch.promote_types(dtype, torch.float32)
    adjoint, vjp = torch.zeros(n, dtype=wide), torch.zeros(n, dtype=dtype)
    extra = {"invert_adjoint": (adjoint, vjp), "invert_compare": (vjp, adjoint, vjp)}.get(operation, ())
    getattr(half_step, operation)(torch.zeros(n, dtype=dtype), *extra)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operation", ["relax", "relax_norms", "invert", "invert_adjoint", "invert_compare"])
def test_no_shared_memory_no_barrier_no_spill_and_beta_in_float64(target, operation):
    with compiling(TARGETS[target]) as compiled:
        launch(operation, torch.float32)
    (kernel,) = compiled
    assert kernel.metadata.shared == 0
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        assert "s_barrier" not in text
        assert re.search(r"vgpr_spill_count: +0\b", text) and re.search(r"sgpr_spill_count: +0\b", text)
        assert re.search(r"(global|buffer)_load_(dwordx4|b128)", text)
        return
    text = kernel.asm["ptx"]
    assert "bar." not in text and ".local" not in text
    assert "fma.rn.f" not in text, "a contracted multiply-add changes the bits"
    assert re.search(r"(ld\.global|st\.global)\.v2\.b64", text), "float64 moves in 16-byte accesses"
    beta, a = (f"0d{struct.pack('>d', x).hex().upper()}" for x in (BETA, 1 - BETA))
    assert beta in text and a in text
    if operation == "relax":
        assert len(re.findall(r"\bdiv\.", text)) == 0


def test_a_power_of_two_is_multiplied_and_not_divided():
    with compiling(TARGETS["sm_90"]) as compiled:
        for beta in (0.5, 1.5, 0.8):
            gpu.HalfStep(torch.zeros(4096, dtype=torch.float64), torch.zeros(4096), beta).invert(torch.zeros(4096))
    assert ["div.rn.f64" in kernel.asm["ptx"] for kernel in compiled] == [False, False, True]


def test_a_chunk_begins_at_a_64_bit_offset():
    """So that there may be more than 2^31 elements."""
    with compiling(TARGETS["sm_90"]) as compiled:
        for operation in ("relax", "relax_norms", "invert_adjoint", "invert_compare"):
            launch(operation, torch.float32)
    for kernel in compiled:
        products = re.findall(r"arith\.(?:muli|shli) .* : (\w+)", kernel.asm["ttir"])
        assert products and set(products) == {"i64"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operation", ["relax", "relax_norms", "spill", "invert_adjoint", "invert_compare"])
@pytest.mark.parametrize("beta", [0.8, 0.6])
def test_the_integer_state_needs_no_float64_no_shared_memory_and_no_barrier(target, operation, beta):
    n = 100_003
    f, vjp = torch.zeros(n), torch.zeros(n)
    with compiling(TARGETS[target]) as compiled:
        radix = exact.Radix.nearest(beta, 24)
        half_step = gpu_exact.HalfStep(torch.zeros(n, dtype=torch.int64), torch.zeros(n), radix, 30)
        if operation == "invert_adjoint":
            half_step.done = 1
            half_step.invert_adjoint(f, torch.zeros(n), vjp)
        elif operation == "invert_compare":
            half_step.invert_compare(f, vjp, torch.zeros(n), vjp)
        elif operation == "spill":
            half_step.done = radix.free_half_steps
            half_step.relax(f)
        else:
            getattr(half_step, operation)(f)
    (kernel,) = compiled
    assert kernel.metadata.shared == 0
    text = kernel.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    if target.startswith("gfx"):
        assert "s_barrier" not in text
        assert not re.search(r"v_\w+_f64", text)
        assert re.search(r"vgpr_spill_count: +0\b", text)
    else:
        assert not re.search(r"\bbar\.|\.local|\.f64", text)
        assert "fma.rn.f" not in text
        assert re.search(r"(ld\.global|st\.global)\.v2\.b64", text)
