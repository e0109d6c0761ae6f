# %% [markdown]
# # Train ResNet-18: the whole training, and seven slips
#
# > My script runs on two GPUs. The loss falls. Is it right?
#
# A distributed script can be wrong in ways that no error message tells: it runs, the
# loss falls, and the numbers it prints are not those of the run. This lesson puts the
# three steps together into a whole training. First we write it the way one finds it in
# the article that this lab grew from and in many scripts since, then the way it should
# be, and *measure* what each mended slip changes.
#
# At the end of this notebook you will be able to
#
# - write the whole training of ResNet-18 on several ranks,
# - find seven slips in a script that seems to work, and say what each of them costs,
# - start the same run from a notebook, from a terminal and by `torchrun`, and open,
#   draw and resume what it leaves behind.
#
# It takes about 25 minutes. You know collectives, DDP and `DistributedSampler` from the
# lessons before.

# %% [markdown]
# ## The data: one variable
#
# `DATASET` chooses what we train on. `digits` needs no download. Of larger data sets we
# take as many images as there are digits, so that the lesson stays short; drop both
# limits to train for real.

# %%
from ddp_lab import TrainConfig

DATASET = "digits"  # or "fashion-mnist", "cifar10", "cifar100", "folder"

config = TrainConfig(
    dataset=DATASET,  # "folder" reads data/train/CLASS/*.jpg and data/test/CLASS/*.jpg
    download=True,
    image_size=16 if DATASET == "digits" else 32,  # pixels
    limit_train=1437,
    limit_test=360,
    epochs=2,
    global_batch_size=64,
    lr=0.025,
    schedule="constant",
    momentum=0.9,
    nesterov=False,
    weight_decay=0.0,
    device="cpu",  # "auto" on a machine with GPUs
)

# %% [markdown]
# ## The training as one often finds it
#
# Here it is, in one cell. It meets, wraps the model, shards the data, and trains. Two
# things are ours: the seed, so that you see what we see, and the line with
# `send_record`, which sends numbers to the picture below.
#
# **Predict:** seven things in it are wrong or missing. How many do you find?

# %%
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.models import resnet18

from ddp_lab import (
    build_model,
    eval_loader,
    evaluate,
    join_world,
    send_record,
    sum_over_ranks,
    train_loader,
    wrap_model,
)

# %% [markdown]
# Those were the imports, and this is the script:


