# %% [markdown]
# # One curve: the same training on any number of ranks
#
# > On eight GPUs my model learns worse than on one. Is it a bug, or the batch size?
#
# A training may change with the number of ranks for two reasons. Either the ranks
# compute something else than one process would: that is a mistake, and can be found by
# measuring. Or somebody has changed the global batch: that is another training, and
# needs another learning rate. At the end of this notebook you will be able to
#
# - prove that 1, 2 and 4 ranks train the same model, and say what is left between them,
# - trade ranks for accumulation steps without changing the curve,
# - say when BatchNorm spoils it, by how much, and write the synchronised one,
# - choose a learning rate for a larger batch, and know how far that can go.
#
# It takes about 30 minutes.

# %% [markdown]
# ## One, two and four
#
# We train on one rank and on four: the same settings, seed and global batches, a
# ResNet-18 with GroupNorm, which normalises each image by itself, and five steps of 32
# images.

# %%
from dataclasses import replace

import torch
import torch.distributed as dist

from ddp_lab import TrainConfig, compare_world_sizes

config = TrainConfig(
    image_size=8,  # pixels
    norm="group",
    global_batch_size=32,
    limit_train=160,
    limit_test=64,
    epochs=1,
    lr=0.001,
    schedule="constant",
    device="cpu",
)

# %% [markdown]
# One rank and four stay alive for the whole lesson, with one thread each. `losses_of`
# collects what a training reports.

# %%
from torch import nn

from ddp_lab import Workers, fit_on_rank, load_dataset, send_record

one, four = Workers(1, num_threads=1), Workers(4, num_threads=1)


def losses_of(workers, config):
    """Train, and return the loss of each step, of all ranks together."""
    lines = []
    data = load_dataset(config)
    keep = lambda rank, line: lines.append(line)  # noqa: E731
    workers.run(fit_on_rank, config, None, data, on_line=send_record, on_record=keep)
    return [line["loss"] for line in lines if line["kind"] == "step"]


# %% [markdown]
# One rank runs twice. That is the control: what differs between two equal runs has
# nothing to do with the number of ranks.
#
# **Predict:** how far apart will the losses be: not at all, in the seventh digit, in
# the third?


