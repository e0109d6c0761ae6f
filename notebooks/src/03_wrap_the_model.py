# %% [markdown]
# # Wrap the model: many copies that stay one
#
# > Every rank has its own copy of the model. Who keeps the copies equal?
#
# The answer of PyTorch is one line, `DistributedDataParallel(model)`. You will build
# what is behind that line in thirteen lines of your own, and then see what the original
# does better. At the end of this notebook you will be able to
#
# - say why copies drift apart, and which two actions prevent it,
# - write DDP by hand, and show that PyTorch's agrees with yours,
# - tell how gradients travel: in a ring, in buckets, during the backward pass,
# - name four things that DDP does not do for you.
#
# It takes about 25 minutes. Two ranks are enough.

# %% tags=["setup"]
# %load_ext ddp_lab
# %ranks 2 --device cpu

# %% [markdown]
# From here on, a cell that begins with `%%ranks` runs on both ranks, and their
# variables live on from cell to cell. What rank 1 prints is marked as such.
#
# Each rank loads and shuffles the handwritten digits, all in the same order, and takes
# every second image, so that the two have different halves.

# %% tags=["setup"]
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

rank = dist.get_rank()
digits = load_digits()
order = torch.randperm(1440, generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
x, y = images[rank::2], labels[rank::2]
print(len(x), "images, the first labels are", y[:8].tolist())

# %% [markdown]
# ## Two copies, and nobody cares
#
# The model is that of the first notebook. To see whether two copies are still one
# model, we lay all weights of a copy in one long vector; the `distance` of two copies
# is the length of the difference of their vectors.
#
# **Predict:** how far apart are two new models? And two that used the same seed?


# %% tags=["setup"]
# %%ranks
def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def distance(model):
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    both = [torch.empty_like(mine), torch.empty_like(mine)]
    dist.all_gather(both, mine)  # each rank gets both vectors
    return (both[0] - both[1]).norm().item()


one_each, same = distance(make_model(seed=rank)), distance(make_model(seed=0))
print(f"a seed each: ~ {one_each:.1f}, the same seed: {same}")
assert 6 < one_each < 8

# %% [markdown]
# The same seed gives the same weights to the last bit. Is that enough? Now both train,
# each on its own half, with a plain training loop. One line has no effect yet:
# `average()` is where the copies will later talk to each other.
#
# **Predict:** both copies start equal and learn the same task. Does their distance
# grow, stay small, or go back to zero as both get good?


# %%
# %%ranks
def train(model, average=lambda: None, num_steps=45):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    distances = [distance(model)]
    for step in range(num_steps):
        batch = slice(16 * step, 16 * step + 16)  # of the rank's own half
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        average()
        optimizer.step()
        distances.append(distance(model))
    return distances


other_start = train(make_model(seed=rank))
same_start = train(make_model(seed=0))

# %% [markdown]
# `%pull` brings a variable of the ranks into the notebook, here that of rank 0.

# %%
# %pull other_start 0
# %pull same_start 0
import matplotlib.pyplot as plt

from ddp_lab import style

with plt.rc_context(style()):
    figure, axes = plt.subplots()
    axes.plot(other_start, "--", color="#888888", label="each its own seed")
    axes.plot(same_start, color="#222222", label="the same seed")
    axes.set(xlabel="optimiser step", ylabel="distance of the weights (no unit)")
    axes.set_ylim(bottom=0)
    axes.set_title("An equal start is not enough: one step, and the copies differ")
    axes.legend()
    plt.show()

# %% [markdown]
# They drift apart from the first step on, and nothing pulls them back: there are many
# good sets of weights, and each rank walks to one of its own. You pay for two GPUs and
# get two models, each of which has seen half the data.
#
# So two things are needed. All ranks must **start equal**, and all must **take equal
# steps**.
#
# ## Start equal: broadcast
#
# A seed is a fragile way to start equal: one `torch.rand` too many on rank 1, and it is
# gone. Copying is safe. A `broadcast` overwrites a tensor on all ranks by that of
# rank 0. It must reach everything that makes up the model: `state_dict()` lists the
# parameters and also the buffers, such as the running statistics of BatchNorm.

# %%
# %%ranks
model = make_model(seed=rank)
before = distance(model)
for tensor in model.state_dict().values():
    dist.broadcast(tensor, src=0)

print(f"before: ~ {before:.1f}, after: {distance(model)}")
assert before > 6

# %% [markdown]
# ## Step equally: average the gradients
#
# Equal weights and equal gradients make equal steps. But *which* gradient should all
# use? Say the two ranks together hold a global batch of 32 images, 16 each. The loss of
# the batch is the mean over 32 images, and the mean of 32 numbers is the mean of the
# means of two halves. Differentiation keeps sums and factors as they are, so the same
# holds for gradients.
#
# **Predict:** how far is a rank's own gradient from that of the 32 images, and how far
# is the mean of both?

# %%
# %%ranks
whole, half = make_model(seed=0), make_model(seed=0)
F.cross_entropy(whole(images[:32]), labels[:32]).backward()  # all 32 at once
F.cross_entropy(half(x[:16]), y[:16]).backward()  # this rank's 16 of them

goal, own = whole[1].weight.grad, half[1].weight.grad
mean = own.clone()
dist.all_reduce(mean)  # the sum over ranks
mean /= dist.get_world_size()
off_own, off_mean = (own - goal).abs().max(), (mean - goal).abs().max()
print(f"own gradient off by ~ {off_own:.0e}, mean off by ~ {off_mean:.0e}")
assert off_own > 1e-3
assert off_mean < 1e-6

# %% [markdown]
# The mean *is* the gradient of the global batch, but for rounding. So two ranks do what
# one rank with twice the batch would do; that is the whole promise of data parallelism.
# It needs equal halves: with 16 images on one rank and 8 on the other, the mean of the
# two would give the 8 more than their due.
#
# ## DDP by hand, whole
#
# Both actions in one class. It wraps a model, and can be called like one.


# %% tags=["setup"]
# %%ranks
class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)  # start equal

    def forward(self, *inputs):
        return self.module(*inputs)

    def average_gradients(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # step equally
                parameter.grad /= dist.get_world_size()


# %% [markdown]
# **Predict:** we start from two *different* seeds on purpose. How large is the largest
# distance in 45 steps?

# %%
# %%ranks
naive = NaiveDDP(make_model(seed=rank))
distances = train(naive, naive.average_gradients)
print("largest distance:", max(distances))
assert len(distances) == 46

# %% [markdown]
# Exactly zero, at every step, with no tolerance: an all-reduce gives all ranks the same
# bits, and equal weights plus equal bits stay equal. The weights themselves were sent
# only once, in the beginning.
#
# ## And PyTorch's own?
#
# `DistributedDataParallel` is used in the same way, except that nobody calls
# `average_gradients`: it has put itself into `backward()`. Two more relatives, which
# you will need in a moment, are in `ddp_lab.by_hand`: a `NaiveDDP` that takes any
# all-reduce, and a `BucketDDP`.
#
# **Predict:** how far from your own are the weights of the other three after training?

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

from ddp_lab import by_hand

ddp = DistributedDataParallel(make_model(seed=rank))
train(ddp)
ring = by_hand.NaiveDDP(make_model(seed=rank), all_reduce=by_hand.ring_all_reduce)
train(ring, ring.average_gradients)
bucket = by_hand.BucketDDP(make_model(seed=rank))
train(bucket)

mine = nn.utils.parameters_to_vector(naive.parameters())
for other in (ddp, ring, bucket):
    theirs = nn.utils.parameters_to_vector(other.parameters())
    print(f"{type(other).__name__:<24} differs by", (theirs - mine).abs().max().item())

# %% [markdown]
# Not at all. On two ranks there is one sum of two numbers, and its order does not
# matter; on more ranks the order of summation may change the last digits, and nothing
# else. Your class *is* DDP. What is left to gain is time, and there are two questions:
# which way do the gradients go, and when?
#
# ## Which way: round a ring
#
# The obvious way to sum is to send everything to rank 0, and back. Then rank 0 receives
# and sends the tensors of all the others while they wait. In a *ring* each rank talks
# only to its neighbours, and all links work all the time
# ([Patarasuk and Yuan, 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). Here are
# three ranks and our model's gradients, 4810 numbers of 4 bytes, cut into three chunks.

# %%
from ddp_lab import plot_ring

plot_ring(4810, 3)
plt.show()

# %% [markdown]
# Follow one chunk: at each step the outlined cell has just arrived. In the first two
# steps a chunk picks up each rank's part; in the last two the finished sums go round.
# The function `ring_all_reduce` that you have just trained with does exactly this.
#
# **Predict:** ResNet-18 with ten outputs has 42.7 MB of gradients. With 64 ranks, how
# much does the busiest rank send? Guess for both ways before you run this.

# %%
gradients_mb = 42.7
for num_ranks in (2, 4, 8, 64):
    rank_0 = (num_ranks - 1) * gradients_mb  # the sums, back to all the others
    ring = 2 * (num_ranks - 1) / num_ranks * gradients_mb
    print(f"{num_ranks:2} ranks: rank 0 {rank_0:6.1f} MB, in a ring each {ring:.1f} MB")

# %% [markdown]
# In a ring nobody ever sends more than twice the tensor, however many take part. What
# does grow is the number of messages, 2 (W - 1) one after the other, each with its own
# delay. So for many ranks and small tensors NCCL, the library for GPUs, has
# [trees](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/)
# as well.
#
# ## When: in buckets, during backward
#
# `NaiveDDP` waits until backward is over, and then sends one message a parameter. But
# the gradient of the *last* layer is ready long before that of the first. Let PyTorch
# report what happens in a backward pass: one hook tells when a gradient is ready,
# another when a message leaves. The buckets are made tiny, so that there are two.
#
# **Predict:** four parameters, two buckets: in which order will the six events come?

# %%
# %%ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def send(_, bucket):
    events.append(f"-> bucket {bucket.index()} leaves: {bucket.buffer().nbytes} bytes")
    return allreduce_hook(None, bucket)


model, events = make_model(seed=0), []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(
        lambda _, name=name: events.append(f"{name} is ready")
    )
small = DistributedDataParallel(model, bucket_cap_mb=0.001)
small.register_comm_hook(None, send)
for _ in range(2):  # look at the second pass
    events.clear()
    F.cross_entropy(small(x[:16]), y[:16]).backward()
print(*events, sep="\n")

# %% [markdown]
# Bucket 0 was on its way before the first layer had its gradients. (On both ranks the
# order is the same, as it must be: messages find each other by their order.) Network
# and processor work at the same time, and the more layers a model has, the more of the
# sending hides behind the computing:
#
# ```
# backward computes  | layer 4 | layer 3 | layer 2 | layer 1 | waits       |
# on the network                         [ bucket 0 ]        [ bucket 1    ]
# ```
#
# We looked at the *second* pass, because PyTorch uses the first to learn the order in
# which gradients come, and packs its buckets then; `range(1)` shows it. The design is
# told in [Li et al., 2020](https://arxiv.org/abs/2006.15704).
#
# One message a parameter would be slow too, as each has its fixed cost. By default a
# bucket holds 25 MB, the first only 1 MB, so that sending starts early. For ResNet-18:

# %%
import torch
from torchvision.models import resnet18

from ddp_lab import assign_buckets, plot_buckets

with torch.device("meta"):  # shapes only, no memory
    resnet = resnet18(num_classes=10)
plot_buckets(resnet.named_parameters(), assign_buckets(resnet.parameters()))
plt.show()

# %% [markdown]
# Instead of 62 messages there are three. A bucket leaves as soon as it is full, and the
# first one is: its single tensor from layer 4 has 9 MB. The last one, with the first
# layers, cannot hide behind anything: when it is full, backward is over.
#
# ## What is `module.`?
#
# DDP *contains* the model; it is no change to it. That shows in the names:

# %%
# %%ranks 0
print("wrapped:", list(ddp.state_dict()))
print("inside: ", list(ddp.module.state_dict()))

# %% [markdown]
# Save `ddp.module.state_dict()`, on one rank; then the file can be loaded without DDP.
# There is a trap here as well: for *training*, call the wrapper and not what is in it.
#
# **Predict:** what does this step do, which calls `ddp.module(x)`? Will there be an
# error?

# %%
# %%ranks
wrapped = DistributedDataParallel(make_model(seed=0))
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
F.cross_entropy(wrapped.module(x), y).backward()
optimizer.step()
apart = distance(wrapped)
print(f"distance after one step: ~ {apart:.3f}")
assert apart > 0.001

# %% [markdown]
# No error, and two models. The call of the wrapper is what arms its hooks.
#
# ## What DDP does not do
#
# DDP makes the *gradients* equal; all else is yours. First BatchNorm and the loss: each
# rank passes 16 of its digits through a norm, and through the trained model.
#
# **Predict:** which of the two printed numbers are equal on both ranks?

# %%
# %%ranks
norm = DistributedDataParallel(nn.BatchNorm1d(64))
norm(x[:16].flatten(1))
statistic = norm.module.running_mean[28].item()  # of one pixel
loss = F.cross_entropy(ddp(x[:16]), y[:16]).item()
print(f"BatchNorm's running mean ~ {statistic:.4f}, loss ~ {loss:.4f}")
assert 0 < statistic < 1
assert 0 < loss < 2

# %% [markdown]
# Neither. Each rank normalises by its own 16 images and keeps its own statistics (the
# next forward overwrites them by those of rank 0: the other's are lost, not averaged).
# And each prints the loss of its own half; the loss of the run is the mean.
#
# Now the optimiser. **Predict:** rank 1 uses another learning rate, perhaps because it
# resumed from another file. Does DDP notice?

# %%
# %%ranks
wrapped = DistributedDataParallel(make_model(seed=0))
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1 if rank == 0 else 0.2)
F.cross_entropy(wrapped(x), y).backward()
optimizer.step()
apart = distance(wrapped)
print(f"distance after one step: ~ {apart:.3f}")
assert apart > 0.001

