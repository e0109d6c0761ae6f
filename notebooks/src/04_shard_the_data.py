# %% [markdown]
# # Shard the data: who sees which sample?
#
# > I started my script on two GPUs. An epoch takes exactly as long as before.
#
# DDP keeps the copies of a model equal, and does not touch the data. If nobody deals
# out the samples, every rank works on all of them. At the end of this notebook you will
# be able to
#
# - draw which rank sees which sample, in each epoch,
# - say what `DistributedSampler`, `set_epoch` and the two kinds of `drop_last` do,
# - keep the global batch, and with it the training, the same on any number of ranks,
# - evaluate a model exactly, and tell how wrong the usual way is.
#
# It takes about 25 minutes. Most of it is arithmetic with indices, which needs no ranks
# at all.

# %%
# %load_ext ddp_lab
# %ranks 2 --device cpu

# %% [markdown]
# ## Two ranks, one DataLoader
#
# Our data set has 16 samples, and the sample number *is* the sample, so that one can
# see where each goes. Both ranks run a script for one GPU, whose `DataLoader` shuffles,
# by torch's random state. Many scripts begin with a `manual_seed`, the same on all
# ranks. In the others each rank starts from a seed of the operating system; `rank`
# takes its place below, so that you see what we see.
#
# **Predict:** which samples does each rank see in its first batch, in both cases?

# %%
# %%ranks
from torch.utils.data import DataLoader


def one_epoch(seed):
    torch.manual_seed(seed)
    loader = DataLoader(range(16), batch_size=4, shuffle=True)
    return [batch.tolist() for batch in loader]


seeded, unseeded = one_epoch(0), one_epoch(rank)
for order in seeded, unseeded:
    print(order[0], "...", len(order), "batches in an epoch")

# %% [markdown]
# With one seed the very same ones. `%pull` fetches the batches of both ranks. A cell of
# the picture is a sample, with a stripe for each rank that sees it and the step's
# number.

# %%
# %pull seeded
# %pull unseeded
import matplotlib.pyplot as plt

from ddp_lab import plot_shards

for name, order in {"One seed": seeded, "Seeds of their own": unseeded}.items():
    flat = [[sample for batch in own for sample in batch] for own in order]
    title = f"{name}: both ranks see all of the 16 samples"
    plot_shards([flat], batch_size_per_rank=4, title=title)
    plt.show()

# %% [markdown]
# Either way each sample is worked on twice in an epoch, and the epoch has as many steps
# as on one GPU. Above, both ranks do it in the same step; below, a step has up to eight
# different samples. What does DDP make of that?
#
# **Predict:** how far is the averaged gradient from the one that a rank had anyway?

# %%
# %%ranks
for order in seeded, unseeded:
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * torch.tensor(order[0])).square().mean()
    loss.backward()
    mean = weight.grad.clone()
    dist.all_reduce(mean)
    print("own:", weight.grad.item(), " mean of both:", mean.item() / world_size)

# %% [markdown]
# With one seed the second rank adds nothing but heat: the mean of equal gradients is
# what each had. With seeds of their own, the ranks train together, but something else
# than you started: batches of 8 instead of 4, at the old learning rate, and what the
# script calls an epoch is two (on W ranks: a W-fold batch, W epochs). Neither way is
# faster, and no error, warning or rising loss tells you.
#
# ## Deal them out
#
# `DistributedSampler` gives each rank a list of sample numbers. It talks to nobody: all
# ranks shuffle alike, from the same seed, and each takes every W-th number, where W is
# the world size. So we can ask it for the shards of all ranks without starting any.
#
# **Predict:** with 4 samples a rank and step, how many steps will an epoch have now?


# %%
from torch.utils.data import DataLoader, DistributedSampler


def shards(num_samples, num_ranks, epoch=0, **options):
    """The sample numbers of each rank, in its order."""
    of_ranks = []
    for rank in range(num_ranks):
        sampler = DistributedSampler(range(num_samples), num_ranks, rank, **options)
        sampler.set_epoch(epoch)
        of_ranks.append(list(sampler))
    return of_ranks


