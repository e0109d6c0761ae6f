# %% [markdown]
# # Wrap the model: many copies that stay one
#
# > Every rank has its own copy of the model. Who keeps the copies equal?
#
# The answer of PyTorch is one line, `DistributedDataParallel(model)`. You will build
# what is behind that line, in three short pieces. At the end of this notebook you will
# be able to
#
# - say why copies drift apart, and which two actions prevent it,
# - write DDP by hand: the average, the ring, the buckets that leave during backward,
# - read the errors and the silences of DDP.
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
# So two things are needed. All ranks must **start equal**: a `broadcast` of rank 0's
# tensors is safer than a seed, which one `torch.rand` too many spoils. And all must
# **take equal steps**, so they need one gradient. But which?
#
# ## Step equally: average the gradients
#
# Say the two ranks together hold a global batch of 32 images, 16 each. The loss of the
# batch is the mean over 32 images, and the mean of 32 numbers is the mean of the means
# of two halves. Differentiation keeps sums and factors as they are, so the same holds
# for gradients.
#
# **Predict:** how far is a rank's own gradient from that of the 32 images, and how far
# is the mean of both? And does it matter, in float16, when we divide by two?

# %%
# %%ranks
whole, half = make_model(seed=0), make_model(seed=0)
F.cross_entropy(whole(images[:32]), labels[:32]).backward()  # all 32 at once
F.cross_entropy(half(x[:16]), y[:16]).backward()  # this rank's 16 of them

goal, own = whole[1].weight.grad, half[1].weight.grad
mean = own / world_size
dist.all_reduce(mean)  # the sum over ranks
off_own, off_mean = (own - goal).abs().max(), (mean - goal).abs().max()
print(f"own gradient off by ~ {off_own:.0e}, mean off by ~ {off_mean:.0e}")
assert off_own > 1e-3
assert off_mean < 1e-6

divided = torch.tensor(40_000, dtype=torch.float16) / world_size
summed = torch.tensor(40_000, dtype=torch.float16)
dist.all_reduce(divided)
dist.all_reduce(summed)
print("in float16:", divided.item(), "or, summed first,", summed.item() / world_size)

# %% [markdown]
# The mean *is* the gradient of the global batch, but for rounding. So two ranks do what
# one rank with twice the batch would do; that is the whole promise of data parallelism.
# It needs equal halves: with 16 images on one rank and 8 on the other, the mean of the
# two would give the 8 more than their due.
#
# float16 ends at 65504, so the sum of two large gradients is infinite though their mean
# is not. DDP divides first (`_allreduce_fut` in torch's `default_hooks.py` says why),
# and so do we.
#
# ## DDP by hand
#
# Both actions in one class. It wraps a model, and can be called like one. In
# `state_dict()` are the parameters and BatchNorm's running statistics.


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
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)  # step equally


# %% [markdown]
# PyTorch's own is used in the same way, but nobody calls `average_gradients`: it has
# put itself into `backward()`. The three lines that make it are also those for a GPU
# (not run here): the model goes to the rank's `device`, as the script of notebook 02
# sets it, and `device_ids` names it. The batch and its labels must go there as well.
#
# **Predict:** we start from two *different* seeds on purpose. How large is the largest
# distance of the copies in 45 steps? How far apart are your DDP and PyTorch's?

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

naive = NaiveDDP(make_model(seed=rank))
print("largest distance:", max(train(naive, naive.average_gradients)))

model = make_model(seed=rank).to(device)
device_ids = [device.index] if device.type == "cuda" else None
ddp = DistributedDataParallel(model, device_ids=device_ids)
train(ddp)


def difference(one, other):
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (one, other)]
    return (vectors[0] - vectors[1]).abs().max().item()


print("PyTorch's differs by", difference(naive, ddp))

