# %% [markdown]
# # One GPU is not enough
#
# > `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 392.00 MiB.`
#
# This line is how many people come to several GPUs. It says that the memory is full,
# and not of what. That is worth knowing, because some of it shrinks when you add GPUs,
# and some does not.
#
# At the end of this notebook you will be able to
#
# - name the four things that fill a GPU, and count the bytes of each,
# - tell which batch fits, before you have the GPU,
# - choose between three ways out, and say how large the batch is for the optimiser.
#
# It takes about 20 minutes, and no GPU. A part at the end is optional, 5 minutes more.

# %% [markdown]
# ## A model without numbers
#
# PyTorch has *fake tensors*. They have a shape, a type and a device, but no numbers, so
# they cost neither memory nor time. `torch.compile` tries out models with them. To
# count bytes, nothing else is needed.
#
# Our model is ResNet-18, for photos of 224 x 224 pixels and 1000 classes.

# %%
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models import resnet18


def photos(num_images):
    images = torch.zeros(num_images, 3, 224, 224)
    return images, torch.zeros(num_images, dtype=torch.long)


with FakeTensorMode():
    model, (images, labels) = resnet18(), photos(64)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
print(tuple(images.shape), "->", loss)

# %% [markdown]
# A forward and a backward pass of 64 photos, done in no time, and the loss is a scalar
# without a value.
#
# ## What does not depend on the batch
#
# **Predict:** ResNet-18 has 11.7 million parameters, 4 bytes each. SGD with momentum
# remembers one number for each of them, AdamW two. What do the four lines say? (A MB is
# 2^20 bytes throughout, a GB 2^30.)

# %%
MB, GB = 2**20, 2**30


def num_mb(tensors):
    return sum(tensor.nbytes for tensor in tensors) / MB


print(f"parameters       {num_mb(model.parameters()):5.1f} MB")
print(f"gradients        {num_mb(p.grad for p in model.parameters()):5.1f} MB")

sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for optimizer in (sgd, torch.optim.AdamW(model.parameters())):
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer.step()
    memory = [t for state in optimizer.state.values() for t in state.values()]
    print(f"{type(optimizer).__name__:5} remembers  {num_mb(memory):5.1f} MB")

# %% [markdown]
# Parameters and gradients are of one size. With SGD's momentum there are three such
# copies, with AdamW four. They are there whatever the batch is: call them *fixed*. For
# us, with SGD, that makes 134 MB. No GPU is too small for it. So what was too large?
#
# ## What the forward pass leaves behind
#
# The backward pass needs what the layers have seen: the input of a convolution, the
# output of a ReLU. Autograd keeps these tensors, which are called *activations*, and it
# lets us watch. `saved_tensors_hooks` takes a function that is called when a tensor is
# put away in the forward pass, and one for when the backward pass takes it out.
#
# Several layers may keep the same memory, so we count storages, not tensors. A storage
# is free when its last user is done.


# %%
def trace_step(model, images, labels, bf16=False):
    """Bytes of activations and of gradients, noted whenever one of them changes."""
    own = {t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
    users, now, trace = {}, [0, 0], []

    def change(kind, num_bytes):
        now[kind] += num_bytes
        trace.append(tuple(now))

    def count(tensor, by):
        storage = tensor.untyped_storage()
        before = users.get(storage, 0)
        users[storage] = before + by
        if storage not in own and 0 in (before, before + by):  # first or last user
            change(0, by * storage.nbytes())
        return tensor

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: change(1, p.grad.nbytes))
    hooks = (lambda tensor: count(tensor, +1)), (lambda tensor: count(tensor, -1))
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
    return trace


# %% [markdown]
# **Predict:** the parameters of ResNet-18 take 45 MB. What do its activations take, for
# a batch of 64 photos?

# %%
with FakeTensorMode():
    trace = trace_step(resnet18(), *photos(64))

most = max(activations for activations, gradients in trace)
print(f"activations of 64 photos: {most / MB:.0f} MB at most")
print(f"when the step is over: activations, gradients = {trace[-1]} bytes")

