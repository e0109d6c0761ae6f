"""What every benchmark needs: the machine in words, a table, a file of results."""

import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from ddp_lab.runs.record import describe_environment

RESULTS = Path(__file__).parent / "results"


def describe_machine(**facts: Any) -> dict[str, Any]:
    """Processor, cores, accelerators, versions: what a number depends on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    environment = describe_environment(processor=model, gpus=gpus, **facts)
    del environment["command"]
    return environment


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest of repeated measurements."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, aligned for a terminal too."""
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        for row in [header, ["-" * w for w in widths], *rows]
    ]
    return "\n".join(line + " |" for line in lines)


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Write ``benchmarks/results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    return path