for rank, samples in enumerate(shards(16, 2)):
    print(f"rank {rank}:", samples)
plot_shards([shards(16, 2)], batch_size_per_rank=4)
plt.show()

# %% [markdown]
# Each sample has one colour, and two steps see them all: half as many as before.
#
# On a rank that has joined a group, the sampler finds both numbers by itself, and goes
# to the loader as `DataLoader(dataset, batch_size, sampler=sampler)`. There is no
# `shuffle=True` there: shuffling is the sampler's business now.
#
# ## The missing `set_epoch`
#
# A sampler draws its order from seed *plus epoch*, and it does not count epochs. You
# have to tell it, before each one. Here are three epochs of a loop that forgot, and
# three of one that did not.
#
# **Predict:** what is the same in the first three rows? And how many of the 16 samples
# has rank 0 met after ten epochs, without and with `set_epoch`?

# %%
forgot = [shards(16, 2) for _ in range(10)]
told = [shards(16, 2, epoch=epoch) for epoch in range(10)]
titles = (
    "Without set_epoch, three epochs are one epoch, three times",
    "With set_epoch, a sample meets another rank, step and company each time",
)
for epochs, title in zip((forgot, told), titles, strict=True):
    plot_shards(epochs[:3], batch_size_per_rank=4, title=title)
    plt.show()
    met = {sample for ranks in epochs for sample in ranks[0]}
    print("rank 0 has met", len(met), "samples in ten epochs")

# %% [markdown]
# Without `sampler.set_epoch(epoch)` the same samples meet in the same batch in every
# epoch, which a single GPU with `shuffle=True` would not do. The mistake is a quiet
# one: the loss still falls.
#
# Rank 0 never meets the other half. The model learns it all the same, by the gradients
# that rank 1 computes from it; but whatever rank 0 keeps for itself, such as its
# BatchNorm statistics, or the loss that it prints, knows half of the data only.
#
# ## Whose batch size?
#
# The `batch_size` of a loader is that of *one rank*. The optimiser steps once for all
# ranks, on the **global batch**. Take the 1437 training digits, and leave a script's
# `batch_size=32` as it is, or share out a global batch of 32.
#
# **Predict:** how many steps has an epoch on 4 ranks, in both cases? And if 1, 2 and 4
# ranks share a global batch of 8, does the first one hold the same samples each time?

# %%
print("         32 on each rank            32 in all")
for num_ranks in (1, 2, 4):
    steps_each = 1437 // (32 * num_ranks)
    share = 32 // num_ranks
    print(f"{num_ranks} ranks:  global {32 * num_ranks:3}, {steps_each} steps", end="")
    print(f"     {share:2} on each rank, {1437 // 32} steps")

first = {}
for num_ranks in (1, 2, 4):
    share = 8 // num_ranks  # of a global batch of 8
    batches = [samples[:share] for samples in shards(16, num_ranks)]
    first[num_ranks] = sorted(sample for batch in batches for sample in batch)
    print(f"{num_ranks} ranks, {share} each:", first[num_ranks])
assert first[1] == first[2] == first[4]

# %% [markdown]
# On the left, each added rank makes the batch larger and the steps fewer. That is
# another training, which may need another learning rate (notebook 06 is about that). On
# the right, the training stays what it was, and only the work of a rank gets less.
#
# Even the first global batch is the same. Rank r takes places r, r + W, r + 2W ... of
# *one* shuffled list, so what the ranks hold together at step k is the next piece of
# that list, whatever W is. This is why the first notebook found the same loss curve on
# one rank and on two.
#
# ## What if it does not divide?
#
# All ranks must take equally many steps: who has one batch more waits in its all-reduce
# for others that never come. With 10 samples for 4 ranks, something has to give.
#
# **Predict:** with `drop_last=True` two are dropped. And by default, when nothing is?

# %%
plot_shards([shards(10, 4)], num_samples=10)
plt.show()

dropped = [shards(10, 4, epoch=epoch, drop_last=True) for epoch in range(3)]
title = "With drop_last=True, two samples are left out in each epoch"
plot_shards(dropped, num_samples=10, title=title)
plt.show()

