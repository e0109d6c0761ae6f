# %% [markdown]
# # Start here: one model, several processes
#
# > My GPU has too little memory for the batch size I want. How do I train on several?
#
# That question has a good answer in PyTorch: `DistributedDataParallel`, or DDP. This
# lab lets you run the answer piece by piece, on any computer. No GPU is needed: two
# processes on a CPU talk to each other by the same calls as eight GPUs do.
#
# At the end of this notebook you will be able to
#
# - start several processes from a cell, and say what they share and what they do not,
# - name the three steps that turn a training script into a distributed one,
# - train a first model on two ranks, and show that one rank would train the same.
#
# It takes about 20 minutes.

# %% [markdown]
# ## The idea in three steps
#
# The batch is cut into parts, and each process works on one part with its own copy of
# the model. Three things have to be settled, and each has its tool:
#
# | step | question | answer in PyTorch |
# |---|---|---|
# | 1 | Who am I, and how do the processes meet? | `init_process_group` |
# | 2 | How do the copies of the model stay one model? | `DistributedDataParallel` |
# | 3 | Who sees which sample? | `DistributedSampler` |
#
# A *rank* is one of the processes, and also its number, counted from 0. The *world
# size* is how many there are. Here is one step of two ranks, for a batch of 8 samples.

# %%
import matplotlib.pyplot as plt

from ddp_lab import plot_three_steps

plot_three_steps()
plt.show()

# %% [markdown]
# Read it from left to right, and note where the two ranks need each other: for the mean
# of the gradients, and for nothing else. You will run each part in this notebook.
#
# What have we got to work with?

# %% tags=["nbval-ignore-output"]
import os

import torch
import torch.distributed as dist

print(f"PyTorch {torch.__version__}")
print(f"{os.cpu_count()} CPU cores, {torch.cuda.device_count()} GPUs")
assert dist.is_available()

# %% [markdown]
# Two cores are enough for everything here.
#
# ## Two processes say hello
#
# `launch` starts a function on several ranks, waits for all of them, and brings back
# what each one returned. It starts them with PyTorch's `torch.multiprocessing.spawn`,
# and tells each its place through environment variables, as PyTorch's launcher
# `torchrun` does.
#
# **Predict:** how many lines will the next cell print, and what is in the list?

# %%
from ddp_lab import launch


def hello():
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    print(f"hello, I am rank {rank} of {world_size}")
    return int(rank) * 10


launch(hello, num_ranks=2)

# %% [markdown]
# One line a rank, and one return value a rank, in rank order. Both ran the *same*
# function; only what they read from their environment made them different. That is how
# all distributed training in PyTorch works: one program, started several times.
#
# ## What do they share?
#
# **Predict:** each rank adds its number to `total`. What is `total` here afterwards?

# %%
total = 100


def add_my_rank():
    global total
    total += int(os.environ["RANK"])
    return total


print("in the ranks:", launch(add_my_rank, num_ranks=2))
print("here:", total)

# %% [markdown]
# Nothing is shared. Every rank is a process of its own, with its own memory and its
# own copy of `total`; what it changes, nobody else sees. This is why copies of a model
# would drift apart if nobody cared for them.
#
# ## Step 1: meet
#
# To exchange anything, the ranks must first meet: each calls `init_process_group`. From
# then on they can use *collectives*, operations in which every rank takes part. The one
# that matters most is the all-reduce: each rank brings a tensor, and each leaves with
# the sum of all.
#
# Before it meets the others, a rank picks its device: the GPU whose number is its local
# rank, which is its number among the ranks of this machine; or the CPU, if there are
# not enough GPUs. The *backend* that carries the data goes with it: `nccl` between
# GPUs, `gloo` between CPUs.
#
# **Predict:** rank 0 brings 1 and rank 1 brings 2. Who holds what in the end?


# %%
def meet():
    has_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    return device