# %% [markdown]
# It does not: equal gradients were turned into unequal steps. The list to remember:
#
# | DDP does not | so |
# |---|---|
# | divide the data | give each rank its shard: the next notebook |
# | synchronise BatchNorm's batch statistics | SyncBatchNorm (lesson 06), or GroupNorm |
# | average the loss that you print | all-reduce it, or call it local |
# | broadcast the optimiser's settings and state | same code, same file on all ranks |
#
# ## Summary
#
# - Copies stay one model if they start equal (broadcast) and take equal steps (mean of
#   the gradients). The mean over equal shards is the gradient of the global batch.
# - DDP by hand takes thirteen lines, and on two ranks agrees with PyTorch's to the bit.
# - In a ring all-reduce a rank sends less than two tensors, whatever the world size.
# - Buckets leave while backward still computes, the last layers first.
# - Call the wrapper; save `.module`. Data, BatchNorm, printed loss and optimiser are
#   yours.
#
# ## Exercises
#
# `check` runs your function on one, two and three ranks and says which property fails.
#
# **1.** A guard for long runs: return True on all ranks if all copies are equal to the
# last bit, else False on all ranks. (Hint: an all-reduce can also take the smallest
# value, `op=dist.ReduceOp.MIN`.)

# %%
import torch
import torch.distributed as dist

