"""Two processes, each with half of the batch, compute the gradient of one process with all of it, and share the tuned
coefficients."""

import importlib
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plain import Block
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import revdeq

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo")


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.deq = revdeq.RevDEQ(Block(), **options)
        self.closure = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x, use_all=False):
        x = self.encoder(x)
        z = self.deq(x) + revdeq.solve(lambda z: torch.tanh(self.closure(z) + x), torch.zeros_like(x)).z
        return self.head(self.unused(z) if use_all else z)


def data():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def agree(ours, expected):
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        # float32 sums in another order: a few roundings of the largest gradient
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def alone(use_all):
    model = Model()
    model(data(), use_all).square().mean().backward()
    return gradients(model)


def share(rank):
    return data()[4 * rank : 4 * rank + 4]


def check_ddp_with_gradient_accumulation(rank):
    for unused in (False, True):
        model = DistributedDataParallel(Model(), find_unused_parameters=unused)
        first, second = share(rank).split(2)
        with model.no_sync():
            (model(first, not unused).square().mean() / 2).backward()
        (model(second, not unused).square().mean() / 2).backward()
        agree(gradients(model.module), alone(use_all=not unused))


def check_fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard(model.deq)
    fully_shard(model)
    model(share(rank), True).square().mean().backward()
    full = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    agree(full, alone(use_all=True))


def pair(model):
    return model.deq.beta, model.deq.gamma, model.deq.state


def check_coefficients_are_the_same_everywhere(rank):
    """All processes get those that the first one finds."""
    model = Model()
    parallel, used = DistributedDataParallel(model), [None, None]
    model.deq.tune(share(rank))
    dist.all_gather_object(used, pair(model))
    alone = revdeq.tune(model.deq.f, torch.zeros(4, 6), share(0), max_steps=8)
    assert used == [(alone.beta, alone.gamma, alone.state)] * 2
    parallel(share(rank), True).square().mean().backward()


def check_coefficients_are_loaded(rank, folder):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    for shard in (lambda model: model, fully_shard):
        old, new, third = shard(Model()), shard(Model()), shard(Model())
        whole = Model()
        for model in (old, whole):
            model.deq.use(0.75, 1.25, "exact")
        path, loaded = os.path.join(folder, shard.__name__.strip("<>")), {"model": new.state_dict()}
        checkpoint.save({"model": old.state_dict()}, checkpoint_id=path)
        checkpoint.load(loaded, checkpoint_id=path)
        new.load_state_dict(loaded["model"])
        assert pair(new) == (0.75, 1.25, "exact")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(third, whole.state_dict() if rank == 0 else {}, options=options)
        assert pair(third) == (0.75, 1.25, "exact")


def check_fully_shard_inside_f(rank):
    """FSDP2 gathers the parameters for each evaluation, and gets their whole gradient."""
    from torch.distributed.fsdp import fully_shard

    def trained(model, share):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(2):  # each update must use the gradient of its own batch
            optimizer.zero_grad()
            model(share, True).square().mean().backward()
            optimizer.step()
        return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}

    expected = trained(Model(), data())
    for reshard, state in ((False, "float64"), (True, "float64"), (True, "exact")):
        model = Model(state=state)
        fully_shard(model.deq.f, reshard_after_forward=reshard)
        fully_shard(model.closure, reshard_after_forward=reshard)
        fully_shard(model)
        for name, p in trained(model, share(rank)).items():
            torch.testing.assert_close(p, expected[name], rtol=0, atol=1e-5, msg=name)


def work(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        check_ddp_with_gradient_accumulation(rank)
        check_fsdp(rank)
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # earlier ones gather nothing in an evaluation
            check_fully_shard_inside_f(rank)
        check_coefficients_are_the_same_everywhere(rank)
        check_coefficients_are_loaded(rank, folder)
    finally:
        dist.destroy_process_group()
    os._exit(0)  # torch's device meshes keep the group alive, and its threads can abort a process at exit


def test_ddp_and_fsdp_with_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # other processes can import pytest's name of this module only from the repository's folder
    mp.spawn(importlib.import_module("test_distributed").work, (port, str(tmp_path)), nprocs=2)