# %% [markdown]
# By default the sampler starts again from the beginning of its shuffled list: its first
# samples, 4 and 1, come once more in step 3. With `drop_last=True` two are left out,
# but mostly other ones in the next epoch. For *training* both ways are fine.
#
# There is a second `drop_last`, that of the `DataLoader`. It drops the last *batch of a
# rank* if it is not full. The two act on different things:
#
# **Predict:** 1437 digits, 7 ranks, 32 on each. How many are left out by each of them?

# %%
for drop in (False, True):
    of_ranks = shards(1437, 7, drop_last=drop)
    own = DataLoader(of_ranks[0], batch_size=32, drop_last=True)
    used = 7 * 32 * len(own)
    print(f"sampler drop_last={drop}: {sum(map(len, of_ranks))} dealt out,", end=" ")
    print(f"{used} used in {len(own)} full steps")

# %% [markdown]
# The sampler repeats five or drops two; the loader then drops a part of a batch on each
# rank, about a hundred in all. In the next epoch it is other samples' turn.
#
# ## The same lines on a GPU
#
# In a training loop the batch goes to the rank's device. From ordinary memory such a
# copy makes Python wait. `pin_memory=True` lets the loader put batches into page-locked
# memory, from which a GPU fetches them while Python goes on, if asked by
# `non_blocking=True` ([CUDA
# semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html), "Use pinned memory
# buffers"). The lines below run on GPUs and CPUs.

# %%
# %%ranks
from torch.utils.data import DistributedSampler, TensorDataset

dataset = TensorDataset(torch.rand(16, 3, 8, 8), torch.arange(16))
sampler = DistributedSampler(dataset)
on_gpu = device.type == "cuda"
loader = DataLoader(dataset, batch_size=4, sampler=sampler, pin_memory=on_gpu)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
    print("epoch", epoch, images.device, "last batch:", labels.tolist())

# %% [markdown]
# `device` comes from step 1: `cuda:LOCAL_RANK` where there are GPUs, and here the CPU.
# (On GPUs it was not run here.)
#
# ## What else is drawn
#
# A sampler has a random generator of its own. Dropout draws from torch's global one,
# and so do augmentations in the rank; loader workers get a seed drawn from it, each
# plus its own number ([torch.utils.data](https://docs.pytorch.org/docs/stable/data.html),
# "Randomness in multi-process data loading").
#
# **Predict:** all ranks have called `manual_seed(0)`. Which dropout masks and crops do
# they draw?

# %%
# %%ranks
import torch.nn.functional as F
from torch.utils.data import Dataset


class Crops(Dataset):  # three offsets, drawn in a loader's worker
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.randint(0, 9, ()).item()


for seed in 0, 1000 + rank:
    torch.manual_seed(seed)
    kept = F.dropout(torch.ones(8)).bool().int().tolist()
    crops = list(DataLoader(Crops(), batch_size=None, num_workers=1))
    print("dropout keeps", kept, " crop offsets", crops)

# %% [markdown]
# With one seed, the same ones: the k-th image of each rank is cropped alike and loses
# the same units. So seed twice: alike before the model is built, and then by rank, as
# in the second line. The order of the samples stays, as it is the sampler's.
#
# ## Evaluate: every sample once
#
# For a *test* result, repeating and dropping are both wrong: it is a number about
# particular samples. We want to see how wrong, and take a classifier so simple that all
# numbers are exact: the mean image of each digit; the nearest mean wins. Written out,
# that is a linear layer.

# %%
import torch
from sklearn.datasets import load_digits

digits = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images).flatten(1)[order] / 16
labels = torch.tensor(digits.target)[order]
test, train = slice(0, 360), slice(360, 1797)
means = [images[train][labels[train] == digit].mean(0) for digit in range(10)]

model = torch.nn.Linear(64, 10, dtype=torch.float64)
model.weight.data = torch.stack(means)
model.bias.data = -model.weight.data.square().sum(1) / 2
is_right = model(images[test]).argmax(1) == labels[test]
print(f"{is_right.sum()} of {len(is_right)} are right: {is_right.double().mean():.4%}")
test_images, test_labels = images[test], labels[test]
# %push model test_images test_labels

