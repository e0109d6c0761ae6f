"""The commands of the lab: ``python -m ddp_lab``, or ``ddp-lab`` once it is installed.

ddp-lab                  lists the commands
ddp-lab train --epochs 3     is  python -m ddp_lab.train --epochs 3
"""

import difflib
import runpy
import sys
from collections.abc import Sequence

import ddp_lab

__all__ = ["main"]

_COMMANDS = {
    "train": (
        "ddp_lab.train",
        "train an image classifier on all GPUs, or on CPU ranks",
    ),
    "bandwidth": (
        "ddp_lab.tools.bandwidth",
        "measure the network between ranks, by all-reduces of growing size",
    ),
}
"""Each is a module with a main of its own, and what it does in a line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command as ``python -m`` runs its module; return the exit status.

    0: done, or the list was asked for; 2: there is no such command; the command's own.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(f"ddp_lab {ddp_lab.__version__}")
    elif name in _COMMANDS:
        module, _ = _COMMANDS[name]
        sys.argv[1:] = rest
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        close = difflib.get_close_matches(name, _COMMANDS, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        known = ", ".join(_COMMANDS)
        print(
            f"ddp_lab: there is no command {name!r}: {guess}choose one of {known}",
            file=sys.stderr,
        )
        return 2
    return 0


def _help() -> str:
    commands = "\n".join(
        f"  {name:<10} {what}" for name, (_, what) in _COMMANDS.items()
    )
    return (
        "usage: python -m ddp_lab COMMAND [its options]     (or ddp-lab COMMAND)\n\n"
        "Learn PyTorch DistributedDataParallel by running it, and train with it.\n\n"
        f"commands:\n{commands}\n\n"
        "COMMAND --help tells its options; --version tells this package's version.\n"
        "The lessons are notebooks: jupyter lab notebooks/00_start_here.ipynb"
    )


if __name__ == "__main__":
    sys.exit(main())
