# %% [markdown]
# # One GPU is not enough
#
# > `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 392.00 MiB.`
#
# This line is how most people come to several GPUs. It says that the memory is full,
# and not of what. That is worth knowing, because some of it shrinks when you add GPUs,
# and some does not.
#
# At the end of this notebook you will be able to
#
# - name the four things that fill a GPU, and count the bytes of each,
# - tell which batch fits, before you have the GPU,
# - choose between three ways out, and say how large the batch is for the optimiser.
#
# It takes about 20 minutes, and no GPU.

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
    images = torch.empty(num_images, 3, 224, 224)
    return images, torch.empty(num_images, dtype=torch.long)


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
# copies, with AdamW four. They are there whatever the batch is: call them *fixed*.
#
# For us, with SGD, that makes 134 MB. No GPU is too small for it. So what was too
# large?
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
# Ten times what is fixed, at a modest batch. Here is the whole step, one thing after
# the other.

# %%
import matplotlib.pyplot as plt

from ddp_lab import plot_memory, style

kept, gradients = zip(*[(a / MB, g / MB) for a, g in trace], strict=True)
fixed = [2 * num_mb(model.parameters())] * len(trace)

with plt.rc_context(style()):
    figure, axes = plt.subplots()
    names = ["parameters and momentum", "gradients", "activations"]
    colours = ["#3d3d3d", "#9d9d9d", "#AA3377"]
    axes.stackplot(range(len(trace)), fixed, gradients, kept, colors=colours)
    axes.legend(names, loc="upper left", ncols=3)
    axes.set_ylim(0, 1700)
    axes.axvline(kept.index(max(kept)), ymax=0.86, color="k", linestyle=":")
    axes.set(xlabel="changes of memory, in order", ylabel="memory (MB)")
    axes.set_title("Memory climbs in the forward pass and falls in the backward pass")
    plt.show()

# %% [markdown]
# Left of the dotted line is the forward pass: every layer adds something. Right of it
# the backward pass takes it away, last layer first, and leaves gradients behind. The
# peak is in the middle, and it is the peak that has to fit.
#
# The climb is steepest at the beginning. Which layers are that?

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
    left.barh(names, parameters, color="#3d3d3d")
    left.set(xlabel="parameters (MB)")
    right.barh(names, kept, color="#AA3377")
    right.set(xlabel="activations of 64 photos (MB)")
    title = "Parameters sit in the last layers, activations in the first"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    plt.show()

# %% [markdown]
# They are each other's mirror image. Early layers have few channels, so few parameters,
# but large pictures: 112 x 112 after the first convolution, 7 x 7 at the end. So the
# number of parameters tells you little about the memory a network needs; its input
# size tells you more.
#
# ## Is that true?
#
# Fake tensors could be wrong. The same function works with real ones, so let us run two
# real photos (of noise) and compare.

# %%
with FakeTensorMode():
    fake = trace_step(resnet18(), *photos(2))
real = trace_step(resnet18(), torch.randn(2, 3, 224, 224), torch.tensor([0, 1]))

print("equal at each of", len(real), "changes:", fake == real)

# %% [markdown]
# To the byte. On a GPU some things come on top: the CUDA context (a few hundred MB),
# the workspace of the convolutions, tensors that live for one operation only, and gaps
# that the allocator cannot fill. Leave a tenth of the memory free for them. When you
# have the GPU, ask it: `torch.cuda.max_memory_allocated()`.
#
# ## Which batch fits?
#
# **Predict:** you have a GPU of 8 GB. Which of the batches 32, 64, 128, 256 and 512
# fit?


# %%
def memory(num_images, bf16=False):
    with FakeTensorMode():
        trace = trace_step(resnet18(), *photos(num_images), bf16)
    parts = dict.fromkeys(("parameters", "gradients", "optimiser"), trace[-1][1])
    return {**parts, "activations": max(a for a, g in trace), "batch_size": num_images}


sizes = [32, 64, 128, 256, 512]
rows = [memory(num_images) for num_images in sizes]
plot_memory(rows, limit_bytes=8 * GB)
plt.show()

# %% [markdown]
# The grey fixed part is a thin line at the bottom; the activations grow with the batch.
# (The gradients count in full here, though at the peak there are hardly any yet. When
# we accumulate them, below, there will be.) Two batches tell all others:

# %%
per_image = (rows[1]["activations"] - rows[0]["activations"]) // 32
fixed = sum(rows[0][kind] for kind in ("parameters", "gradients", "optimiser"))

print(f"{fixed / MB:.0f} MB + {per_image / MB:.1f} MB for each photo")
print("largest batch in 8 GB:", (8 * GB - fixed) // per_image, "in theory,")
print("with a tenth left free:", (int(0.9 * 8 * GB) - fixed) // per_image)

# %% [markdown]
# So 256 is what this GPU takes. But our recipe wants a batch of 512. There are three
# ways out, and all of them attack the activations.
#
# ## First way: accumulate gradients
#
# Run two *micro-batches* of 256 one after the other, and step the optimiser only then.
# `backward()` adds to the gradients that are there, so nothing has to be written for
# it, except for one thing. A small network without batch norm, and a batch of 64 cut
# into 4, will show it.
#
# **Predict:** `accumulate(64)` is the gradient of the whole batch. Which of the other
# two is equal to it?

# %%
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
data, target = torch.randn(64, 20), torch.randint(5, (64,))


def accumulate(micro_batch_size, divide_by=1):
    net.zero_grad()
    for part in torch.arange(len(data)).split(micro_batch_size):
        loss = F.cross_entropy(net(data[part]), target[part])
        (loss / divide_by).backward()  # adds to p.grad
    return torch.cat([p.grad.flatten() for p in net.parameters()])


whole = accumulate(64)
for divide_by in (1, 4):
    ratio = accumulate(16, divide_by).norm() / whole.norm()
    print(f"4 micro-batches, loss / {divide_by}: {ratio:.3f} times the gradient")
assert torch.allclose(accumulate(16, divide_by=4), whole, atol=1e-7)

# %% [markdown]
# The loss is a *mean* over samples. Four means of 16 have to be averaged, not added, to
# give the mean of 64. Whoever forgets the division trains with four times the learning
# rate. And with micro-batches of different sizes, each needs its share as its weight.
#
# The activations are those of one micro-batch, so this always fits. The price is time:
# one after the other. And there is fine print:

# %%
net = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 5))
whole = accumulate(64)
off = (accumulate(16, divide_by=4) - whole).norm() / whole.norm()
print(f"with batch norm the gradients are ~ {off:.0%} apart")
assert off > 0.05

# %% [markdown]
# Batch norm computes its statistics over what it sees at once: 16 samples, not 64. The
# model is trained a little differently; often that is fine, but it is not the same.
# Several GPUs have the same problem, and there `SyncBatchNorm` solves it.
#
# ## Second way: half the bytes
#
# Under `torch.autocast`, convolutions and matrix products take and give numbers of 2
# bytes (`bfloat16`), and the activations are mostly those.
#
# **Predict:** a batch of 512 needs 10.6 GB of activations. How much under autocast,
# exactly half?

# %%
half = memory(512, bf16=True)
before, after = rows[-1]["activations"], half["activations"]
print(f"{before / GB:.1f} GB -> {after / GB:.1f} GB, that is {after / before:.0%}")

# %% [markdown]
# Nearly half. The max pooling keeps the *places* of its maxima, as integers of 8 bytes,
# and autocast adds copies of the weights in 2 bytes. The parameters, gradients and the
# optimiser's memory stay as they were.
#
# Now 512 fits on this GPU, and on recent GPUs it is also faster. The price is
# precision: 8 bits for the digits of a number instead of 24. (With `float16` instead of
# `bfloat16` small gradients vanish, and you need a `GradScaler`.)
#
# *Activation checkpointing* attacks the same bytes: it throws activations away and
# computes them again in the backward pass, so it pays with time.
#
# ## Third way: several GPUs
#
# Two GPUs take 256 photos each, at the same time. Each has a copy of the model, and
# between backward and step the gradients are averaged over the GPUs. It is the same
# mean, split over processes instead of over time, so both can be combined.
#
# **Predict:** two ranks take two micro-batches of 16 each. By how much must each divide
# its losses, and what remains to be done with the sum over ranks?

# %%
from ddp_lab import launch

net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
whole = accumulate(64)