def bring_and_sum():
    device = meet()
    tensor = torch.tensor([dist.get_rank() + 1], device=device)
    dist.all_reduce(tensor)
    total = tensor.item()
    dist.destroy_process_group()
    return total


launch(bring_and_sum, num_ranks=2)

# %% [markdown]
# Both hold 3, and no rank is the boss: all call the same function, and all get the
# result. `meet` is step 1 as you will need it. `set_device` makes this rank's GPU the
# one that plain `"cuda"` means, so that no tensor lands on another rank's GPU by
# mistake. (All code of this notebook is written for CPUs and GPUs; what you see was
# computed on CPUs, and on GPUs it was not run here.)
#
# ## Something to learn
#
# 1797 handwritten digits of 8 x 8 pixels ship with scikit-learn. `load_dataset`
# shuffles them, always in the same way, and sets 360 of them aside to test with.

# %%
from torch.utils.data import TensorDataset

from ddp_lab import TrainConfig, load_dataset

digits = load_dataset(TrainConfig(dataset="digits", image_size=8))
images, labels = digits.train.images[:, 0] / 255, digits.train.labels  # one colour
dataset = TensorDataset(images, labels)
test_images, test_labels = digits.test.images[:, 0] / 255, digits.test.labels
print(len(dataset), "to train,", len(test_labels), "to test,", tuple(images[0].shape))

# %% [markdown]
# Here are the first ten of them.

# %%
from ddp_lab import RANK_COLOURS, style

with plt.rc_context({**style(), "figure.figsize": (6.4, 1.2)}):
    figure, axes = plt.subplots(1, 10)
    for axis, image, label in zip(axes, images, labels, strict=False):
        axis.imshow(image, cmap="gray_r")
        axis.set_title(label.item())
        axis.axis("off")
    plt.show()

# %% [markdown]
# A small network will do: 64 numbers in, one score for each of the ten digits out.

# %%
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


print(sum(p.numel() for p in make_model().parameters()), "parameters")

# %% [markdown]
# ## The whole training in one cell
#
# This is an ordinary training loop, in which the three steps are marked. Read those
# lines closely; everything else you know.
#
# Two things are easy to miss. The batch size of a rank is its *share* of the global
# batch, so that the optimiser sees the same number of samples whatever the world size.
# And there is no line that exchanges gradients: `loss.backward()` does it, because DDP
# has put itself into the backward pass. On a GPU, `device_ids` tells DDP which one.

# %%
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(num_epochs, global_batch_size):
    device = meet()  # step 1: meet
    gpus = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(make_model().to(device), device_ids=gpus)  # step 2
    sampler = DistributedSampler(dataset, drop_last=True)  # step 3: shards
    share = global_batch_size // dist.get_world_size()
    loader = DataLoader(dataset, share, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over ranks
            optimizer.step()
            losses.append(loss.item())
    dist.destroy_process_group()
    return losses, model.module.state_dict()


# %% [markdown]
# **Predict:** after training, are the two ranks' weights equal? And the losses that the
# two ranks have seen on the way?

# %%
results = launch(train, 6, 64, num_ranks=2)
(losses_0, weights_0), (losses_1, weights_1) = results

print("steps:", len(losses_0))
print("weights equal:", all(weights_0[k].equal(weights_1[k]) for k in weights_0))
print("losses equal:", losses_0 == losses_1)

# %% [markdown]
# The weights are equal to the last bit: both ranks started from the same ones and took
# the same steps, since each step used the *averaged* gradients. The losses differ,
# because each rank measured its own half of each batch. The loss of the run is their
# mean.

# %%
losses = [(a + b) / 2 for a, b in zip(losses_0, losses_1, strict=True)]

with plt.rc_context(style()):
    figure, axes = plt.subplots()
    for rank, own in enumerate([losses_0, losses_1]):
        label = f"rank {rank}, its own half of the batch"
        axes.plot(own, color=RANK_COLOURS[rank], alpha=0.4, label=label)
    axes.plot(losses, color="#222222", label="the run: mean over ranks")
    axes.set(xlabel="optimiser step", ylabel="loss (nats, log scale)", yscale="log")
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2.3]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title("Each rank sees a noisier loss than the run has")
    axes.legend()
    plt.show()

