# %% [markdown]
# # One curve: the same training on any number of ranks
#
# > On eight GPUs my model learns worse than on one. Is it a bug, or the batch size?
#
# A training can change with the number of ranks for three reasons:
#
# - the ranks compute something else than was meant: a mistake, which can be found by
#   measuring;
# - a layer looks at all the images that it is given, as BatchNorm does: no mistake, but
#   another function on each number of ranks;
# - the global batch is another one, and wants another learning rate.
#
# At the end of this notebook you will be able to
#
# - prove that 1, 2 and 4 ranks train the same model, and say what is left between them,
# - trade ranks for accumulation steps without changing the curve,
# - say what BatchNorm makes of it, by how much, and write the synchronised one,
# - choose a rate for a larger batch, with warm-up where it is needed.
#
# It takes about 25 minutes.

# %% [markdown]
# ## One, two and four
#
# The same settings, seed and global batches, and a ResNet-18 with GroupNorm, which
# normalises each image by itself. Four ranks stay alive for the whole lesson; to train
# on one, three of them stay idle. `losses_of` returns the loss of each step, of all
# ranks together.

# %%
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab import TrainConfig, Workers, losses_of

config = TrainConfig(
    image_size=8,  # pixels
    norm="group",
    global_batch_size=64,
    limit_train=384,
    limit_test=64,
    epochs=1,
    lr=0.001,
    schedule="constant",
    device="cpu",
)
ranks = Workers(4, num_threads=1)

# %% [markdown]
# One rank runs twice, as the control: what differs between two equal runs has nothing
# to do with the number of ranks.
#
# **Predict:** how far apart will the losses be: not at all, in the seventh digit, in
# the third?


