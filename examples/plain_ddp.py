"""ResNet-18 on several GPUs or CPU ranks, in plain PyTorch: a file to start from.

torchrun --standalone --nproc-per-node 2 plain_ddp.py        or on each of two machines
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
    plain_ddp.py
Run again with the same options, it goes on; rank 0's machine has the checkpoint.
"""

import contextlib
import os

import plain_common as common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.models import resnet18

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}


def main(args):
    os.environ.update({"MASTER_ADDR": "localhost", **ALONE, **os.environ})
    on_gpu = torch.cuda.device_count() >= int(os.getenv("LOCAL_WORLD_SIZE", "1"))
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = resnet18(num_classes=10).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    train, test = common.load_data(args.cifar10)
    micro_batch_size, num_steps = common.sizes(args, len(train), world_size)
    options = {"num_workers": args.num_workers, "pin_memory": on_gpu}
    sampler = DistributedSampler(train)
    batches = DataLoader(train, micro_batch_size, sampler=sampler, **options)
    share = Subset(test, range(rank, len(test), world_size))  # each image once
    test_batches = DataLoader(share, micro_batch_size, **options)
    schedule = CosineAnnealingLR(optimizer, args.epochs * num_steps)

    parts = {"model": model.module, "optimizer": optimizer, "schedule": schedule}
    saved = [common.load(args.checkpoint) if rank == 0 else {}]
    dist.broadcast_object_list(saved)  # other machines may not have the file
    for name in parts.keys() & saved[0].keys():
        parts[name].load_state_dict(saved[0][name])

    for epoch in range(saved[0].get("epoch", 0), args.epochs):
        torch.manual_seed(epoch * world_size + rank)  # each rank draws its own crops
        sampler.set_epoch(epoch)
        loaded = iter(batches)
        for k in range(num_steps * args.accumulate):
            images, labels = (t.to(device, non_blocking=True) for t in next(loaded))
            last = (k + 1) % args.accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(images), labels)
                (loss / args.accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        for buffer in model.buffers():  # BatchNorm's statistics differ by rank
            dist.broadcast(buffer, 0)
        right = common.count_right(model.module, test_batches, device)
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch + 1}: {right} of {len(test)} right", flush=True)
            state = {name: part.state_dict() for name, part in parts.items()}
            common.save({**state, "epoch": epoch + 1}, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_arguments())