# %% [markdown]
# This picture is worth a second look, since many scripts print the loss of rank 0 and
# call it the loss of the run. It is one of the coloured lines, not the black one.
#
# The unit comes with the cross-entropy, which is minus the natural logarithm of the
# probability that the model gives to the right digit, averaged over images. Whoever
# guesses gives each of ten digits 1/10, that is ln 10 = 2.3 *nats*, and there the
# curves begin. At 0.1 nats the probability is e^-0.1, or 90 %.
#
# How good is the model? We test it here, in the notebook's own process, with the
# weights that came back.

# %%
model = make_model()
model.load_state_dict(weights_0)
with torch.no_grad():
    correct = (model(test_images).argmax(dim=1) == test_labels).sum().item()
print(f"{len(test_labels)} test images, right: ~ {correct}")
assert correct > 320

# %% [markdown]
# ## Is it the same as one process?
#
# Now the promise behind all this. Run the same function on *one* rank: the global batch
# is still 64, so that rank takes all of it.
#
# **Predict:** how far apart will the two curves be?

# %%
((losses_alone, weights_alone),) = launch(train, 6, 64, num_ranks=1)

difference = max(abs(a - b) for a, b in zip(losses, losses_alone, strict=True))
print(f"largest difference between the losses of 132 steps: ~ {difference:.0e}")
assert len(losses_alone) == 132
assert difference < 1e-3

# %% [markdown]
# They are the same curve. What is left is rounding: the mean of two means is rounded
# otherwise than one mean over all. Splitting the work over ranks has changed *where* it
# is done, and not what is computed. So if you can train a model with a batch of 64, and
# have two GPUs with room for 32 each, you can train the very same model.
#
# The equality is not free. It holds because the sampler deals out the same global
# batches, because each rank's batch is its share, and because this model has no layer
# that looks at the whole batch. The later notebooks take these away one at a time.

# %% [markdown]
# ## The same for real
#
# The package `ddp_lab` contains a full training program: ResNet-18, checkpoints, exact
# evaluation, a record of the run. Its settings are one object. We ask for two ranks,
# which take GPUs if there are two, and else the CPU. `LiveCurve` draws the loss while
# they train: watch it grow.

# %%
import tempfile
from pathlib import Path

from ddp_lab import LiveCurve
from ddp_lab import train as train_resnet18

scratch = tempfile.TemporaryDirectory()  # goes with the kernel
folder = Path(scratch.name) / "first"
config = TrainConfig(epochs=2, num_ranks=2, out=folder)
curve = LiveCurve("ResNet-18 learns digits on two ranks")
result = train_resnet18(config, progress="none", on_record=curve)

print(f"{result['num_samples']} test images, right: ~ {result['accuracy']:.0%}")
assert result["accuracy"] > 0.7
assert result["num_samples"] == len(test_labels)  # the same ones as above

# %% [markdown]
# The black line is the loss of the run; faint behind it is what each rank has seen of
# its own half of each batch. The orange points are measured on the test images after
# each epoch; one far above the frame is an arrow with its value. It is high at first
# because BatchNorm tests with running averages, which need some steps to become right.
#
# Every run leaves a folder behind, from which it can be drawn, compared and resumed.

# %%
for path in sorted(folder.iterdir()):
    print(path.name)

# %% [markdown]
# From a terminal, the first line does the same training, on all GPUs or on two CPU
# ranks. `torchrun`, in the second one, starts it on eight GPUs (not run here):
#
# ```
# python -m ddp_lab.train --epochs 2
# torchrun --standalone --nproc-per-node 8 -m ddp_lab.train --epochs 2
# ```
#
# And to start something of your own, [examples/plain_ddp.py](../examples/plain_ddp.py)
# is the training in plain PyTorch; take `plain_common.py`, which loads the data, along.