# %%
def furthest(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


curve, again, on_two, on_four = (losses_of(ranks, n, config) for n in (1, 1, 2, 4))
print("one rank, again:", "the same bits" if again == curve else "another curve")
print(f"two ranks:  up to ~ {furthest(on_two, curve):.0e} apart")
print(f"four ranks: up to ~ {furthest(on_four, curve):.0e} apart")
assert again == curve
assert max(furthest(on_two, curve), furthest(on_four, curve)) < 1e-2

# %% [markdown]
# The same number of ranks gives the same bits. Another number gives *nearly* the same.
# Is that rest rounding, or a small mistake? Floating point sums depend on their order,
# and ranks are another order. If that is all, more digits must make it smaller.
#
# `compare_world_sizes` measures it, after each step and for the weights too.
#
# **Predict:** float64 has about nine more digits than float32. By what factor will the
# difference shrink?

# %%
import matplotlib.pyplot as plt

from ddp_lab import compare_world_sizes, plot_comparison

in_float64 = replace(config, precision="float64")
exact = compare_world_sizes((1, 4), in_float64, workers=ranks)
apart = exact.curves[1]
loss, weights = max(apart.loss_differences), max(apart.weight_differences)
print(f"weights have moved by up to ~ {max(exact.curves[0].movements):.0e}")
print(f"4 ranks: loss ~ {loss:.0e}, weights ~ {weights:.0e} apart")
assert max(loss, weights) < 1e-7
assert exact.is_rounding
assert max(exact.control.weight_differences) == 0  # one rank, again
plot_comparison(exact, "1 and 4 ranks train one model; what is left is rounding")
plt.show()

# %% [markdown]
# By about that many digits. No mistake shrinks like this: a wrong sample or a wrong
# factor is wrong by as much in any precision.
#
# On the left two curves are drawn, and one is seen. On the right is the rest, step by
# step: the last digits of the weights (the dashed line is what the last digit of the
# largest one is worth), and of the loss.
#
# ## Why it must be so
#
# The loss to minimise is the mean over the *global* batch. DDP takes the mean of the
# ranks' gradients. For equal shares the mean of means is the mean over all. For unequal
# ones, such as an epoch's last batch, it is not.
#
# **Predict:** four samples with losses 1, 2, 3 and 6; rank 0 holds three of them. What
# is their mean, and what is the mean of the ranks' means?

# %%
shares = [[1.0, 2.0, 3.0], [6.0]]  # losses of the samples of each rank
num_samples = sum(len(share) for share in shares)
weight = len(shares) / num_samples  # ranks / samples on all ranks

print("mean of all samples:", sum(map(sum, shares)) / num_samples)
print("mean of the means:  ", sum(sum(s) / len(s) for s in shares) / len(shares))
print("weighted by count:  ", sum(weight * sum(s) for s in shares) / len(shares))

# %% [markdown]
# The mean of means counts the lonely sample three times. The last line is the cure:
# each rank takes its *sum*, times ranks over samples of all ranks. The lab's training
# step says so in two lines:
#
# ```
# weight = dist.get_world_size() / num_samples
# (loss_sum * weight).backward()
# ```
#
# With `drop_last=False` the rest of an epoch is trained on, too. 150 images are 64, 64
# and 22: on four ranks 6, 6, 5 and 5.
#
# **Predict:** is the third loss still the same on one rank and on four?

# %%
uneven = replace(config, limit_train=150, drop_last=False)
on_one, on_four = losses_of(ranks, 1, uneven), losses_of(ranks, 4, uneven)
print(f"{len(on_four)} steps, 1 and 4 ranks: ~ {furthest(on_one, on_four):.0e} apart")
assert len(on_four) == 3
assert furthest(on_one, on_four) < 1e-3

# %% [markdown]
# It is.
#
# ## Accumulation: ranks one after the other
#
# A gradient is a sum over samples, and a sum can be taken in parts: on several ranks at
# once, or on one rank one part after the other. `backward` adds to `.grad` anyhow; so
# call it on several *micro-batches*, and step once. Only the last one needs to send:
# under `model.no_sync()` DDP leaves the all-reduce out.

# %%
from ddp_lab import plot_accumulation

plot_accumulation(num_ranks=2, micro_batch_size=8, num_micro_batches=4)
plt.show()

# %% [markdown]
# The strip below each row is what a rank's gradient holds. It travels once, when it is
# full, in one message a bucket. In code:
#
# ```
# for k in range(1, num_micro_batches + 1):
#     with contextlib.nullcontext() if k == num_micro_batches else model.no_sync():
#         ...  # forward and backward: DDP reads the flag in forward
# optimizer.step()
# ```
#
# All splits with the same product are the same training.
#
# **Predict:** which of these three departs from one rank that takes 64 images at once?

# %%
short = replace(in_float64, limit_train=128)
whole = losses_of(ranks, 1, short)
for num_ranks, micro in [(1, 8), (2, 8), (4, 4)]:
    losses = losses_of(ranks, num_ranks, replace(short, micro_batch_size=micro))
    steps, off = 64 // (num_ranks * micro), furthest(losses, whole)
    print(f"{num_ranks} x {micro} images x {steps} steps: ~ {off:.0e} off")
    assert off < 1e-7

# %% [markdown]
# None. This is how a training made for 32 GPUs runs on four.
#
# ## BatchNorm: the exception
#
# All this holds if an image's output does not depend on its neighbours. BatchNorm
# normalises each channel by mean and variance *of the batch*, and on a rank that is the
# rank's own part.
#
# **Predict:** same weights, same images, one rank and four: do the losses agree at
# least in step 1, before any training? (We stay in float64, so rounding is no excuse.)

# %%
plain = replace(in_float64, norm="batch", global_batch_size=32, limit_train=96, lr=0.01)
alone, apart = losses_of(ranks, 1, plain), losses_of(ranks, 4, plain)

print(f"first loss: ~ {alone[0]:.3f} on one rank, ~ {apart[0]:.3f} on four")
print(f"1 and 4 ranks: up to ~ {furthest(alone, apart):.1f} apart")
assert abs(alone[0] - apart[0]) > 1e-3
assert furthest(alone, apart) > 1e-2

# %% [markdown]
# Not even there. One rank normalises by 32 images, four by 8 each: noisier statistics,
# another function. That is no mistake; with few images a rank it hurts. And
# accumulation does not help: each micro-batch is a batch of its own.
#
# ## SyncBatchNorm by hand
#
# Mean and variance come from three sums: of the values, of their squares, and their
# count. Sums can be all-reduced. But they take part in every rank's loss, so gradients
# have to come back the same way: **the derivative of a sum over ranks is the sum over
# ranks of the gradients.**


# %%
class AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return AllReduceSum.forward(ctx, gradient)


# %% [markdown]
# With that, the layer is BatchNorm as in the textbook. (Learnt weight and bias, and
# running averages, are left out.)


# %%
def sync_batch_norm(x, eps=1e-5):
    """Normalise the channels of x (n, C, H, W) by the values of all ranks."""
    over = (0, 2, 3)  # all but the channel
    count = x.new_tensor([x[:, 0].numel()])  # may differ between ranks
    sums = torch.cat([x.sum(over), x.square().sum(over), count])
    sums = AllReduceSum.apply(sums)  # (2 C + 1,)
    mean, mean_square = (sums[:-1] / sums[-1]).chunk(2)  # (C,) each
    var = mean_square - mean.square()
    view = (1, -1, 1, 1)
    return (x - mean.view(view)) * (var + eps).rsqrt().view(view)


# %% [markdown]
# Eleven images on four ranks, in unequal shares: by each rank alone, by our function,
# by `ddp_lab`'s `SyncBatchNorm`, and by PyTorch's own. We compare outputs, and
# gradients of some loss, with BatchNorm in one process.


# %%
def normalise(images, shares):
    """Outputs of three layers on this rank's images, and the images' gradients."""
    from ddp_lab import SyncBatchNorm, join_world

    options = {"num_features": images.shape[1], "dtype": images.dtype}
    layers = {
        "each rank alone": nn.BatchNorm2d(**options),
        "sync, by hand": sync_batch_norm,
        "sync, ddp_lab": SyncBatchNorm(**options),
    }
    with join_world(device="cpu") as world:
        x = images.split(shares)[world.rank].requires_grad_()
        results = {}
        for name, layer in layers.items():
            y = layer(x)
            gradient = torch.autograd.grad(y.pow(3).sum(), x)[0]
            results[name] = y.detach(), gradient
        try:
            nn.SyncBatchNorm(3)(x)  # PyTorch's own
        except ValueError as error:
            return results, str(error)[:48]


# %% [markdown]
# **Predict:** how far off are the first and the other two? What if the gradients were
# not all-reduced?

# %%
torch.manual_seed(0)
images = torch.randn(11, 3, 4, 4, dtype=torch.float64, requires_grad=True)
whole = nn.BatchNorm2d(3, dtype=torch.float64)(images)
(gradient,) = torch.autograd.grad(whole.pow(3).sum(), images)

answers = ranks.run(normalise, images.detach(), [5, 1, 3, 2])
for name in answers[0][0]:
    pairs = [results[name] for results, _ in answers]
    outputs, gradients = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    off = (outputs - whole).abs().max().item()
    off_gradient = (gradients - gradient).abs().max().item()
    print(f"{name:16} outputs ~ {off:.0e} off, gradients ~ {off_gradient:.0e}")
    assert (max(off, off_gradient) < 1e-9) == name.startswith("sync")
print("torch's own:", answers[0][1])

# %% [markdown]
# Both are BatchNorm on the whole batch, forward and backward. (Autograd does not see a
# plain `dist.all_reduce`: outputs would be right, and gradients wrong.) The lab's takes
# the mean first and then the squared deviations from it, in two messages, because the
# difference of two large numbers loses digits. The last line is PyTorch's own
# `nn.SyncBatchNorm`, which refuses CPUs.
#
# So `norm="sync"` takes the lab's on CPUs and PyTorch's on GPUs
# (`nn.SyncBatchNorm.convert_sync_batchnorm(model)`, before wrapping).
#
# **Predict:** how far from the one rank will four ranks with `norm="sync"` be?

# %%
synced = losses_of(ranks, 4, replace(plain, norm="sync"))
print(f"four ranks, BatchNorm: ~ {furthest(alone, apart):.0e} apart from one rank")
print(f"four ranks, synced:    ~ {furthest(alone, synced):.0e}")
assert furthest(alone, synced) < 1e-7
ranks.close()

# %% [markdown]
# On the curve, to the last digits. In float32 it may leave it after some steps, where a
# network amplifies rounding: whoever looks for mistakes, looks in float64.
#
# PyTorch's costs an all-gather a layer forward and an all-reduce backward, both small,
# and each waits for the slowest rank. So it is for few images a rank; otherwise keep
# BatchNorm, or take GroupNorm.
#
# ## Clip once, after averaging
#
# Clipping shortens a gradient that is too long. The gradient meant is the run's.
#
# **Predict:** two ranks have the gradients (3, 4) and (-3, 4), the longest allowed is
# 1. What comes out if each rank clips its own, and what if the mean is clipped?


# %%
def clip(gradient, longest=1.0):
    return gradient * min(1.0, longest / gradient.norm().item())


own = torch.tensor([[3.0, 4.0], [-3.0, 4.0]])
print("clipped, then averaged:", torch.stack([clip(g) for g in own]).mean(0))
print("averaged, then clipped:", clip(own.mean(0)))

# %% [markdown]
# Not the same, and the first depends on how the samples were dealt out. So the place is
# between `backward` (the last, if you accumulate) and `optimizer.step()`: there all
# ranks hold the same mean, compute the same norm, and need no message.
#
# ## Batch size and learning rate
#
# The *global batch* does change the training: with k times the images a step, an epoch
# has k times fewer steps. Two rules of thumb say how much longer a step of SGD may be:
#
# - **linear**, lr times k: k small steps become one of the same total length
#   ([Goyal et al. 2017](https://arxiv.org/abs/1706.02677), section 2.1),
# - **square root**, lr times the root of k: keeps the variance of a step
#   ([Krizhevsky 2014](https://arxiv.org/abs/1404.5997), who then found linear better).
#
# And for new weights a **warm-up**: in the first epochs, here two, the rate rises step
# by step to its full value (Goyal et al., section 2.2).
#
# One process can try it. `losses_by_seed` trains a small residual net without
# normalisation on digits, from three seeds. A rate of 0.0035 suits 16 images.

# %%
from ddp_lab import losses_by_seed, plot_losses

small = TrainConfig(
    image_size=8,  # pixels
    epochs=6,
    lr=0.0035,
    lr_batch_size=16,
    schedule="constant",
    weight_decay=0.0,
    nesterov=False,
    device="cpu",
)


def tried(batch, rule, warm=0):
    """Name of a training, with its rate -> its batch, and losses by seed."""
    run = replace(small, global_batch_size=batch, lr_scaling=rule, warmup_epochs=warm)
    name = f"{batch}, {rule}: lr {run.scaled_lr:.2g}" + ", warm-up" * bool(warm)
    return {name: (batch, losses_by_seed(run, seeds=(0, 1, 2)))}


# %% [markdown]
# **Predict:** which rule follows the small batch at 4 times the batch, and at 16 times?
# Where is warm-up needed?

# %%
base = tried(16, "none")
four = base | tried(64, "none") | tried(64, "sqrt") | tried(64, "linear")
sixteen = base | tried(256, "none") | tried(256, "sqrt") | tried(256, "linear")
sixteen |= tried(256, "linear", 2)

for name, (batch, seeds) in (four | sixteen).items():
    ends = [sum(losses[-512 // batch :]) * batch / 512 for losses in seeds]
    print(f"{name:32}", *(f" ~ {end:.3f}" for end in sorted(ends)))
    assert len(ends) == 3

panels = {"4 times the batch: 64 images": four, "16 times: 256 images": sixteen}
plot_losses(panels, "At 16 times the batch, the linear rule needs a warm-up")
plt.show()

# %% [markdown]
# The table has the loss over the last 512 images of each seed; in the picture thin
# lines are seeds, thick ones their median. At 4 times the batch the old rate is slow,
# and both rules come near the grey curve. At 16 times the linear rule fails: its first
# steps throw the loss up, and most seeds never make up for it. After a warm-up the same
# rate is borne, and comes out in front, but short of the grey curve.
#
# At new weights this net's loss is steep, and a long step overshoots; short ones lead
# to where it is flatter ([Kalra and Barkeshli 2024](https://arxiv.org/abs/2406.09405)
# measured that this is most of what warm-up does). **We chose this net and rate because
# they show it**: of other small nets some gained nothing, and two got worse.
#
# How far does a rule reach? Measured by others, with SGD:
#
# - ResNet-50 on ImageNet, error: 23.60 % at 256 images; at 8192 23.74 % with the linear
#   rule and 5 epochs of warm-up, 24.84 % without, 26.22 % with the square root (means
#   of 5 runs; Goyal et al., tables 1 and 2a).
# - ResNet-18 on CIFAR-100, linear with warm-up: 75.8 % right at 128 images, 74.9 % at
#   1024, 64.1 % at 8192; without it 75.2, 73.6 and 62.8 % (single runs; logs `eval/s1`
#   and `eval/s1_no_warmup` of
#   [cs439-large-batch-SGD](https://github.com/koitu/cs439-large-batch-SGD)).
#
# **Adam** is another matter: it divides a gradient by its running size, so only the
# noise changes with the batch. Its rule is the *square root* for the rate, with 1 -
# beta times k for both betas ([Malladi et al.
# 2022](https://arxiv.org/abs/2205.10287)), as long as noise outweighs the gradient;
# beyond, the best rate can even fall ([Li et al.
# 2024](https://arxiv.org/abs/2405.14578)).
#
# `ddp_lab.train` uses SGD and has both rules: `--lr 0.1 --lr-batch-size 256
# --lr-scaling linear --warmup-epochs 5 --schedule cosine`. If a model learns worse on
# eight GPUs, first keep the global batch, and see whether the curve is the old one. If
# it is, no rank is wrong, and the batch is the question.

# %% [markdown]
# ## Summary
#
# - With the same global batches, any number of ranks trains the same model. What is
#   left is rounding; to be sure, look in float64, where a mistake would stay.
# - Weigh each sample the same: sum of losses, times ranks over samples of all ranks.
# - Global batch = ranks x micro-batch x accumulation steps. Every split is the same
#   training.
# - BatchNorm is another function on each number of ranks, which is no mistake;
#   synchronised, it is the same one.
# - Clip the averaged gradient, once.
# - A larger batch wants a higher rate, up to a size that you measure: with SGD up to k
#   times, with Adam its root. Warm up where the first steps throw the loss up.
#
# ## Exercises
#
# **1.** `loss_weight(num_samples)`: each rank has `num_samples` samples of the global
# batch, some more, some fewer, some perhaps none, and no rank knows the others'
# numbers. It multiplies the *sum* of its losses by what you return, and calls
# `backward`; DDP takes the mean over ranks. Return the number that makes this the
# gradient of the mean loss over all samples. The process group is open.


# %%
import torch
import torch.distributed as dist

from ddp_lab import check


def loss_weight(num_samples):
    # BEGIN SOLUTION
    total = torch.tensor(float(num_samples))
    dist.all_reduce(total)
    return dist.get_world_size() / total.item()
    # STUB
    # raise NotImplementedError("how many samples are there in all?")
    # END SOLUTION


check(loss_weight, "loss_weight")

# %% [markdown] tags=["solution"]
# A rank without samples calls the all-reduce like the others, with 0. In the lab's loop
# the message is saved: the size of a global batch follows from the settings.

# %% [markdown]
# **2.** `splits(global_batch_size, world_size)`: list all pairs `(micro_batch_size,
# num_steps)` that make this global batch on so many ranks, the largest micro-batch
# first. If it does not divide by the ranks, the list is empty.
#
# **3.** `warm_up(...)`: the rate of a step, counted from 0, with the linear rule. Step
# 0 takes `lr`, which suits `lr_batch_size`; from there it rises by equal amounts, and
# is full at step `num_warmup_steps` and ever after. With no warm-up steps it is full at
# once.


# %%
def splits(global_batch_size, world_size):
    # BEGIN SOLUTION
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        return []
    return [(share // k, k) for k in range(1, share + 1) if share % k == 0]
    # STUB
    # raise NotImplementedError
    # END SOLUTION


def warm_up(step, lr, lr_batch_size, global_batch_size, num_warmup_steps):
    # BEGIN SOLUTION
    full = lr * global_batch_size / lr_batch_size
    if step >= num_warmup_steps:
        return full
    return lr + (full - lr) * step / num_warmup_steps
    # STUB
    # raise NotImplementedError
    # END SOLUTION


check(splits, "splits")
check(warm_up, "warm_up")

# %% [markdown] tags=["solution"]
# The order of the two cases also keeps a warm-up of 0 steps from dividing by 0.
# PyTorch's own is `LinearLR(optimizer, lr / full, total_iters=num_warmup_steps)`,
# for an optimiser made with `full`, stepped after each optimiser step; it needs at
# least one step of warm-up, and a full rate that is no smaller than `lr`.

# %% [markdown]
# ## Next
#
# You can now trust a curve. The next notebook asks what becomes of it when a machine
# fails in the middle: [save, resume, lose a rank](09_survive_failures.ipynb).