# %% [markdown]
# That is the truth: 325 of 360, counted in one process. `%push` has sent model and data
# to the ranks, for later. Now let several ranks evaluate, in the two usual ways that
# are slightly wrong. First, a `DistributedSampler` with its padding, and a sum over
# ranks.
#
# **Predict:** on 7 ranks, how many samples are counted? Can the accuracy *rise*?


# %%
def padded(num_ranks):
    """Accuracy over what the ranks see: some samples count twice."""
    of_ranks = shards(360, num_ranks, shuffle=False)
    seen = [sample for samples in of_ranks for sample in samples]
    return is_right[seen].double().mean().item(), len(seen)


for num_ranks in (1, 2, 7, 8, 21):
    accuracy, num_seen = padded(num_ranks)
    print(f"{num_ranks:2} ranks: {num_seen} samples, {accuracy:.4%}")

# %% [markdown]
# 364 samples, and yes, it can: the accuracy of *the same model* depends on the number
# of ranks, and on which samples happen to come first. Second way: each rank takes the
# mean over its batches, as for a loss, and then the ranks take the mean of their means.
#
# **Predict:** two ranks have 180 samples each. At which batch size is the error large?


# %%
def mean_of_means(batch_size_per_rank, num_ranks=2):
    """Accuracy as a mean over ranks of a mean over batches."""
    of_ranks = []
    for rank in range(num_ranks):
        batches = is_right[rank::num_ranks].double().split(batch_size_per_rank)
        of_ranks.append(torch.stack([batch.mean() for batch in batches]).mean())
    return torch.stack(of_ranks).mean().item()


for batch_size in (16, 64, 89, 179, 180):
    print(f"batches of {batch_size:3}: {mean_of_means(batch_size):.4%}")

# %% [markdown]
# With batches of 179, the last batch of each rank is one sample, and weighs as much as
# 179 others. Here are both errors for many settings, in percentage points and on one
# scale; a dot is an evaluation of the same model on the same images.

# %%
from ddp_lab import style

truth = is_right.double().mean().item()
ranks, sizes = range(1, 33), range(1, 181)
errors = [100 * (padded(num_ranks)[0] - truth) for num_ranks in ranks]
others = [100 * (mean_of_means(size) - truth) for size in sizes]
with plt.rc_context({**style(), "figure.figsize": (6.4, 3.2)}):
    figure, (left, right) = plt.subplots(1, 2, sharey=True)
    left.plot(ranks, errors, ".", color="#222222")
    left.set(xlabel="ranks", ylabel="error of the accuracy (points)")
    left.set_title(f"Padding: up to {max(map(abs, errors)):.1f} points")
    right.plot(sizes, others, ".", color="#222222")
    right.set_xlabel("batch size on each of 2 ranks (images)")
    right.set_title(f"Mean of means: up to {max(map(abs, others)):.1f} points")
    plt.show()

# %% [markdown]
# Padding is off by tenths of a point; the mean of means by up to 4.8 points, where
# batches are large and few samples are left for the last one. Improvements of that size
# are reported as progress. On a large test set the errors shrink.
#
# The exact way is no more work. Each rank takes every W-th sample, *without* padding,
# **counts**, and only the counts are added up. You divide once, at the end.
#
# **Predict:** what will each of the ranks print?


# %%
# %%ranks
def evaluate(model, images, labels):
    """Return how many are right, and how many there are, on all ranks together."""
    mine = slice(rank, None, world_size)
    right, num_samples = 0, 0
    with torch.no_grad():
        for x, y in zip(images[mine].split(64), labels[mine].split(64), strict=True):
            right += (model(x).argmax(1) == y).sum().item()
            num_samples += len(y)
    counts = torch.tensor([right, num_samples])
    dist.all_reduce(counts)  # once, after the loop
    return counts.tolist()


right, num_samples = evaluate(model, test_images, test_labels)
print(f"{right} of {num_samples} are right: {right / num_samples:.4%}")

