"""BatchNorm over the samples of all ranks, and the all-reduce that autograd can cross.

`nn.BatchNorm2d` normalises by what its own rank holds, so W ranks with N / W samples
each do not compute what one process with N samples would. `SyncBatchNorm` adds the sums
behind mean and variance over all ranks, and then they do. The rest is BatchNorm::

    forward                                  backward
    sums, counts --all-reduce--> mean        d mean <--all-reduce-- (sums of gradients)
    squares      --all-reduce--> variance    d var  <--all-reduce-- (sums of gradients)

A mean of all ranks' samples takes part in all ranks' losses. That is why gradients
have to travel back the same way, and why `all_reduce_sum` comes with a derivative.

`torch.nn.SyncBatchNorm` does the same on GPUs, and refuses CPU tensors.

Letters: ``N`` samples on this rank, ``C`` channels.

Source: Ioffe and Szegedy 2015, "Batch Normalization", algorithm 1
(https://arxiv.org/abs/1502.03167); Zhang et al. 2018, "Context Encoding for Semantic
Segmentation", section 3.1, for the synchronised one (https://arxiv.org/abs/1803.08904).
"""

from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["SyncBatchNorm", "all_reduce_sum"]

_Module = TypeVar("_Module", bound=nn.Module)


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over all ranks, as an operation that autograd can differentiate.

    The sum s = t_0 + t_1 + ... enters every rank's loss L_r. What is minimised is the
    sum (or mean) of those, so d(L_0 + L_1 + ...)/d t_q = dL_0/ds + dL_1/ds + ...: the
    derivative of an all-reduce is an all-reduce of the gradients. (Plain
    `dist.all_reduce` is invisible to autograd: the gradient would stop at it, or count
    this rank's loss only.)

    Args:
        tensor: any shape and floating dtype, equal on all ranks; it stays as it is.
        group: whose ranks, None for all.

    Returns:
        A new tensor, the same on all ranks.

    **Collective**: every rank of the group calls it, and if the result is
    differentiated on one rank, then on all, in the same order.

    **Cost**: one all-reduce of the tensor; another one in the backward pass.
    """
    return _AllReduceSum.apply(tensor, group)  # type: ignore[no-any-return]


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Once more with a derivative of its own, for gradients of gradients.
        return all_reduce_sum(gradient, ctx.group), None


class SyncBatchNorm(_BatchNorm):
    """Normalise each channel by its mean and variance over all ranks' samples.

    It stands in for `nn.BatchNorm1d`, 2d and 3d: same parameters, running statistics
    and state dict. The ranks may hold different numbers of samples, or none; every
    value counts once. In evaluation, and with one rank or no process group, it is
    BatchNorm and sends nothing.

    Two passes, first the mean and then the squared deviations from it, instead of one
    message with sums of x and x^2: their difference E[x^2] - E[x]^2 loses all digits
    where the mean is large beside the deviation, and in float64 training there is no
    wider type to hide that in. The sums are added up and sent as float64, so that the
    counts are exact and float32 results hardly depend on how many ranks added them.

    Each rank's input gets the gradient of the sum of all ranks' losses; weight and bias
    get their own rank's, which DistributedDataParallel averages like any other.

    Args:
        num_features: C, of an input (N, C) or (N, C, anything).
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics, None for the
            plain average over all batches so far.
        affine: learn a weight and a bias a channel.
        track_running_stats: keep running statistics for evaluation; without them,
            evaluation uses the rank's own batch.
        process_group: whose ranks belong together, None for all.
        device: of the parameters and buffers.
        dtype: of the parameters and buffers.

    Raises:
        ValueError: the input has another shape; or, in training, there is one value a
            channel in all ranks together (raised on all of them).

    **Collective**: in training every rank calls forward and backward, also one without
    samples (``loss = scores.sum() * 0``).

    **Cost**: in training two all-reduces, of 8 (C + 1) and 8 C bytes, and two of the
    same size in the backward pass. They cannot overlap with computing.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype
        )
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(
        cls, module: _Module, process_group: dist.ProcessGroup | None = None
    ) -> _Module | Self:
        """Replace each BatchNorm in a module, as torch's method of that name does.

        Args:
            module: changed in place. The new layers hold the old ones' parameters and
                buffers, not copies, so an optimiser of them remains valid.
            process_group: for the new layers.

        Returns:
            The module; a new layer if it is a BatchNorm itself.
        """
        new = {
            old: cls._replacing(old, process_group)
            for old in module.modules()
            if isinstance(old, _BatchNorm)
        }
        if isinstance(module, _BatchNorm):
            return new[module]
        # a layer that has several names keeps them all
        for name, old in list(module.named_modules(remove_duplicate=False)):
            if isinstance(old, _BatchNorm):
                module.set_submodule(name, new[old])
        return module

    @classmethod
    def _replacing(cls, old: _BatchNorm, group: dist.ProcessGroup | None) -> Self:
        options = (old.eps, old.momentum, old.affine, old.track_running_stats, group)
        new = cls(old.num_features, *options)
        new.weight, new.bias = old.weight, old.bias
        new.running_mean, new.running_var = old.running_mean, old.running_var
        new.num_batches_tracked = old.num_batches_tracked
        return new.train(old.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"expected input (N, {self.num_features}, ...), got {input.size()}"
            )

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or _world_size(self.process_group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        # No branch below depends on N: a rank without samples builds the same graph,
        # so its backward pass sends the same messages in the same order.
        x = input.to(torch.promote_types(input.dtype, torch.float32))  # (N, C, ...)
        per_channel = [1, -1] + [1] * (x.dim() - 2)  # (C,) viewed so as to fit x
        over = [dim for dim in range(x.dim()) if dim != 1]

        # 1. Mean: the sum of all ranks' values, divided by their true number.
        num_values = x.new_tensor([x.numel() // x.size(1)], dtype=torch.float64)
        sums = torch.cat([x.sum(over, dtype=torch.float64), num_values])  # (C + 1,)
        sums = all_reduce_sum(sums, self.process_group)
        count = round(sums[-1].item())
        if count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{input.size()} here and 1 value in all ranks together"
            )
        mean = sums[:-1] / max(count, 1)  # (C,)

        # 2. Variance: the same with squared deviations from that mean.
        centred = x - mean.to(x.dtype).view(per_channel)
        squares = centred.square().sum(over, dtype=torch.float64)
        var = all_reduce_sum(squares, self.process_group) / max(count, 1)
        self._track(mean.detach(), var.detach(), count)

        # 3. Normalise, with what this rank has of the batch.
        scale = (var + self.eps).rsqrt().to(x.dtype)
        if self.weight is not None:
            scale = scale * self.weight
        y = centred * scale.view(per_channel)
        if self.bias is not None:
            y = y + self.bias.view(per_channel)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Move the running statistics towards a batch of `count` values a channel."""
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if count == 0:
            return
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / self.num_batches_tracked.item()
        unbiased = var * (count / (count - 1))  # over all ranks, not over this one
        self.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        self.running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)


def _world_size(group: dist.ProcessGroup | None) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)