def my_part():
    global data, target
    rank = torch.distributed.get_rank()
    data, target = data.chunk(2)[rank], target.chunk(2)[rank]  # 32 samples each
    gradient = accumulate(16, divide_by=2)  # in 2 micro-batches
    torch.distributed.all_reduce(gradient)  # the sum over ranks
    return gradient / 2


gradients = launch(my_part, num_ranks=2, init=True, device="cpu")
for rank, gradient in enumerate(gradients):
    is_whole = torch.allclose(gradient, whole, atol=1e-7)
    print(f"rank {rank} has the gradient of the whole batch:", is_whole)

# %% [markdown]
# Both ranks hold the gradient of all 64 samples, though neither has ever seen more than
# 16 at once. This all-reduce is what DDP will do for you.
#
# ## The effective batch
#
# What the optimiser sees between two steps is the *global* or *effective* batch:
#
# > global batch size = micro-batch size x accumulation steps x number of ranks
#
# It decides how the model learns, so the learning rate goes with it. The micro-batch
# size decides about memory, and only that. Many ways lead to 512:

# %%
fixed_gb, image_gb = fixed / GB, per_image / GB
image_bf16_gb = (half["activations"] - memory(256, True)["activations"]) / 256 / GB

print("micro x accumulate x ranks   GB a GPU   ... with bf16")
for micro, steps, ranks in [(512, 1, 1), (256, 2, 1), (256, 1, 2), (64, 1, 8)]:
    fp32, bf16 = (fixed_gb + micro * each for each in (image_gb, image_bf16_gb))
    print(f"{micro:5} x {steps:10} x {ranks:5} {fp32:10.1f} {bf16:14.1f}")

# %% [markdown]
# The second and third line need the same memory and take the same steps; even batch
# norm sees 256 photos at once in both. The third one takes half the time, if the
# exchange of gradients is quick enough.
#
# What does *not* shrink is the fixed part: each GPU has all parameters, all gradients
# and the whole memory of the optimiser. DDP even adds a copy of the gradients, the
# buckets that it sends (`gradient_as_bucket_view=True` saves it). When the fixed part
# alone is too large, as in language models of billions of parameters, it has to be
# split as well; that is the subject of the last notebook.

# %% [markdown]
# ## Summary
#
# - Memory is parameters + gradients + optimiser, which are fixed, and activations,
#   which grow with the batch and with the size of the input.
# - The peak is at the end of the forward pass. Fake tensors tell it without a GPU.
# - Accumulation pays with time, mixed precision with digits, more GPUs with money. The
#   first and the last leave the gradients as they are, if losses are averaged rightly
#   and no layer looks at the whole batch.
# - Micro-batch size: what fits. Global batch size: what the optimiser sees.
#
# ## Exercises
#
# **1.** Write the formula of the effective batch as a function.

# %%
from ddp_lab import check


def global_batch_size(micro_batch_size, accumulation_steps, world_size):
    # BEGIN SOLUTION
    return micro_batch_size * accumulation_steps * world_size
    # END SOLUTION


# %%
check(global_batch_size, "global_batch_size")

# %% [markdown]
# **2.** Now the other way round, as you will need it: given the global batch size, the
# number of ranks, the bytes that a sample takes and the bytes that are free for
# activations, return the pair (micro-batch size, accumulation steps). The product must
# come out exactly, a micro-batch must fit, and the steps should be as few as possible.


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
# It is not enough to divide and round up: 48 samples of which 9 fit would be 6 steps of
# 8, and not 5.33 of 9. One sample always fits, so the loop ends.

# %% [markdown]
# **3.** A language model of 7 billion parameters is trained with AdamW, all in 4 bytes.
# How many GB are fixed? Does one GPU of 80 GB take it, and do eight, with DDP?
#
# Then put a model of your own in the place of `resnet18` above, with its own inputs in
# `photos`, and read from the pictures which of its layers fill the memory.

# %% [markdown] tags=["solution"]
# Four copies of 4 bytes: 16 bytes for each parameter, so 112 billion bytes or 104 GB.
# One GPU is too small, and eight do not help, since with DDP each holds all of it.

# %% [markdown]
# ## Next
#
# Several GPUs, then. The next notebook takes the first of the three steps: start the
# processes, let them meet, and let them exchange tensors.