# %% [markdown]
# Exactly zero, at every step: an all-reduce gives all ranks the same bits, and equal
# weights plus equal bits stay equal. And your class *is* DDP. (On more than two ranks
# the order of summation may change the last digits.) What is left to gain is time:
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
#
# **Predict:** the same as code, for any number of ranks W. How many bytes does a rank
# send for a tensor of 1000, with two ranks? And with 64?


# %%
# %%ranks
def ring_all_reduce(tensor):
    chunks, num_bytes = tensor.view(-1).tensor_split(world_size), 0
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        incoming = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(incoming)
        sending = dist.isend(outgoing, (rank + 1) % world_size)  # no wait: all send
        dist.recv(arrived, (rank - 1) % world_size)
        sending.wait()
        incoming.copy_(incoming + arrived if step < world_size - 1 else arrived)
        num_bytes += outgoing.nbytes
    return num_bytes


by_ring = torch.arange(250.0) * (rank + 1)
by_torch = by_ring.clone()
print("sent:", ring_all_reduce(by_ring), "bytes")
dist.all_reduce(by_torch)
assert torch.equal(by_ring, by_torch)

# %% [markdown]
# In a ring a rank sends 2 (W - 1) / W tensors: with 64 ranks 1.97, and never two.
# Through rank 0, that rank would send 63. What grows is the number of messages, each
# after the one before: 2 (W - 1). So for many ranks and small tensors NCCL, the library
# for GPUs, has
# [trees](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/)
# as well.
#
# ## When: hooks and buckets
#
# `NaiveDDP` waits until backward is over, and then sends one message a parameter. But
# some gradients are ready long before others. A *hook* is a function of yours that
# PyTorch calls when something has happened: here, when a parameter's `.grad` is there.
#
# **Predict:** in which order will the four gradients come?

# %%
# %%ranks
from functools import partial

model = make_model(seed=0)
for name, parameter in model.named_parameters():
    hook = partial(lambda name, parameter: print(name, "is ready"), name)
    parameter.register_post_accumulate_grad_hook(hook)
F.cross_entropy(model(x[:16]), y[:16]).backward()

# %% [markdown]
# The *last* layer comes first, on both ranks: backward starts at the loss. So the
# network can begin while the processor still computes. As each message has its fixed
# cost, several gradients share a *bucket*. The last one to come into it sends it off,
# without waiting; at the end we wait, and put the means back.


# %%
# %%ranks
class BucketDDP(NaiveDDP):
    def __init__(self, module, bucket_bytes):
        super().__init__(module)
        self.under_way, bucket = [], []
        for parameter in reversed(list(module.parameters())):
            bucket = bucket if sum(p.nbytes for p in bucket) < bucket_bytes else []
            bucket.append(parameter)
            parameter.register_post_accumulate_grad_hook(partial(self.ready, bucket))

    def ready(self, bucket, parameter):
        if all(p.grad is not None for p in bucket):
            flat = nn.utils.parameters_to_vector([p.grad for p in bucket]) / world_size
            self.under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def average_gradients(self):
        while self.under_way:
            bucket, flat, handle = self.under_way.pop(0)
            handle.wait()
            nn.utils.vector_to_parameters(flat, [p.grad for p in bucket])


# %% [markdown]
# With one bucket for everything, nothing leaves before the end: the *flat* average. We
# time a model of 60 small parameters in all three ways, backward and average together.
#
# **Predict:** which is the slowest, and by how much?

# %%
# %%ranks
from time import perf_counter as now


def step_s(wrapped):
    wrapped.zero_grad()
    loss = F.cross_entropy(wrapped(x[:16].flatten(1)), y[:16])
    dist.barrier()
    began = now()
    loss.backward()
    wrapped.average_gradients()
    return now() - began


deep = [nn.Sequential(*map(nn.Linear, [64] * 30, [64] * 30)) for _ in range(3)]
wraps = NaiveDDP(deep[0]), BucketDDP(deep[1], 2**30), BucketDDP(deep[2], 2**17)
times = [[step_s(w) for w in wraps] for _ in range(30)]
naive_s, flat_s, bucket_s = [sorted(column)[15] for column in zip(*times, strict=True)]
print(f"flat 1, naive ~ {naive_s / flat_s:.1f}, buckets ~ {bucket_s / flat_s:.1f}")
assert naive_s > flat_s