# %% [markdown]
# Ten times what is fixed, at a modest batch. The most is reached between the forward
# and the backward pass, and it is the most that has to fit.
#
# ## Is that true?
#
# We have only counted, with tensors that are not there. PyTorch's profiler counts
# something else: what its allocator hands out and gets back, here in a forward pass of
# 4 photos with real numbers. What has not come back at the end is held.
#
# **Predict:** how far apart are the two?

# %%
import os

from torch.profiler import ProfilerActivity, profile

os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler would print lines of its own


def measure(model, num_images):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        images, labels = photos(num_images)
        loss = F.cross_entropy(model(images), labels)
    return sum(event.self_cpu_memory_usage for event in profiler.events()), loss


with FakeTensorMode():
    counted = max(a for a, g in trace_step(resnet18(), *photos(4)))
measured, loss = measure(resnet18(), 4)
print(f"counted ~ {counted / MB:.1f} MB, measured ~ {measured / MB:.1f} MB")
print(f"they differ by ~ {measured - counted} bytes; the loss has {loss.nbytes}")
assert abs(measured / counted - 1) < 0.01

# %% [markdown]
# They agree: the backward pass needs everything that is held, except for the loss
# itself. On a GPU, ask for the most in the whole step (not run here):
#
# ```
# torch.cuda.reset_peak_memory_stats()  # in the second step: momentum is there
# F.cross_entropy(model(images), labels).backward()
# optimizer.step()
# print(torch.cuda.max_memory_allocated() / 2**20, "MB")
# ```
#
# That is everything of PyTorch's: what is fixed, the activations, and tensors that live
# for one operation only. The GPU holds still more, such as the CUDA context and the
# buffers of NCCL. Leave a tenth free for what we do not count, until you have measured:
# all numbers of this lesson are counted on a CPU, and none was compared with a GPU.
#
# ## Which batch fits?
#
# **Predict:** you have a GPU of 8 GB. Which of the batches 32, 64, 128, 256 and 512
# fit?

# %%
import matplotlib.pyplot as plt

from ddp_lab import plot_memory


def memory(num_images, bf16=False):
    with FakeTensorMode():
        trace = trace_step(resnet18(), *photos(num_images), bf16)
    parts = dict.fromkeys(("parameters", "gradients", "optimiser"), trace[-1][1])
    return {**parts, "activations": max(a for a, g in trace), "batch_size": num_images}