from ddp_lab import check


def replicas_agree(model):
    # BEGIN SOLUTION
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    smallest, largest = flat.clone(), flat.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return torch.equal(smallest, largest)
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(replicas_agree, "replicas_agree")

# %% [markdown] tags=["solution"]
# If the smallest and the largest value over ranks are the same, all are. Comparing each
# rank with rank 0 and returning the result would not do: rank 0 would always say True.

# %% [markdown]
# **2.** Average the gradients with *one* message: lay them all in one flat tensor,
# all-reduce it, and copy the parts back. You have then written a bucket. A frozen
# parameter has no gradient.


# %%
def average_gradients(model):
    # BEGIN SOLUTION
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(average_gradients, "average_gradients")

# %% [markdown] tags=["solution"]
# A message costs a fixed time and a time for its bytes. This pays the fixed one once,
# but cannot start before the last gradient is there: buckets are the compromise.

# %% [markdown]
# **3.** Somebody averages the *weights* after each `optimizer.step()`, and leaves the
# gradients alone. With plain SGD, is that the same? With momentum? With Adam? Think of
# one step from equal weights first; then try it in `train`.

# %% [markdown] tags=["solution"]
# With SGD it is: a step is weights minus a factor times the gradient, and the mean of
# two such steps is the step with the mean gradient. Momentum adds up gradients, which
# is linear as well. Adam divides by the root of the squared gradients, and the mean of
# quotients is not the quotient of means: each rank would have its own idea of the right
# step size, and the result is another training. After three steps:


# %% tags=["solution"]
# %%ranks
def gap(optimizer_class, **options):
    models = [NaiveDDP(make_model(seed=0)) for _ in range(2)]
    optimizers = [optimizer_class(m.parameters(), **options) for m in models]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        models[0].average_gradients()  # the right way
        for optimizer in optimizers:
            optimizer.step()
        for weight in models[1].parameters():  # the other one
            dist.all_reduce(weight.data)
            weight.data /= dist.get_world_size()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


sgd, momentum = gap(torch.optim.SGD, lr=0.1), gap(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = gap(torch.optim.Adam, lr=0.001)
print(f"SGD ~ {sgd:.0e}, with momentum ~ {momentum:.0e}, Adam ~ {adam:.0e}")
assert max(sgd, momentum) < 1e-6
assert adam > 1e-4

# %% [markdown]
# ## Next
#
# Both ranks had their own half because we cut it by hand. The next notebook deals out
# the data: every sample once, another order in each epoch, and a test accuracy in
# which nothing is counted twice.
