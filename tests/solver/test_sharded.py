"""fully_shard inside f: FSDP2 gathers the parameters for each evaluation and gets their whole gradient."""

import importlib
import itertools
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import revdeq
from revdeq.baselines import stored_graph

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, z, x):
        return torch.tanh(self.out(torch.tanh(self.linear(z))) + x)


class Model(nn.Module):
    """A layer around a module, or a solve with a closure over one."""

    def __init__(self, kind="layer", **settings):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.kind, self.settings = nn.Linear(6, 6), nn.Linear(6, 2), kind, settings
        self.deq = revdeq.RevDEQ(Block(), max_steps=3, **settings)

    def forward(self, x):
        x = self.encoder(x)
        if self.kind == "layer":
            return self.head(self.deq(x))
        f = self.deq.f
        if self.kind == "stored graph":
            return self.head(stored_graph(f, torch.zeros_like(x), x, max_steps=3))
        settings = {"max_steps": 3, **self.settings}
        return self.head(revdeq.solve(lambda z: f(z, x), torch.zeros_like(x), **settings).z)


def data(step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def trained(model, share, updates=3):
    """The parameters after some updates: each must use the gradient of its own batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(updates):
        optimizer.zero_grad()
        model(share(step)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()}


def check(rank, size):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def share(step):
        return data(step).chunk(size)[rank]

    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    of_float32 = trained(Model("stored graph"), data)
    for root, reshard, policy in itertools.product((False, True), (False, True), (None, low)):
        options = {"reshard_after_forward": reshard, **({} if policy is None else {"mp_policy": policy})}

        def sharded(kind, root=root, options=options, **settings):
            model = Model(kind, **settings)
            fully_shard(model.deq.f, **options)
            if root:
                fully_shard(model)
            else:  # parameters that are not sharded are averaged as by DDP
                for module in (model.encoder, model.head):
                    for p in module.parameters():
                        p.register_hook(lambda g: _averaged(g, size))
            return model

        # bfloat16 is rounded where FSDP rounds
        expected = of_float32 if policy is None else trained(sharded("stored graph"), share)
        for kind, state in itertools.product(("layer", "closure"), ("float64", "exact")):
            ours = trained(sharded(kind, state=state), share)
            for name, p in expected.items():
                # float32 sums in another order; with bfloat16 parameters, roundings of gradients that are summed in it
                torch.testing.assert_close(ours[name], p, rtol=0, atol=1e-5 if policy is None else 2e-3, msg=name)
    check_inputs_only(rank, size)
    check_tolerance(size)


def _averaged(g, size):
    g = g.clone()
    dist.all_reduce(g)
    return g / size


def check_inputs_only(rank, size):
    from torch.distributed.fsdp import fully_shard

    deq = revdeq.RevDEQ(Block(), max_steps=3)
    fully_shard(deq.f)
    x = data(0).requires_grad_()
    torch.autograd.grad(deq(x).sum(), x)
    assert all(p.grad is None for p in deq.parameters()), "autograd.grad accumulates nothing"


def check_tolerance(size):
    from torch.distributed.fsdp import fully_shard

    deq = revdeq.RevDEQ(Block(), tol=1e-3)
    fully_shard(deq.f)
    if size == 1:
        deq(data(0)).sum().backward()
    else:
        with pytest.raises(ValueError, match="tol .*fully_shard"):
            deq(data(0))


def work(rank, port, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        check(rank, size)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # torch's device meshes keep the group alive, and its threads can abort a process at exit


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="FSDP2 of this torch does not gather parameters for an evaluation within a backward pass (2.10; 2.13 does)",
)
@pytest.mark.parametrize("size", [1, 2])
def test_fully_shard_inside_f(size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # other processes can import pytest's name of this module only from the repository's folder
    mp.spawn(importlib.import_module("test_sharded").work, (port, size), nprocs=size)