rows = [memory(num_images) for num_images in (32, 64, 128, 256, 512)]
fixed = 3 * rows[0]["gradients"]
per_image = (rows[1]["activations"] - rows[0]["activations"]) // 32
print(f"{fixed / MB:.0f} MB + {per_image / MB:.1f} MB for each photo")
print("largest batch:", (int(0.9 * 8 * GB) - fixed) // per_image, "with a tenth free")
plot_memory(rows, limit_bytes=8 * GB)
plt.show()

# %% [markdown]
# The fixed part is the thin dark strip at the bottom; the activations grow with the
# batch, and two batches tell all others. (The gradients are counted at the peak, though
# `zero_grad()` has freed them by then, unless you accumulate: that errs on the safe
# side.) So 256 is what this GPU takes. But our recipe
# wants a batch of 512. There are three ways out, and all attack the activations.
#
# ## First way: several GPUs
#
# Two GPUs take 256 photos each, at the same time. Each has a copy of the model, and
# before the step the gradients are averaged over the GPUs.
#
# A small network will show it, with 64 samples on two ranks. Each rank computes the
# mean loss of its own 32.
#
# **Predict:** what has to be done with the two gradients to get that of all 64?

# %%
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab import launch

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
data, target = torch.randn(64, 20), torch.randint(5, (64,))


def gradient_of(model, data, target):
    model.zero_grad()
    F.cross_entropy(model(data), target).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


whole = gradient_of(net, data, target)
print(f"{len(whole)} numbers: the gradient of all 64 samples, in one process")

# %% [markdown]
# Now on two ranks: first by hand, then with DDP around the same network.


# %%
def my_half():
    own = data.chunk(2)[dist.get_rank()], target.chunk(2)[dist.get_rank()]
    by_hand = gradient_of(net, *own)
    dist.all_reduce(by_hand)  # the sum over ranks
    return by_hand / 2, gradient_of(DistributedDataParallel(net), *own)


for rank, gradients in enumerate(launch(my_half, num_ranks=2, init=True, device="cpu")):
    by_hand, by_ddp = (torch.allclose(g, whole, atol=1e-7) for g in gradients)
    print(f"rank {rank} has that gradient: by hand {by_hand}, by DDP {by_ddp}")

# %% [markdown]
# Both ranks hold the gradient of all 64 samples, though neither has seen more than 32.
# The loss is a *mean* over samples, so the two gradients are averaged, and DDP does
# just that inside of `backward()`.
#
# ## Second way: accumulate gradients
#
# With one GPU, run two *micro-batches* of 256 one after the other, and step the
# optimiser only then. `backward()` adds to the gradients that are there, so nothing has
# to be written for it, except for one thing.
#
# **Predict:** 64 samples in 4 micro-batches. Which of the two lines says 1?


# %%
def accumulate(model, micro_batch_size, divide_by):
    model.zero_grad()
    for part in torch.arange(len(data)).split(micro_batch_size):
        loss = F.cross_entropy(model(data[part]), target[part])
        (loss / divide_by).backward()  # adds to p.grad
    return torch.cat([p.grad.flatten() for p in model.parameters()])


for divide_by in (1, 4):
    ratio = accumulate(net, 16, divide_by).norm() / whole.norm()
    print(f"4 micro-batches, loss / {divide_by}: {ratio:.3f} times the gradient")
assert torch.allclose(accumulate(net, 16, divide_by=4), whole, atol=1e-7)

# %% [markdown]
# It is the same mean, over time instead of over processes. Four means of 16 have to be
# averaged, not added, to give the mean of 64. Whoever forgets the division trains, with
# SGD, at four times the learning rate. With micro-batches of different sizes, each
# needs its share as its weight.
#
# The activations are those of one micro-batch, so this fits whenever the fixed part and
# one sample do. The price is time.
# And there is fine print:

# %%
with_norm = nn.Sequential(
    nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 5)
)
whole = gradient_of(with_norm, data, target)
off = (accumulate(with_norm, 16, divide_by=4) - whole).norm() / whole.norm()
print(f"with batch norm the gradients are ~ {off:.0%} apart")
assert off > 0.05

# %% [markdown]
# Batch norm computes its statistics over what it sees at once: 16 samples, not 64. The
# model is trained a little differently; often that is fine, but it is not the same.
# Several GPUs have the same problem, and there `SyncBatchNorm` solves it.
#
# ## Third way: half the bytes
#
# Under `torch.autocast`, convolutions and matrix products take and give numbers of 2
# bytes, and the activations are mostly those. (Ask for `dtype=torch.bfloat16`: on GPUs
# the default is `float16`.)
#
# **Predict:** a batch of 512 needs 10.6 GB of activations. How much under autocast,
# exactly half?

# %%
half = memory(512, bf16=True)
before, after = rows[-1]["activations"], half["activations"]
print(f"{before / GB:.1f} GB -> {after / GB:.1f} GB, that is {after / before:.0%}")

# %% [markdown]
# Nearly half. (The photos themselves, 0.3 GB in 4 bytes, belong to whoever has loaded
# them, and are not counted.) The max pooling keeps the *places* of its maxima, as
# integers of 8 bytes, and autocast adds copies of the weights in 2 bytes. Parameters,
# gradients and the optimiser's memory stay as they were.
#
# Now 512 fits on this GPU. The price is precision: 8 bits for the digits of a number
# instead of 24. (With `float16` instead of `bfloat16` small gradients vanish, and you
# need a `GradScaler`.) *Activation checkpointing* attacks the same bytes: it throws
# activations away and computes them again in the backward pass, so it pays with time.
#
# ## The effective batch
#
# What the optimiser sees between two steps is the *global* or *effective* batch:
#
# > global batch size = micro-batch size x accumulation steps x number of ranks
#
# It decides how the model learns, so the learning rate goes with it. The micro-batch
# size decides about memory and time, and about what batch norm sees. Many ways lead to
# 512. In the table DDP's own memory counts too: it keeps a copy of all gradients, the
# buckets that it sends.
#
# **Predict:** which part of the memory does a second GPU not make smaller?