# %% [markdown]
# 325 of 360 on both, to the last digit, with a last batch of 52. On 7 ranks, shares of
# 52 and 51 would give the same. Note where the all-reduce stands. Ranks may have
# different numbers of batches, so there must be **no collective inside the loop**, not
# even one that hides in the model: with BatchNorm, DDP's forward may send buffers. So
# evaluate `ddp.module`, in `eval()` mode. The training program of `ddp_lab` does all
# this, with `shard_indices` from `ddp_lab.data`.
#
# ## A stream has no indices
#
# An `IterableDataset` only knows its next sample, so no sampler can deal it out.
#
# **Predict:** what does each rank see of a stream of 0 to 7?

# %%
# %%ranks
from itertools import islice

from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __init__(self, first=0, step=1):
        self.first, self.step = first, step

    def __iter__(self):
        return islice(range(8), self.first, None, self.step)


for stream in Stream(), Stream(rank, world_size):
    print([n for batch in DataLoader(stream, batch_size=2) for n in batch.tolist()])

# %% [markdown]
# All of it, until the stream itself leaves out what belongs to the others. With
# `num_workers`, each worker would yield all of that again: its `__iter__` must also ask
# `torch.utils.data.get_worker_info()`. And if the ranks get different numbers of
# *batches*, the last steps deadlock. The training of `ddp_lab` refuses a stream, and
# says so.
#
# ## Summary
#
# - Without a sampler, every rank goes through all samples. With one seed, the ranks do
#   the same work W times; with others, you train with a W-fold batch.
# - `DistributedSampler` shuffles alike on all ranks, and gives each every W-th number.
#   It needs `set_epoch`, before each epoch.
# - A loader's batch size is that of a rank. With a share of the global batch, the k-th
#   global batch is the same set of samples for every W.
# - Seed alike for the model, by rank for dropout and augmentation.
# - Training: drop the rest. Evaluation: no padding, sum of counts, one division.
#
# ## Exercises
#
# **1.** Write what the sampler does without shuffling. It returns the list of `rank`,
# `rank + world_size`, and so on, equally many on every rank; where the samples run out,
# they start again from 0, as often as needed.

# %%
import torch
import torch.distributed as dist

from ddp_lab import check


def shard_indices(num_samples, rank, world_size):
    # BEGIN SOLUTION
    share = -(-num_samples // world_size)  # rounded up
    places = range(rank, share * world_size, world_size)
    return [place % num_samples for place in places]
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(shard_indices, "shard_indices")

# %% [markdown]
# **2.** Now with shuffling, and with an `epoch`. All ranks draw the same order, another
# one in each epoch and the same when asked again, from a `torch.Generator` of their
# own, so that the global random state stays as it was. Each sample is on one rank, and
# the k-th global batch is the same set on any number of ranks: the first samples of the
# W ranks are the first W of the order, and so on. (The number of samples divides by W.)


# %%
def shuffled_shard(num_samples, rank, world_size, epoch):
    # BEGIN SOLUTION
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(num_samples, generator=generator)
    return order[rank::world_size].tolist()
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(shuffled_shard, "shuffled_shard")

# %% [markdown] tags=["solution"]
# The rank must not go into the seed: then each rank would shuffle in its own way, and
# the shards would overlap. And a block of the order for each rank would deal out every
# sample once, but which of them meet in a global batch would depend on the number of
# ranks.

# %% [markdown]
# **3.** The exact accuracy, from 0 to 1 and the same number on every rank, from what a
# rank has: its predictions and its labels, two tensors of whole numbers. Shares differ
# in length, and may be empty.


# %%
def exact_accuracy(predictions, labels):
    # BEGIN SOLUTION
    counts = torch.tensor([(predictions == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    right, num_samples = counts.tolist()
    return right / num_samples
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(exact_accuracy, "exact_accuracy")

# %% [markdown]
# ## Next
#
# You have met, wrapped and sharded. The next notebook puts the three steps together and
# trains a ResNet-18, with loss curves rank by rank and of the run.