# %%
def furthest(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


curve, again, on_four = (losses_of(ranks, config) for ranks in (one, one, four))
print("one rank, again:", "the same bits" if again == curve else "another curve")
print(f"four ranks: up to ~ {furthest(on_four, curve):.0e} apart")
assert again == curve
assert furthest(on_four, curve) < 1e-2

# %% [markdown]
# The same number of ranks gives the same bits. Another number gives *nearly* the same.
# Is that rest rounding, or a small mistake? Floating point sums depend on their order,
# and ranks are another order. If that is all, more digits must make it smaller.
#
# `compare_world_sizes` measures it, for the weights too: it trains with each number of
# ranks, with the first one twice, and compares after each step.
#
# **Predict:** float64 has about nine more digits than float32. By what factor will the
# difference shrink?

# %%
import matplotlib.pyplot as plt

from ddp_lab import plot_comparison

exact = compare_world_sizes((1, 2, 4), replace(config, precision="float64"))
print(f"weights have moved by up to ~ {max(exact.curves[0].movements):.0e}")
for other in exact.curves[1:]:
    loss, weights = max(other.loss_differences), max(other.weight_differences)
    print(f"{other.world_size} ranks: loss ~ {loss:.0e}, weights ~ {weights:.0e} apart")
    assert max(loss, weights) < 1e-7
assert exact.is_rounding
assert max(exact.control.weight_differences) == 0  # one rank, again
plot_comparison(exact, "1, 2 and 4 ranks train one model; what is left is rounding")
plt.show()

# %% [markdown]
# By about that many digits. No mistake shrinks like this: a wrong sample or a wrong
# factor is wrong by as much in any precision.
#
# On the left three curves are drawn, and one is seen. On the right is the rest, step by
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
# each rank takes its *sum*, times ranks over samples of all ranks, and DDP's mean makes
# the rest. The lab's training step says so in two lines:
#
# ```
# weight = dist.get_world_size() / num_samples
# (loss_sum * weight).backward()
# ```
#
# With `drop_last=False` the rest of an epoch is trained on, too. 75 images are 32, 32
# and 11: on four ranks 3, 3, 3 and 2.
#
# **Predict:** is the third loss still the same on one rank and on four?

# %%
uneven = replace(config, limit_train=75, drop_last=False)
on_one, on_four = losses_of(one, uneven), losses_of(four, uneven)
print(f"{len(on_four)} steps, 1 and 4 ranks: ~ {furthest(on_one, on_four):.0e} apart")
assert len(on_four) == 3
assert furthest(on_one, on_four) < 1e-3

# %% [markdown]
# It is.
#
# ## Accumulation: ranks one after the other
#
# A gradient is a sum over samples, and a sum can be taken in parts: on several ranks at
# once, or on one rank one part after the other. So
#
# global batch = ranks x micro-batch x accumulation steps
#
# and all splits with the same product are the same training. `micro_batch_size` is what
# a rank holds at once. DDP sends gradients with the last part only (`no_sync` before).
#
# **Predict:** which of these three runs departs from the curve above?

# %%
for workers, micro in [(one, 4), (four, 8), (four, 2)]:
    ranks = workers.num_ranks
    losses = losses_of(workers, replace(config, micro_batch_size=micro))
    off = furthest(losses, curve)
    print(
        f"{ranks} x {micro:2} images x {32 // (ranks * micro)} steps: ~ {off:.0e} off"
    )
    assert off < 1e-2

# %% [markdown]
# None. This is how a training made for 32 GPUs runs on four: eight times as many
# accumulation steps, eight times as long, the same curve.
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
plain = replace(config, norm="batch", lr=0.01, precision="float64")
alone, apart = losses_of(one, plain), losses_of(four, plain)

print(f"first loss: ~ {alone[0]:.3f} on one rank, ~ {apart[0]:.3f} on four")
print(f"1 and 4 ranks: up to ~ {furthest(alone, apart):.1f} apart")
assert abs(alone[0] - apart[0]) > 1e-3
assert furthest(alone, apart) > 0.1

# %% [markdown]
# Not even there. One rank normalises by 32 images, four by 8 each: noisier statistics,
# another function. That is no mistake, and many trainings live well with it; with few
# images a rank it hurts. And accumulation does not help: each micro-batch is a batch of
# its own.
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
# running averages for evaluation, are left out.)


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
# Now eleven images on four ranks, in unequal shares: normalised by each rank alone, by
# our function, and by `ddp_lab`'s `SyncBatchNorm`; at the end we try PyTorch's own. We
# compare outputs, and gradients of some loss, with BatchNorm in one process.


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

answers = four.run(normalise, images.detach(), [5, 1, 3, 2])
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
# `nn.SyncBatchNorm`, which works on GPUs only.
#
# So `norm="sync"` takes the lab's on CPUs and PyTorch's on GPUs
# (`nn.SyncBatchNorm.convert_sync_batchnorm(model)`, before wrapping).
#
# **Predict:** where will four ranks with `norm="sync"` be in the picture?

# %%
from ddp_lab import plot_losses

synced = losses_of(four, replace(plain, norm="sync"))
runs = {"1 rank": alone, "4 ranks, BatchNorm": apart, "4 ranks, synced": synced}
panel = {label: (32, losses) for label, losses in runs.items()}
plot_losses({"": panel}, "Synchronised BatchNorm brings four ranks back to the curve")
plt.show()

print(f"synced: ~ {furthest(alone, synced):.0e} apart from one rank")
assert furthest(alone, synced) < 1e-7
one.close()
four.close()

# %% [markdown]
# On the curve, to the last digits. In float32 it leaves it after some steps, because
# this network amplifies rounding: whoever looks for mistakes, looks in float64.
#
# It costs two small all-reduces a layer, forward and backward, and each waits for the
# slowest rank. So it is for few images a rank; otherwise keep BatchNorm, or take
# GroupNorm.
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
# The number of ranks does not matter, we have seen. The *global batch* does: with k
# times the images a step, an epoch has k times fewer steps. Two rules of thumb say how
# much longer a step may be:
#
# - **linear**, lr times k: k small steps become one of the same total length
#   ([Goyal et al. 2017](https://arxiv.org/abs/1706.02677), section 2.1),
# - **square root**, lr times the root of k: keeps the gradient noise per step
#   ([Krizhevsky 2014](https://arxiv.org/abs/1404.5997), who then found linear better).
#
# Ranks do not matter, so one process can try it: a small net of two convolutions on
# digits, ten epochs. A rate of 0.01 suits 16 images.

# %%
from ddp_lab import (
    eval_loader,
    evaluate,
    join_world,
    start_training,
    train_epoch,
    train_loader,
)

small = TrainConfig(
    image_size=8,  # pixels
    epochs=10,
    lr=0.01,
    lr_batch_size=16,
    schedule="constant",
    weight_decay=0.0,
    nesterov=False,
    device="cpu",
)
digits = load_dataset(small)

# %% [markdown]
# These are the parts that `fit` is made of, around a net of our own. After each step
# `train_epoch` gives what this rank has counted: the sum of its samples' losses, how
# many were right, and how many there were. We are the only rank, so it is the run's.


# %%
def train_small(config, data):
    """The loss of each step, and how many test images are right in the end."""
    torch.manual_seed(config.seed)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    losses = []
    with join_world(device="cpu") as world:
        state = start_training(config, net, world, len(data.train))
        batches = train_loader(data, config, world, config.global_batch_size)
        for _ in range(config.epochs):
            for loss_sum, _, num_samples in train_epoch(state, batches, config):
                losses.append((loss_sum / num_samples).item())
            state.epoch += 1
        test = evaluate(net, eval_loader(data, config, world, 360), world.device)
    return losses, test["num_correct"]


# %% [markdown]
# Each rule gets 64 and 256 images. The linear one also gets a *warm-up* at 256, three
# epochs in which the rate rises from 0.01 to its full value: new weights change fast,
# and may not bear long steps yet (Goyal et al., section 2.2).
#
# **Predict:** which rule follows the small batch at 4 times the batch, and at 16 times?

# %%
rules = [(16, "none", 0), (64, "none", 0), (64, "sqrt", 0), (64, "linear", 0)]
rules += [(256, "none", 0), (256, "sqrt", 0), (256, "linear", 0), (256, "linear", 3)]
torch.set_num_threads(1)
runs, ends = {}, {}
for size, rule, warm in rules:
    run = replace(small, global_batch_size=size, lr_scaling=rule, warmup_epochs=warm)
    losses, right = train_small(run, digits)
    runs[size, rule, warm] = losses
    last = losses[-512 // size :]  # of 512 images
    end = ends[size, rule, warm] = sum(last) / len(last)
    told = f"{size:3} images, {rule:6}, warm-up {warm}: lr {run.scaled_lr:.2f}, "
    told += f"{len(losses):3} steps, loss ~ {end:.3f}, "
    print(told + f"right: ~ {right} of 360")
    assert right > 270
assert ends[64, "linear", 0] < ends[64, "none", 0] / 3
for end in (ends[256, "sqrt", 0], ends[256, "linear", 0], ends[256, "linear", 3]):
    assert ends[16, "none", 0] < end < ends[256, "none", 0] / 2

# %% [markdown]
# The test is easy, so look at the training loss. Each point is a mean over 256 images.

# %%
panels = {"4 times the batch: 64": {}, "16 times the batch: 256": {}}
for name, largest in zip(panels, (64, 256), strict=True):
    for (size, rule, warm), losses in runs.items():
        if size in (16, largest):
            panels[name][f"{size}, {rule}" + ", warm-up" * bool(warm)] = size, losses

plot_losses(panels, "At 4 times the batch the linear rule holds; at 16 times none does")
plt.show()

# %% [markdown]
# At 4 times the batch, the old rate is too slow for a quarter of the steps, and the
# linear rule joins the grey curve. At 16 times both rules help, and both stay behind:
# 50 steps are few, and the peaks at the beginning show that 0.16 is near the longest
# step that this net bears. Warm-up gains nothing: the net is shallow, and three epochs
# are a third of the run. (Nets of four convolutions, which we tried, mostly fail at
# that rate with and without it: it makes no rate bearable that is too high for good.)
#
# How far a rule reaches is a matter of data and model:
#
# - ResNet-50 on 1.28 million images: from 256 to 8192 images the error stayed (23.60 %
#   and 23.74 %), with the linear rule and 5 epochs of warm-up; without warm-up 24.84 %,
#   with the square root 26.22 %; at 16,384 images 24.79 %. That was ImageNet in an hour
#   on 256 GPUs (Goyal et al. 2017).
# - ResNet-18 on CIFAR-100: 75.8 % right at 128 images, 74.9 % at 1024, 72.7 % at 4096
#   and 64.1 % at 8192, linear with warm-up; without it 75.2, 73.6, 68.5 and 62.8 %
#   ([koitu/cs439-large-batch-SGD](https://github.com/koitu/cs439-large-batch-SGD)).
#
# `ddp_lab.train` has both rules: `--lr 0.1 --lr-batch-size 256 --lr-scaling linear
# --warmup-epochs 5 --schedule cosine`. If a model learns worse on eight GPUs, first
# keep the global batch, and see whether the curve is the old one. If it is, no rank
# is wrong, and the batch is the question.

# %% [markdown]
# ## Summary
#
# - With the same global batches, any number of ranks trains the same model. What is
#   left is rounding; to be sure, look in float64, where a mistake would stay.
# - Weigh each sample the same: sum of losses, times ranks over samples of all ranks.
# - Global batch = ranks x micro-batch x accumulation steps. Every split is the same
#   training.
# - BatchNorm is another function on each number of ranks; synchronised, it is not.
# - Clip the averaged gradient, once.
# - A larger batch wants a higher rate and a warm-up, up to a size that you measure.
#
# ## Exercises
#
# **1.** The weight of the losses, when no rank knows how many samples the others have.
# `check("loss_weight")` tells the task.


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
# **2.** All ways to split a global batch into micro-batches and accumulation steps.
#
# **3.** The rate of each step, with the linear rule and a gradual warm-up.


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

# %% [markdown]
# ## Next
#
# You can now trust a curve. The next notebook asks what becomes of it when a machine
# fails in the middle: [save, resume, lose a rank](09_survive_failures.ipynb).