# %%
gradients = fixed // 3  # as large as the parameters, and as the momentum
image_bf16 = (half["activations"] - memory(256, bf16=True)["activations"]) // 256

print("micro x steps x ranks   fixed (MB)   all (GB)   with bf16 (GB)")
for micro, steps, ranks in [(512, 1, 1), (256, 2, 1), (256, 1, 2), (64, 1, 8)]:
    here = fixed + (gradients if ranks > 1 else 0)
    fp32, bf16 = ((here + micro * each) / GB for each in (per_image, image_bf16))
    way = f"{micro:5} x {steps:5} x {ranks:5}"
    print(f"{way} {here / MB:12.0f} {fp32:10.2f} {bf16:16.2f}")

# %% [markdown]
# The second and third line need nearly the same memory and take the same steps; even
# batch norm sees 256 photos at once in both. The third one takes half the time, if the
# exchange of gradients is quick enough.
#
# What does *not* shrink is the fixed part: each GPU has all parameters, all gradients
# and the whole memory of the optimiser, and with DDP the buckets. (By its documentation
# `gradient_as_bucket_view=True` saves them: the gradients then live in the buckets.)
# When the fixed part alone is too large, as in language models of billions of
# parameters, it has to be split as well. That is no longer DDP: PyTorch has
# [FSDP](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) for it,
# which is not a part of this course.

# %% [markdown]
# ## Optional: a closer look
#
# Here is the whole step of 64 photos, one change of memory after the other.

# %%
from ddp_lab import style

kept, gradients = zip(*[(a / MB, g / MB) for a, g in trace], strict=True)
fixed = [2 * num_mb(model.parameters())] * len(trace)
peak = kept.index(max(kept))

with plt.rc_context(style()):
    figure, axes = plt.subplots()
    names = ["parameters and momentum", "gradients", "activations"]
    colours = ["#222222", "#b0b0b0", "#AA3377"]
    layers = fixed, gradients, kept
    axes.stackplot(range(len(trace)), *layers, colors=colours, labels=names)
    axes.axvline(peak, color="k", linestyle=":")
    axes.text(peak - 3, 1580, "forward pass", ha="right")
    axes.text(peak + 3, 1580, "backward pass", ha="left")
    axes.set(xlabel="changes of memory, in order", ylabel="memory (MB)", ylim=(0, 1700))
    axes.set_title("Memory climbs in the forward pass and falls in the backward pass")
    figure.legend(loc="outside lower center", ncols=3)
    plt.show()

# %% [markdown]
# In the forward pass nearly every layer adds something. The backward pass takes it
# away, last layer first, and leaves gradients behind. The climb is steepest at the
# beginning. Which layers are that?