# %% [markdown]
# Sixty messages cost more than one. Buckets can win only where sending runs beside the
# computing; here both want the same two cores. Let us watch PyTorch's own at it, with
# ResNet-18. By default a bucket is closed when it has reached 25 MB, the first already
# at 1 MB, so that sending starts early. A *communication hook* is called when a bucket
# is full, and has to sum it; ours also notes when it left and when the sum was back.
#
# **Predict:** 62 gradients, three buckets. Which of the buckets is still under way when
# backward has computed everything?

# %%
# %%ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchvision.models import resnet18


def note(flights, bucket):
    flight = [{names[p]: p.nbytes for p in bucket.parameters()}, now()]
    flights.append(flight)
    summed = allreduce_hook(None, bucket)  # divides, and sends
    return summed.then(lambda done: flight.append(now()) or done.value())


wrapped = DistributedDataParallel(resnet18(num_classes=10))
names, ready, flights = {p: n for n, p in wrapped.module.named_parameters()}, [], []
for p in names:
    p.register_post_accumulate_grad_hook(lambda p: ready.append((names[p], now())))
wrapped.register_comm_hook(flights, note)
for _ in range(2):
    flights.clear()
    wrapped(torch.rand(16, 3, 64, 64)).sum().backward()

# %% [markdown]
# We look at the second pass: in the first everything is one bucket, and PyTorch learns
# the order in which gradients come, to pack its buckets by it
# ([#35137](https://github.com/pytorch/pytorch/pull/35137)). A tick is a gradient that
# is ready, a bar a bucket under way.

# %%
# %pull ready 0
# %pull flights 0
from ddp_lab import plot_buckets

sizes = [item for bucket, *_ in flights for item in bucket.items()]
order = [list(bucket) for bucket, *_ in flights]
times = [left_and_back for _, *left_and_back in flights]
plot_buckets(sizes[::-1], order, ready_s=dict(ready), sent_s=times)
plt.show()

# %% [markdown]
# The first bucket is on its way while most layers are still to be computed. Whether it
# is back before the dashed line depends on the network (here on the cores, and on what
# else they do). But the last bucket is always under way there: it holds the first
# layers, and when it is full, backward has nothing left to compute, and the rank waits.
#
# ## A gradient that never comes
#
# A bucket waits for all of its gradients. **Predict:** this model has a head that the
# loss does not use. When does it fail, in the first step or later?


# %%
# %%ranks
class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x):
        return self.used(x.flatten(1))


for options in ({}, {"find_unused_parameters": True}):
    wrapped = DistributedDataParallel(TwoHeads(), **options)
    try:
        for step in (1, 2):
            where = f"step {step}"
            F.cross_entropy(wrapped(x), y).backward()
        print(options, "two steps, and no error")
    except RuntimeError as error:
        lines = str(error).splitlines()
        print(f"{where}: {lines[0].split('. ')[0]}. {lines[-2]}")

# %% [markdown]
# In the second, as the bucket of the first has still not left. The numbers are places
# in `parameters()`; `TORCH_DISTRIBUTED_DEBUG=DETAIL` gives names. With
# `find_unused_parameters=True` DDP looks through the graph after each forward, and does
# not wait for what is not in it. That takes time: better freeze what is not used.
#
# ## Several backward passes, one message
#
# To accumulate gradients over four micro-batches, nobody need talk after the first
# three. `no_sync()` says so; forward *and* backward belong inside.
#
# **Predict:** how many all-reduces do four micro-batches cost, with and without?

# %%
# %%ranks
from contextlib import nullcontext


def count(sent, bucket):
    sent.append(bucket.index())
    return allreduce_hook(None, bucket)


