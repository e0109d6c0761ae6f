"""ResNet-18 on one GPU or CPU, in plain PyTorch; plain_ddp.py is the same on several.

python plain_single.py       Run again with the same options, it goes on.
"""

import plain_common as common
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torchvision.models import resnet18


def main(args):
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    torch.manual_seed(0)
    model = resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    train, test = common.load_data(args.cifar10)
    micro_batch_size, num_steps = common.sizes(args, len(train))
    options = {"num_workers": args.num_workers, "pin_memory": on_gpu}
    batches = DataLoader(train, micro_batch_size, shuffle=True, **options)
    test_batches = DataLoader(test, micro_batch_size, **options)
    schedule = CosineAnnealingLR(optimizer, args.epochs * num_steps)

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    saved = common.load(args.checkpoint)
    for name in parts.keys() & saved.keys():
        parts[name].load_state_dict(saved[name])

    for epoch in range(saved.get("epoch", 0), args.epochs):
        torch.manual_seed(epoch)  # so that a resumed run draws the same order
        loaded = iter(batches)
        for k in range(num_steps * args.accumulate):
            images, labels = (t.to(device, non_blocking=True) for t in next(loaded))
            last = (k + 1) % args.accumulate == 0
            loss = F.cross_entropy(model(images), labels)
            (loss / args.accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        right = common.count_right(model, test_batches, device)
        print(f"epoch {epoch + 1}: {right} of {len(test)} right", flush=True)
        state = {name: part.state_dict() for name, part in parts.items()}
        common.save({**state, "epoch": epoch + 1}, args.checkpoint)


if __name__ == "__main__":
    main(common.parse_arguments())
