"""DistributedDataParallel written out twice: as simple as can be, and in buckets.

    NaiveDDP     the model's copies stay equal: copy once, then average gradients
    BucketDDP    the same, while the backward pass is still running

`BucketDDP` is used like `torch.nn.parallel.DistributedDataParallel`, and
`tests/by_hand` trains both side by side. What happens in one backward pass::

    backward computes   | layer 4 | layer 3 | layer 2 | layer 1 | waits        |
    on the network                          [ layers 4, 3  ]    [ layers 2, 1  ]
                                              bucket 0            bucket 1

Letters: ``W`` is the world size, ``S`` the size in bytes of what is reduced.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.errors import LabError

__all__ = ["BucketDDP", "NaiveDDP", "assign_buckets"]

_MB = 2**20
_UNREACHED = (
    "rank {}: backward gave no gradient to {}. Other ranks would wait for it. Freeze "
    "what the loss does not use before wrapping, or pass find_unused_parameters=True."
)
_TWICE = (
    "rank {}: the gradient of {} changed after it was collected. With activation "
    "checkpointing, use_reentrant=False adds to each gradient once."
)


class NaiveDDP(nn.Module):
    """Keep one model on all ranks in the two ways that matter, and in no other.

    Use it in place of the model, and say when the gradients are to be averaged::

        model = NaiveDDP(model)         # 1. all ranks start from rank 0's weights
        loss_fn(model(x), y).backward()
        model.average_gradients()       # 2. all ranks hold the same gradients,
        optimizer.step()                #    so they take the same step

    The average of the gradients over equal shards is the gradient of the global
    batch, so this is one model trained on ``W`` times the data. What it lacks beside
    `BucketDDP`: the network rests during backward and the processor rests during the
    reduce, there is one message a parameter, and buffers (the running statistics of
    BatchNorm) are made equal once, in the beginning, only.

    Args:
        module: the same architecture on all ranks; weights are taken from rank 0.
        all_reduce: sums a tensor over ranks in place. `ring_all_reduce` works too.

    **Collective**: the constructor and `average_gradients`, on every rank.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", VLDB 2020, section 3.2.1 (https://arxiv.org/abs/2006.15704).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        all_reduce: Callable[[Tensor], Any] = dist.all_reduce,
    ) -> None:
        super().__init__()
        self.module = module
        self._all_reduce = all_reduce
        _copy_from_rank_0([*module.parameters(), *module.buffers()])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Replace each gradient by its mean over all ranks.

        A parameter that got a gradient on some ranks counts as zero on the others. One
        that got none anywhere keeps None, so the optimiser leaves it alone.

        **Collective**: every rank calls it, once, between backward and the step.

        **Cost**: one all-reduce a parameter, and a small one that asks which have one.
        """
        # parameters() names a tied weight once, so its gradient is averaged once.
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        used = _used_on_some_rank([p.grad is not None for p in parameters], parameters)
        for parameter, is_used in zip(parameters, used, strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Mean = sum of (gradient / W). It is the gradient that is reduced: reducing
            # the parameter here would leave every rank to step on its own gradient.
            parameter.grad.mul_(1 / dist.get_world_size())
            self._all_reduce(parameter.grad)


def assign_buckets(
    parameters: Iterable[Tensor],
    *,
    bucket_cap_mb: float = 25.0,
    first_bucket_mb: float = 1.0,
) -> list[list[int]]:
    """Say which parameters travel together, as positions in `parameters`.

    A message has a fixed cost, so small gradients should share one; a bucket can leave
    only when it is full, so it should not be too large. Backward computes gradients
    from the last layer to the first, hence the reverse order. The first bucket is
    small, so that the network starts to work early.

    Args:
        parameters: tensors in the order of ``module.parameters()``.
        bucket_cap_mb: a bucket is closed as soon as it holds this many MB (2^20 bytes).
        first_bucket_mb: the same for the first bucket of each dtype and device.

    Returns:
        One list of positions a bucket, in the order in which they are sent.

    Source: Li et al., VLDB 2020, section 3.2.3. Torch does the same in
    ``compute_bucket_assignment_by_size`` (torch/csrc/distributed/c10d/reducer.cpp).
    """
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    caps_mb: dict[tuple[torch.dtype, torch.device], float] = {}
    for position, parameter in reversed(list(enumerate(parameters))):
        kind = (parameter.dtype, parameter.device)  # a bucket is one flat tensor
        filling.setdefault(kind, []).append(position)
        num_bytes[kind] = num_bytes.get(kind, 0) + parameter.nbytes
        if num_bytes[kind] >= caps_mb.get(kind, first_bucket_mb) * _MB:
            buckets.append(filling.pop(kind))
            num_bytes[kind], caps_mb[kind] = 0, bucket_cap_mb
    buckets += filling.values()
    return sorted(buckets, key=lambda bucket: -bucket[0])  # first ready, first sent


class _Bucket:
    """Parameters whose gradients travel as one flat tensor."""

    def __init__(self, names: list[str], parameters: list[nn.Parameter]) -> None:
        self.names = names
        self.parameters = parameters
        self.flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        # One view a parameter, shaped like it, into the flat tensor.
        ends = list(accumulate(p.numel() for p in parameters))
        parts = self.flat.tensor_split(ends[:-1])
        self.views = [v.view_as(p) for v, p in zip(parts, parameters, strict=True)]
        self.is_filled = [False] * len(parameters)
        self.work: dist.Work | None = None

    def reset(self) -> None:
        if self.work is not None:  # still under way if backward failed half-way
            self.work.wait()
        self.is_filled = [False] * len(self.parameters)
        self.work = None

    def fill(self, slot: int) -> None:
        """Put gradient / W into the bucket, so that the sum over ranks is the mean."""
        gradient, view = self.parameters[slot].grad, self.views[slot]
        if gradient is None:
            view.zero_()
        else:
            torch.mul(gradient, 1 / dist.get_world_size(), out=view)
        self.is_filled[slot] = True

    def missing(self) -> list[str]:
        return [n for n, f in zip(self.names, self.is_filled, strict=True) if not f]

    def send(self) -> None:
        """Start the all-reduce, and do not wait for it. Collective."""
        self.work = dist.all_reduce(self.flat, async_op=True)


class BucketDDP(nn.Module):
    """Average gradients over ranks while backward still computes the earlier layers.

    Use it like torch's own. After ``backward()``, every ``.grad`` is the ranks' mean::

        model = BucketDDP(model)
        loss_fn(model(x), y).backward()
        optimizer.step()

    A hook on each parameter fires when its gradient is complete, and copies it to its
    bucket. A full bucket leaves at once, as an all-reduce that runs in the background.
    At the end of backward, those still under way are waited for.

    Torch's does the same in C++. Besides, it regroups the buckets after the first
    backward in the order in which gradients came, can let ``.grad`` be a view of the
    bucket, finds unused parameters as soon as forward ends, and takes communication
    hooks.

    Args:
        module: the same architecture on all ranks; weights are taken from rank 0.
        bucket_cap_mb, first_bucket_mb: see `assign_buckets`.
        find_unused_parameters: let a backward pass reach only a part of the
            parameters. One without a gradient on this rank counts as zero; one without
            a gradient on any rank keeps None, so the optimiser leaves it alone.

    Frozen parameters (``requires_grad=False`` now) are left out of the buckets; tied
    ones are one parameter, and their hook fires once, when both uses have been added.

    Raises:
        LabError: from ``backward()``, with the names of parameters that it did not
            reach, unless `find_unused_parameters`.

    **Collective**: the constructor, ``backward``, and ``forward`` if the module has
    buffers, on every rank.

    **Cost**: one all-reduce of ``S`` bytes in all, in as many messages as there are
    buckets, and memory for a second copy of the gradients.

    Source: Li et al., VLDB 2020, sections 3.2.3 and 4.2, algorithm 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._find_unused = find_unused_parameters
        self._sync = True  # False inside no_sync()
        self._armed = False  # the coming backward is to be reduced
        self._finish_is_queued = False
        self._next_to_send = 0
        self._buffers_may_differ = False
        _copy_from_rank_0([*module.parameters(), *module.buffers()])

        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        plan = assign_buckets(
            [parameter for _, parameter in trained],
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
        )
        self._buckets = [
            _Bucket([trained[i][0] for i in bucket], [trained[i][1] for i in bucket])
            for bucket in plan
        ]
        for bucket in self._buckets:
            for slot, parameter in enumerate(bucket.parameters):
                hook = partial(self._gradient_is_ready, bucket, slot)
                parameter.register_post_accumulate_grad_hook(hook)

    @property
    def bucket_names(self) -> list[list[str]]:
        """The parameters of each bucket by name, in the order of sending."""
        return [bucket.names for bucket in self._buckets]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forward and backward inside it add to the rank's own gradients only.

        For gradient accumulation: all micro-batches but the last go inside, forward
        included; the backward of the last one sends the sum.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Forward in training changes BatchNorm's statistics on each rank in its own
        # way, so the next forward starts from rank 0's, as in torch.
        if self._buffers_may_differ:
            _copy_from_rank_0(list(self.module.buffers()))
        self._buffers_may_differ = torch.is_grad_enabled() and self._sync
        if torch.is_grad_enabled():
            self._armed = self._sync
            self._finish_is_queued = False
            self._next_to_send = 0
            for bucket in self._buckets:
                bucket.reset()
        return self.module(*args, **kwargs)

    def _gradient_is_ready(self, bucket: _Bucket, slot: int, param: Tensor) -> None:
        """Run by autograd when it has added to `param.grad`."""
        if not self._armed:
            return
        if bucket.is_filled[slot]:
            raise LabError(_TWICE.format(dist.get_rank(), bucket.names[slot]))
        if not self._finish_is_queued:  # autograd calls it when this backward is over
            self._finish_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        # 1. Collect.
        bucket.fill(slot)
        # 2. Send what is full, but never before the buckets in front of it: collectives
        #    match by order, and another rank may fill its buckets in another order.
        for waiting in self._buckets[self._next_to_send :]:
            if waiting.missing():
                break
            waiting.send()
            self._next_to_send += 1

    def _finish(self) -> None:
        """Run by autograd when the whole backward pass is over."""
        self._armed = self._finish_is_queued = False
        # 3. Send the rest: buckets with a parameter that backward did not reach.
        waiting = self._buckets[self._next_to_send :]
        unreached = [name for bucket in waiting for name in bucket.missing()]
        if unreached and not self._find_unused:
            raise LabError(_UNREACHED.format(dist.get_rank(), ", ".join(unreached)))
        for bucket in waiting:
            for name in bucket.missing():
                bucket.fill(bucket.names.index(name))
            bucket.send()
        # 4. Wait, and put the means where the optimiser looks for them.
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        used = [p.grad is not None for p in parameters]
        if self._find_unused:
            used = _used_on_some_rank(used, parameters)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
        views = [view for bucket in self._buckets for view in bucket.views]
        for parameter, is_used, view in zip(parameters, used, views, strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view)


def _copy_from_rank_0(tensors: list[Tensor]) -> None:
    """Overwrite each tensor by rank 0's. Collective."""
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, src=0)
        tensor.detach().copy_(dense)


def _used_on_some_rank(used: list[bool], tensors: list[nn.Parameter]) -> list[bool]:
    """Ask all ranks which entries are True on at least one of them. Collective."""
    if not used:
        return []
    flags = torch.tensor(used, dtype=torch.int32, device=tensors[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]
