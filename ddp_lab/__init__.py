"""Learn PyTorch DistributedDataParallel by running it; then train with the same code.

The three steps, in three files:

1. ``world.py``  who am I, and how do the processes meet?
2. ``model.py``  how do N copies of a model stay one model?
3. ``data.py``   which rank sees which sample?

``step.py`` and ``loop.py`` train with them, and ``train.py`` is the command. What is
needed around that lives in folders of its own, each of which says what it is for:
``ranks`` ``rendezvous`` ``runs`` ``by_hand`` ``proofs`` ``exercises`` ``figures``
``tools``.

What notebooks and scripts use can be imported from here:

    from ddp_lab import launch, TrainConfig, train

Importing the package alone loads nothing else, as every spawned rank does it: a name's
module, and torch if that needs it, is loaded when the name is asked for.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ddp_lab.by_hand import (
        BucketDDP,
        NaiveDDP,
        SyncBatchNorm,
        assign_buckets,
        ring_all_reduce,
    )
    from ddp_lab.config import RECIPES, TrainConfig
    from ddp_lab.data import eval_loader, shard_indices, train_loader
    from ddp_lab.datasets import load_dataset
    from ddp_lab.errors import (
        BadInput,
        CheckFailed,
        LabError,
        RankFailed,
        RanksDisagree,
        RanksStuck,
    )
    from ddp_lab.exercises.check import check
    from ddp_lab.figures import (
        RANK_COLOURS,
        LiveCurve,
        plot_accumulation,
        plot_bandwidth,
        plot_buckets,
        plot_collective,
        plot_comparison,
        plot_hosts,
        plot_life,
        plot_loss,
        plot_losses,
        plot_lost_time,
        plot_memory,
        plot_network_cost,
        plot_resumed,
        plot_ring,
        plot_shards,
        plot_three_steps,
        rank_colour,
        style,
    )
    from ddp_lab.loop import fit, fit_on_rank, train_epoch
    from ddp_lab.model import build_model, wrap_model
    from ddp_lab.proofs.trainings import losses_by_seed, losses_of
    from ddp_lab.proofs.world_sizes import compare_world_sizes
    from ddp_lab.ranks.launch import launch, send_record, shared
    from ddp_lab.ranks.workers import Workers
    from ddp_lab.runs.record import Run
    from ddp_lab.runs.state import start_training
    from ddp_lab.step import evaluate, train_step
    from ddp_lab.tools.rehearse import rehearse_failure
    from ddp_lab.train import parse_arguments, train
    from ddp_lab.world import (
        World,
        agree_any,
        gather_over_ranks,
        join_world,
        read_ranks,
        sum_over_ranks,
    )

_HOMES = {
    "by_hand": "BucketDDP NaiveDDP SyncBatchNorm assign_buckets ring_all_reduce",
    "config": "RECIPES TrainConfig",
    "data": "eval_loader shard_indices train_loader",
    "datasets": "load_dataset",
    "errors": "BadInput CheckFailed LabError RankFailed RanksDisagree RanksStuck",
    "exercises.check": "check",
    "figures": "RANK_COLOURS LiveCurve plot_accumulation plot_bandwidth plot_buckets"
    " plot_collective plot_comparison plot_hosts plot_life plot_loss plot_losses"
    " plot_lost_time plot_memory plot_network_cost plot_resumed plot_ring plot_shards"
    " plot_three_steps rank_colour style",
    "loop": "fit fit_on_rank train_epoch",
    "model": "build_model wrap_model",
    "proofs.trainings": "losses_by_seed losses_of",
    "proofs.world_sizes": "compare_world_sizes",
    "ranks.launch": "launch send_record shared",
    "ranks.workers": "Workers",
    "runs.record": "Run",
    "runs.state": "start_training",
    "step": "evaluate train_step",
    "tools.rehearse": "rehearse_failure",
    "train": "parse_arguments train",
    "world": "World agree_any gather_over_ranks join_world read_ranks sum_over_ranks",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "RANK_COLOURS",
    "RECIPES",
    "BadInput",
    "BucketDDP",
    "CheckFailed",
    "LabError",
    "LiveCurve",
    "NaiveDDP",
    "RankFailed",
    "RanksDisagree",
    "RanksStuck",
    "Run",
    "SyncBatchNorm",
    "TrainConfig",
    "Workers",
    "World",
    "agree_any",
    "assign_buckets",
    "build_model",
    "check",
    "compare_world_sizes",
    "eval_loader",
    "evaluate",
    "fit",
    "fit_on_rank",
    "gather_over_ranks",
    "join_world",
    "launch",
    "load_dataset",
    "losses_by_seed",
    "losses_of",
    "parse_arguments",
    "plot_accumulation",
    "plot_bandwidth",
    "plot_buckets",
    "plot_collective",
    "plot_comparison",
    "plot_hosts",
    "plot_life",
    "plot_loss",
    "plot_losses",
    "plot_lost_time",
    "plot_memory",
    "plot_network_cost",
    "plot_resumed",
    "plot_ring",
    "plot_shards",
    "plot_three_steps",
    "rank_colour",
    "read_ranks",
    "rehearse_failure",
    "ring_all_reduce",
    "send_record",
    "shard_indices",
    "shared",
    "start_training",
    "style",
    "sum_over_ranks",
    "train",
    "train_epoch",
    "train_loader",
    "train_step",
    "wrap_model",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is asked for (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ddp_lab' has no attribute {name!r}")
    home = importlib.import_module(f"ddp_lab.{_HOME_OF[name]}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(types.ModuleType):
    """This module, in which `train` is the function whoever imported train.py before.

    Python binds a submodule to its name in the package as it is imported.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def load_ipython_extension(shell: Any) -> None:
    """Make the magics known: ``%load_ext ddp_lab``."""
    from ddp_lab.ranks import magics  # IPython is there only in a notebook

    magics.load_ipython_extension(shell)