# %%
own = {t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
rows, seen = [], set(own)


def keep(tensor):
    seen.add(tensor.untyped_storage())
    return tensor


with FakeTensorMode(allow_non_fake_inputs=True):
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        x = images
        for name, layer in model.named_children():
            before = set(seen)
            x = layer(x.flatten(1) if name == "fc" else x)
            kept = sum(s.nbytes() for s in seen - before) / MB
            rows.append((name, kept, num_mb(layer.parameters())))

# %% [markdown]
# **Predict:** which layers have the most parameters, the first or the last? And which
# keep the most activations?

# %%
names, kept, parameters = zip(*reversed(rows), strict=True)

with plt.rc_context({**style(), "figure.figsize": (6.4, 3.4)}):
    figure, (left, right) = plt.subplots(1, 2, sharey=True)
    left.barh(names, parameters, color="#222222")
    left.set(xlabel="parameters (MB)")
    right.barh(names, kept, color="#AA3377")
    right.set(xlabel="activations of 64 photos (MB)")
    title = "Parameters sit in the last layers, activations in the first"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    plt.show()

# %% [markdown]
# They are each other's mirror image. Early layers have few channels, so few parameters,
# but large pictures: 112 x 112 after the first convolution, 7 x 7 at the end. For
# *this* network the number of parameters tells little about its memory, and the size of
# its input more. For others it is the other way round, as in the first exercise. Put a
# model of your own in the place of `resnet18`, with its inputs in `photos`, and look.
# (The last two cells need one that is a chain of its children.)

# %% [markdown]
# ## Summary
#
# - Memory is parameters + gradients + optimiser, which are fixed, and activations,
#   which grow with the batch and with the size of the input.
# - Here the peak is at the end of the forward pass. Fake tensors tell it without a GPU.
# - More GPUs cost money, accumulation costs time, mixed precision digits. The first two
#   leave the gradients as they are, if losses are averaged rightly and no layer looks
#   at the whole batch.
# - DDP does not shrink what is fixed. It adds its buckets, as large as the gradients.
# - Micro-batch size: what fits. Global batch size: what the optimiser sees.
#
# ## Exercises
#
# **1.** How many bytes does one rank hold, whatever the batch is? All numbers have 4
# bytes. For each parameter the optimiser remembers `num_remembered` numbers. A single
# rank trains without DDP; with more ranks DDP is there, and has its buckets.
#
# Then, with your function: a language model of 7 billion parameters is trained with
# AdamW. Does one GPU of 80 GB take it? Do eight, with DDP?

# %%
from ddp_lab import check


def fixed_bytes(num_parameters, num_remembered, world_size):
    # BEGIN SOLUTION
    buckets = 1 if world_size > 1 else 0
    return 4 * num_parameters * (2 + num_remembered + buckets)
    # STUB
    # raise NotImplementedError("parameters, gradients, optimiser, and DDP's buckets")
    # END SOLUTION


# %%
check(fixed_bytes, "fixed_bytes")

# %% [markdown] tags=["solution"]
# Eight GPUs do not help, since with DDP each holds all of it, and the buckets besides:

# %% tags=["solution"]
for num_gpus in (1, 8):
    size_gb = fixed_bytes(7 * 10**9, 2, num_gpus) / 2**30
    print(f"{num_gpus} GPU(s): {size_gb:.0f} GB each")

# %% [markdown]
# **2.** Write the formula of the effective batch as a function.


# %%
def global_batch_size(micro_batch_size, accumulation_steps, world_size):
    # BEGIN SOLUTION
    return micro_batch_size * accumulation_steps * world_size
    # END SOLUTION


# %%
check(global_batch_size, "global_batch_size")

# %% [markdown]
# **3.** Now the other way round, as you will need it: given the global batch size, the
# number of ranks, the bytes that a sample takes and the bytes that are free for
# activations on each rank, return the pair (micro-batch size, accumulation steps). The
# product must come out exactly, a micro-batch must fit, and the steps should be as few
# as possible. The global batch divides by the ranks, and one sample always fits.


# %%
def micro_batches(global_batch_size, world_size, bytes_per_sample, free_bytes):
    # BEGIN SOLUTION
    share = global_batch_size // world_size
    fits = free_bytes // bytes_per_sample
    steps = 1
    while share % steps or share // steps > fits:
        steps += 1
    return share // steps, steps
    # END SOLUTION


# %%
check(micro_batches, "micro_batches")

# %% [markdown] tags=["solution"]
# It is not enough to divide and round up: with 48 samples of which 7 fit, that gives 7
# steps, which do not divide 48; the answer is 8 steps of 6. One sample always fits, so
# the loop ends.

# %% [markdown]
# ## Next
#
# Several GPUs, then. The next notebook takes the first of the three steps: start the
# processes, let them meet, and let them exchange tensors.
