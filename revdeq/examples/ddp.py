"""Data-parallel training of an equilibrium model, with DDP as usual.

torchrun --nproc-per-node 2 -m revdeq.examples.ddp
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import revdeq
from revdeq.cli.demo import Digits
from revdeq.examples import needs
from revdeq.models import ConvBlock


def classifier(channels: int = 16) -> nn.Module:
    encoder = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(4, channels))
    equilibrium = revdeq.RevDEQ(ConvBlock(channels, width=2), beta=0.5, max_steps=4)
    return nn.Sequential(encoder, equilibrium, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))


def main() -> None:
    needs("sklearn")  # the digits
    if "RANK" not in os.environ:
        raise SystemExit(f"start it with torchrun: {(__doc__ or '').splitlines()[-1]}")
    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    digits = Digits.load()
    data = TensorDataset(digits.images, digits.labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)

    torch.manual_seed(dist.get_rank())  # DDP broadcasts the parameters of rank 0
    model = DistributedDataParallel(classifier().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    ours = nn.utils.parameters_to_vector(model.parameters()).detach()
    every = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(every, ours)
    equal = all(torch.equal(theirs, ours) for theirs in every)
    with torch.no_grad():
        right = model.module(digits.test_images.to(device)).argmax(1) == digits.test_labels.to(device)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, their parameters {'equal' if equal else 'DIFFER'}, bit for bit")
        print(f"{right.float().mean():.1%} of the test digits right")
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