# %%
def old_script(dataset, num_epochs):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    local_rank = parser.parse_args([]).local_rank  # torchrun gives no such argument
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(resnet18())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // 4, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * 2, momentum=0.9)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        running_loss = 0.0
        for step, (images, labels, _) in enumerate(loader, epoch * len(loader) + 1):
            loss = F.cross_entropy(model(images / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            send_record(step=step, loss=loss.item(), images=len(images))
        if local_rank == 0:
            print(f"epoch {epoch + 1}  loss ~ {running_loss / len(loader):.3f}")
    dist.destroy_process_group()
    return local_rank, model.module.state_dict()


# %% [markdown]
# `Workers` are two ranks that stay for the next cells. `LiveCurve` draws what they send
# while they train.
#
# **Predict:** only local rank 0 prints, one line an epoch. How many lines will there be
# after two epochs?


# %%
from ddp_lab import LiveCurve, Workers, load_dataset


def one_by_one(split):
    if DATASET == "folder":  # image files, opened when they are needed
        return split
    return TensorDataset(split.images, split.labels, torch.arange(len(split)))


data = load_dataset(config)
print(len(data.train), "images to train,", len(data.test), "to test")
workers = Workers(2)
old_curve = LiveCurve("The old script: the loss falls, so all is well?")
old_results = workers.run(old_script, one_by_one(data.train), 2, on_record=old_curve)

old = old_curve.history.steps
assert 4 < old[0]["loss"] < 10
assert old[-1]["loss"] < old[0]["loss"]

# %% [markdown]
# Black is the mean over ranks, coloured is what each rank has measured of its own
# samples. The loss falls nicely, and four lines were printed.
#
# ## Slip 1: an argument that nobody gives
#
# `torch.distributed.launch`, the launcher before `torchrun`, passed `--local_rank` to
# each process. `torchrun` does not: it sets `LOCAL_RANK` in the environment (PyTorch
# docs, [Transitioning from torch.distributed.launch to
# torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html)). The argument keeps
# its default.

# %%
who = [local_rank for local_rank, _ in old_results]
print("each rank's local rank, it thinks:", who)
print("ranks that print, save and take GPU 0:", who.count(0), "of", len(who))

# %% [markdown]
# Both ranks take themselves for the first. On GPUs, both would sit on GPU 0 while GPU 1
# is idle, and both would write the same checkpoint file.
#
# ## Slip 2: 1000 outputs for ten classes
#
# `resnet18()` is made for the 1000 classes of ImageNet. Nothing complains: labels 0 to
# 9 are legal among 1000.
#
# **Predict:** a network that knows nothing gives each of K classes the probability 1/K,
# so its loss is ln K. Where does the curve begin, and where should it?

# %%
from math import log

K = len(data.classes)
old_weights = old_results[0][1]
idle = sum(p[K:].numel() for k, p in old_weights.items() if k.startswith("fc"))
print(f"first loss ~ {old[0]['loss']:.1f}, ln 1000 = {log(1000):.1f}")
print(f"ln {K} = {log(K):.1f}")
print(f"parameters of classes that do not exist: {idle:,}")
print(f"bytes sent for them in vain, each step and rank: {4 * idle:,}")
assert abs(old[0]["loss"] - log(1000)) < 1

# %% [markdown]
# The first ten or so steps go into learning that 990 classes never occur. Their
# gradients travel nonetheless, to the end. (In a ring all-reduce each of W ranks sends
# 2 (W - 1) / W times the tensor's bytes: on two ranks, as many as it has.)
#
# ## Slips 3 and 4: a batch for four GPUs, a learning rate times 2
#
# `64 // 4` was right on the author's machine. And why times 2? There is a rule behind
# it: if the global batch grows by k, so may the learning rate. Goyal et al. trained
# ResNet-50 with 0.1 for 256 images, and k times that for k times as many ([Accurate,
# Large Minibatch SGD](https://arxiv.org/abs/1706.02677), section 2.1). It is a place to
# start from, and no law.
#
# **Predict:** how many images does one step of the optimiser see here?

# %%
per_rank = [own["images"] for own in old[0]["local"]]
old_batch = sum(per_rank)
print("images of each rank in step 1:", per_rank)
print(f"global batch: {old_batch}, where 64 was meant; on 8 GPUs {8 * (64 // 4)}")

for images, lr in [(old_batch, 0.001 * 2), (1024, 0.001 * 2), (64, config.lr)]:
    rule = 0.1 * images / 256
    print(f"batch {images:4}: lr {lr:.3f}, the rule says {rule:.4f}: {rule / lr:.1f} x")

# %% [markdown]
# Half of it, and double on eight GPUs: the same script is another training on each
# machine. The share must be computed from the world size.
#
# The 1024 images are the article's own setting. The factor 2 does not know how many
# ranks there are, and what it multiplies is far below what the rule proposes. We take
# 0.025 for 64 images, and can say why.
#
# ## Slip 5: rank 0's loss is not the run's
#
# The script prints the mean of what *one* rank has seen.
#
# **Predict:** how far is rank 0 from the run in a single step: 1 %, 10 %, more?

# %%
off = [abs(line["local"][0]["loss"] - line["loss"]) / line["loss"] for line in old]
old_off = max(off)
print(f"rank 0 and the run differ by ~ {sum(off) / len(off):.0%} in the mean step,")
print(f"by ~ {old_off:.0%} in the worst")
assert 0.01 < old_off < 1

# %% [markdown]
# Whoever compares two runs by such numbers compares the luck of rank 0. The mean of
# an epoch hides it, until ranks differ in more than luck: in data, or by a fault. If
# rank 1's loss becomes NaN, rank 0's says so a step too late.
#
# ## Slip 6: nobody asks what was learnt
#
# There is no evaluation. So let us do it here, with the weights that came back.
#
# **Predict:** how many of the test images are right?

# %%
old_model = resnet18()
old_model.load_state_dict(old_weights)
old_model.eval()
old_right = 0
with torch.no_grad():
    for images, labels, _ in DataLoader(one_by_one(data.test), 60):
        old_right += (old_model(images / 255).argmax(dim=1) == labels).sum().item()
print(f"{len(data.test)} test images, right: ~ {old_right}")
assert DATASET != "digits" or old_right > 100

# %% [markdown]
# A falling training loss could not have told that.
#
# ## Slip 7: waiting at every step
#
# A GPU works through a queue: Python puts work into it and goes on ([CUDA
# semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html), "Asynchronous
# execution"). `loss.item()` needs the number now, so Python waits until the queue is
# empty, and the GPU then waits for Python. On a CPU it costs nothing; the habit is the
# slip. Here it is once a step. The loss can stay on the device, and be read now and
# then.
#
# ## The training, mended
#
# These are the parts of the lessons before, from the package: `join_world` is step 1,
# `wrap_model` step 2, the loaders step 3. Compare it with the old one line by line.
#
# Each rank keeps, per step, the *sum* of its samples' losses. Added up over ranks and
# divided by the number of all samples, that is the loss of the run. One exchange an
# epoch is enough for all its steps.
#
# **Predict:** which lines of the old script have gone, and what took their place?


# %%
def train(config, data):
    with join_world(device=config.device) as world:  # LOCAL_RANK: environment
        share, _ = config.batches(world.world_size)  # or an error, if it has a rest
        model = wrap_model(build_model(config, len(data.classes)), world)
        shard = train_loader(data, config, world, share)
        test_shard = eval_loader(data, config, world, share)
        optimizer = torch.optim.SGD(model.parameters(), config.lr, config.momentum)
        losses = []
        for epoch in range(config.epochs):
            shard.set_epoch(epoch)
            sums = []
            for images, labels in shard:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sums.append(loss.detach() * len(labels))  # stays on the device
            total = sum_over_ranks(torch.stack(sums)) / config.global_batch_size
            losses += total.tolist()  # the run's loss, step by step
            test = evaluate(model.module, test_shard, world.device)
            if world.rank == 0:
                loss, right = total.mean(), test["num_correct"]
                print(f"epoch {epoch + 1}  loss ~ {loss:.3f}  right ~ {right}")
        return losses, test, world.local_rank, share


# %% [markdown]
# It has the old one's length. The ranks are the same two, and so is the number of
# epochs.

# %%
results = workers.run(train, config, data)
losses, test, _, _ = results[0]

print(f"{test['num_samples']} test images, right: ~ {test['num_correct']}")
assert results[0][:2] == results[1][:2]  # every rank knows the run's numbers
assert DATASET != "digits" or test["num_correct"] > 100

# %% [markdown]
# One line an epoch. Both ranks hold the same losses and the same test result, and each
# test image was counted once.
#
# ## What each slip was worth
#
# Nothing in this table is typed in: it comes from the two runs.

# %%
num_old = sum(p.numel() for p in old_model.parameters())
num_new = sum(p.numel() for p in build_model(config, K).parameters())
first_ranks = [local_rank for _, _, local_rank, _ in results].count(0)
batch = sum(share for *_, share in results)
new_off = max(abs(a - b) for a, b in zip(results[0][0], results[1][0], strict=True))
rows = [
    ("", "old", "mended"),
    ("1 ranks that think they are first", who.count(0), first_ranks),
    ("2 parameters", f"{num_old:,}", f"{num_new:,}"),
    ("  first loss (nats)", f"~ {old[0]['loss']:.1f}", f"~ {losses[0]:.1f}"),
    ("3 images a step (64 meant)", old_batch, batch),
    ("4 learning rate / the rule's", f"{0.002 * 2560 / old_batch:.2f}", "1.00"),
    ("5 loss off by at most", f"~ {old_off:.0%}", f"{new_off:.0%}"),
    ("6 test images evaluated", 0, test["num_samples"]),
    ("  of these right", f"(~ {old_right})", f"~ {test['num_correct']}"),
    ("7 waits for a loss", len(old), config.epochs),
]
for what, before, after in rows:
    print(f"{what:34}{before:>12}{after:>12}")
assert (new_off, batch) == (0, 64)

# %% [markdown]
# One row is a surprise: the old script is ahead in the test. Its batch is half of what
# was meant, so two epochs were twice as many steps, and on so small a task steps are
# what counts. This is how slips live on: nothing complains, and the result looks fine,
# for a reason that nobody wrote down. On eight GPUs the same script would make a
# quarter of these steps.
#
# ## The same with curves, records and checkpoints
#
# `fit_on_rank` of the package is this loop, with a line of history a step, each rank's
# own loss beside the run's, a checkpoint an epoch, and a check that all ranks mean the
# same run. (At `log_every=1` it waits at each step too, for the sake of the curve; on a
# GPU take more.) We give it four epochs: 88 steps, nearly as many as the old script
# had.
#
# **Predict:** the first two epochs have the same settings as above. How far apart will
# the two loss curves be? And how many images are right after four?

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

from ddp_lab import Run, fit_on_rank

scratch = tempfile.TemporaryDirectory()  # goes with the kernel
home = Path(scratch.name)
longer = replace(config, epochs=4)
curve = LiveCurve("ResNet-18 on two ranks: the run, its ranks, its test")
options = {"on_line": send_record, "on_record": curve}  # a rank sends, we draw
workers.run(fit_on_rank, longer, home / "runs/notebook", data, **options)
workers.close()

run = Run.open(home / "runs/notebook")
again = [line["loss"] for line in run.history.steps[: len(losses)]]
off = max(abs(a - b) for a, b in zip(losses, again, strict=True))
print(f"{len(again)} steps, largest difference to the loop above: ~ {off:.0e}")
print(f"right after {longer.epochs} epochs: ~ {run.history.evals[-1]['num_correct']}")
assert off < 1e-3

# %% [markdown]
# The same curve; and with as many steps, about as many images are right. Look at the
# coloured lines: they cross the black one all the time, because a rank's half of a
# batch is now the harder one, now the easier one. The black line is what the optimiser
# follows. An orange arrow, if there is one, is a test loss far above the frame: after
# one epoch BatchNorm's running averages are not yet right.
#
# ## What the run leaves behind
#
# `Run.open` reads a run's folder. Each line of its history has the run's numbers, and
# apart from them, under `local`, those of each rank.

# %%
print(sorted(path.name for path in run.folder.iterdir()))
line = run.history.steps[-1]
print("epoch", line["epoch"], "step", line["step"], "ranks", len(line["local"]))
mean = sum(own["loss"] for own in line["local"]) / len(line["local"])
print(f"mean of the local losses ~ {mean:.4f}, the run's ~ {line['loss']:.4f}")
assert abs(mean - line["loss"]) < 1e-5

# %% [markdown]
# Equal shares, so the plain mean is the loss of the run. Drawn from the same file, this
# is what a script shows you that prints rank 0's loss:

# %%
import matplotlib.pyplot as plt

from ddp_lab import rank_colour, style

with plt.rc_context({**style(), "figure.figsize": (6.4, 2.6)}):
    figure, axes = plt.subplots()
    for rank in (0, 1):
        off = [
            100 * (line["local"][rank]["loss"] / line["loss"] - 1)
            for line in run.history.steps
        ]
        axes.plot(
            range(1, len(off) + 1), off, color=rank_colour(rank), label=f"rank {rank}"
        )
    axes.axhline(0, color="#222222", label="the run")
    axes.set(xlabel="optimiser step", ylabel="off the run's loss (%)")
    axes.set_title("The smaller the loss, the less one rank tells of it")
    axes.set_ylim(-110, 160)  # room for the legend
    axes.legend(ncols=3, loc="upper left")
    plt.show()

# %% [markdown]
# The two are mirror images, as two ranks and their mean must be. As the loss falls, a
# few hard images decide over it, and it matters more and more which rank has got them.
#
# ## From the terminal
#
# Every setting is an option of `python -m ddp_lab.train`. The next cell runs a command
# as a terminal would, and marks what varies by a tilde. 256 images keep it short.

# %%
import re
import shlex
import subprocess
import sys


def terminal(command):
    program, *arguments = shlex.split(command)
    module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    line = [sys.executable, *module, *arguments]
    done = subprocess.run(line, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(re.sub(r"\d+\.\d+|\d+(?= images/s| of )", r"~ \g<0>", done.stdout), end="")


terminal(
    "python -m ddp_lab.train --device cpu --num-ranks 2 --image-size 16 --epochs 1 "
    "--limit-train 256 --lr 0.025 --schedule constant --out runs/terminal"
)

# %% [markdown]
# The program started its two ranks itself, and its last line says where the picture is.
# After four steps the test result is no better than a guess: BatchNorm's running
# averages have hardly begun to follow the weights.
#
# ## Under torchrun, and going on
#
# On several GPUs or machines, `torchrun` starts the processes, and the program joins
# them. `--resume` opens a run's folder and goes on where its checkpoint stands, with
# the settings written there. So this continues the run of the cell above for a second
# epoch, under another launcher.
#
# **Predict:** 256 images are 4 steps an epoch. Which steps will the history hold?

# %%
terminal(
    "torchrun --standalone --nproc-per-node 2 -m ddp_lab.train "
    "--resume runs/terminal --epochs 2"
)
resumed = Run.open(home / "runs/terminal")
print("steps:", [line["step"] for line in resumed.history.steps])
print("files:", sorted(path.name for path in resumed.folder.iterdir()))
assert [line["epoch"] for line in resumed.history.evals] == [1, 2]

# %% [markdown]
# One history without a seam: weights, momentum, order of the images and learning rate
# were those that the first part left. `config.json` and `environment.json` tell what
# was run and where, and `loss.png` is the curve. To use the weights elsewhere:
#
# ```
# state = torch.load("runs/terminal/checkpoint.pt", weights_only=True)
# model = resnet18(num_classes=10)
# model.load_state_dict(state["model"])
# ```
#
# They carry no `module.` in their names, so no DDP is needed to load them.

# %% [markdown]
# ## Summary
#
# - A rank learns who it is from the environment; its batch is computed from the world
#   size; the model has as many outputs as there are classes.
# - The loss of the run is a sum over ranks, divided by the number of samples. What one
#   rank has measured is not the run's.
# - Evaluate, each sample once. Keep the loss on the device, and read it now and then.
# - A learning rate belongs to a global batch. Write down which.
# - One program runs from a notebook, a terminal and `torchrun`; its folder tells what
#   was run, and can be opened and resumed.
#
# ## Exercises
#
# **1.** Mend slip 5 for the general case: the ranks may have different numbers of
# samples, and one may have none. `check("global_loss")` tells the task.


# %%
import torch
import torch.distributed as dist

from ddp_lab import check


def global_loss(loss_sum, num_samples):
    # BEGIN SOLUTION
    tally = torch.tensor([loss_sum, num_samples], dtype=torch.float64)
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()
    # STUB
    # raise NotImplementedError("add up both, then divide once")
    # END SOLUTION


# %%
check(global_loss, "global_loss")

# %% [markdown] tags=["solution"]
# The mean of the ranks' means would weigh the samples of a small share more than those
# of a large one, and fail on an empty one. Both numbers travel in one message.

# %% [markdown]
# **2.** One rank's loss is NaN, and it leaves the loop. The others wait for it in the
# next all-reduce, for ever. A decision to stop must be the same on all ranks.


# %%
def should_stop(wants_to_stop):
    # BEGIN SOLUTION
    wish = torch.tensor(int(wants_to_stop))
    dist.all_reduce(wish, op=dist.ReduceOp.MAX)
    return bool(wish.item())
    # STUB
    # raise NotImplementedError("how can one wish become everybody's?")
    # END SOLUTION


# %%
check(should_stop, "should_stop")

# %% [markdown] tags=["solution"]
# The maximum of wishes is 1 as soon as one rank has one. All ranks must ask at the same
# step, also those that want to go on.

# %% [markdown]
# **3.** Choose another `DATASET` at the top, or put three folders of your own photos
# into `data/train` and `data/test` and choose `"folder"`. Predict the first loss before
# you run it. Which of the seven slips becomes worse with three classes, and which with
# 100?
#
# ## Next
#
# The curve of this run came from two ranks. The next notebook shows that one rank or
# four give the same one, and what it takes.