for quiet in (False, True):
    wrapped, sent = DistributedDataParallel(make_model(seed=0)), []
    wrapped.register_comm_hook(sent, count)
    for k in range(4):
        micro = slice(4 * k, 4 * k + 4)
        with wrapped.no_sync() if quiet and k < 3 else nullcontext():
            (F.cross_entropy(wrapped(x[micro]), y[micro]) / 4).backward()
    off = (wrapped.module[1].weight.grad - goal).abs().max()
    print(f"no_sync {quiet}: {len(sent)} all-reduces, gradient off by ~ {off:.0e}")
    assert off < 1e-6

# %% [markdown]
# The gradient is the same, that of the 32 images.
#
# ## What DDP does not do
#
# DDP *contains* the model: the names in `ddp.state_dict()` begin with `module.`. Save
# `ddp.module.state_dict()`, on one rank; then the file can be loaded without DDP. But
# for *training* call the wrapper. It makes the *gradients* equal; all else is yours.
#
# **Predict:** a step that calls `wrapped.module(x)`; a step where rank 1 has another
# learning rate; a BatchNorm's statistics; the loss of the trained model. Which are
# equal on both ranks, and which will raise an error?


# %%
# %%ranks
def distance_after_a_step(lr, inside=False):
    wrapped = DistributedDataParallel(make_model(seed=0))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    F.cross_entropy(wrapped.module(x) if inside else wrapped(x), y).backward()
    optimizer.step()
    return distance(wrapped)


of_module = distance_after_a_step(0.1, inside=True)
of_lr = distance_after_a_step(0.1 if rank == 0 else 0.2)
print(f"apart after a step: .module ~ {of_module:.3f}, rates ~ {of_lr:.3f}")
norm = DistributedDataParallel(nn.BatchNorm1d(64))
norm(x[:16].flatten(1))
statistic = norm.module.running_mean[28].item()  # of one pixel
loss = F.cross_entropy(ddp(x[:16]), y[:16]).item()
print(f"BatchNorm's running mean ~ {statistic:.4f}, loss ~ {loss:.4f}")
assert min(of_module, of_lr, statistic, loss) > 0.001

# %% [markdown]
# None is equal, and nothing complains. The list to remember:
#
# | DDP does not | so |
# |---|---|
# | average what went round the wrapper | call `ddp(x)`: that arms its hooks |
# | divide the data | give each rank its shard: the next notebook |
# | synchronise BatchNorm's batch statistics | SyncBatchNorm (lesson 06), or GroupNorm |
# | average BatchNorm's running statistics | the next forward takes rank 0's |
# | average the loss that you print | all-reduce it, or call it local |
# | broadcast the optimiser's settings and state | same code, same file on all ranks |
#
# ## Summary
#
# - Copies stay one model if they start equal (broadcast) and take equal steps (mean of
#   the gradients). The mean over equal shards is the gradient of the global batch.
# - DDP by hand takes thirteen lines, and on two ranks agrees with PyTorch's to the bit.
# - In a ring all-reduce a rank sends less than two tensors, whatever the world size.
# - Hooks send full buckets while backward still computes, the last layers first. A
#   bucket waits for all of its gradients; `no_sync` keeps it at home.
# - Call the wrapper; save `.module`. Data, BatchNorm, printed loss and optimiser are
#   yours.
#
# ## Exercises
#
# `check` runs your function on one, two and three ranks and says which property fails.
#
# **1.** A guard for long runs: return True on all ranks if the parameters of all copies
# are equal to the last bit, else False on all ranks; change nothing. (Hint: an
# all-reduce can also take the smallest value, `op=dist.ReduceOp.MIN`.)

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
# **2.** Average the gradients with *one* message; `check` counts. A frozen parameter
# has no gradient on any rank; leave it so, and leave the parameters as they are.


# %%
def average_gradients(model):
    # BEGIN SOLUTION
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
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