# %% [markdown]
# ## Summary
#
# - A rank is a process. Ranks share nothing; they exchange tensors by collectives.
# - Step 1, `init_process_group`: the ranks meet. Step 2, `DistributedDataParallel`: all
#   start from the same weights and average their gradients. Step 3,
#   `DistributedSampler`: each sample goes to one rank, apart from a rest.
# - The batch size of a rank is the global batch size divided by the world size.
# - Done right, the loss curve does not depend on the number of ranks.
#
# ## Exercises
#
# `check` tries your function on one, two and three ranks, and says which property does
# not hold and on which rank. With the name alone, it tells the task:
# `check("who_am_i")`.
#
# **1.** Write a function that returns the pair of rank and world size of its process,
# as whole numbers. The ranks have not met, and need not.


# %%
import os

import torch.distributed as dist

from ddp_lab import check


def who_am_i():
    # BEGIN SOLUTION
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # STUB
    # raise NotImplementedError("what has the launcher put into the environment?")
    # END SOLUTION


# %%
check(who_am_i, "who_am_i")

# %% [markdown]
# **2.** The all-reduce gives a sum. Write a function that returns the *mean* of the
# tensors of all ranks, on every rank, for any world size. The ranks have met already.
# The caller still needs its tensor: it must keep its values.


# %%
def mean_over_ranks(tensor):
    # BEGIN SOLUTION
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()
    # STUB
    # raise NotImplementedError("add them up over all ranks, then divide")
    # END SOLUTION


# %%
check(mean_over_ranks, "mean_over_ranks")

# %% [markdown] tags=["solution"]
# A copy is made first: an all-reduce overwrites the tensor that it is given.

# %% [markdown]
# **3.** Take `loss.backward()` out of DDP's hands: in `train`, leave out the wrapper
# (then it is `model.state_dict()` at the end). Predict which of the three printed lines
# changes, and run it. Then put the wrapper back, and give `train` a global batch of 64
# on 3 ranks (and take the first two of the results). How large is the global batch
# really, and which check is missing?

# %% [markdown] tags=["solution"]
# Only the second line changes: `weights equal: False`. The ranks start from the same
# weights, since `make_model` sets the seed, but each follows the gradients of its own
# half: two models that know nothing of each other. Nothing fails, and both losses fall.
#
# On 3 ranks a share is 64 // 3 = 21, so the optimiser sees 63 samples a step, and
# nobody says so. The check belongs where `share` is computed:
#
# ```
# if global_batch_size % dist.get_world_size():
#     raise ValueError("the global batch does not divide by the world size")
# ```

# %% [markdown]
# ## Next
#
# The course takes the three steps one by one, and then makes them fast and safe:
#
# | notebook | you can then |
# |---|---|
# | [01 One GPU is not enough][01] | tell where GPU memory goes, and which batch fits |
# | [02 Ranks and process groups][02] | start ranks, use collectives, read a deadlock |
# | [03 Wrap the model][03] | write DDP by hand, and show that torch's agrees |
# | [04 Shard the data][04] | draw who sees what, and evaluate every sample once |
# | [05 Train ResNet-18][05] | do the whole training, and find slips in a script |
# | [06 One curve][06] | prove that 1, 2 and 4 ranks train the same model |
# | [09 Survive failures][09] | lose a worker, go on, and end with the same bits |
# | [10 Many machines][10] | train on several hosts, and say what a network costs |
#
# [01]: 01_one_gpu_is_not_enough.ipynb
# [02]: 02_ranks_and_process_groups.ipynb
# [03]: 03_wrap_the_model.ipynb
# [04]: 04_shard_the_data.ipynb
# [05]: 05_train_resnet18.ipynb
# [06]: 06_one_curve.ipynb
# [09]: 09_survive_failures.ipynb
# [10]: 10_many_machines.ipynb
