"""Rates the pictures of a folder with no-reference metrics of the pyiqa package: `bench_pid.py --metrics`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffusers_continuous.cli.workload import rounded

METRICS = ("maniqa", "musiq", "niqe", "qalign")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def rate_pictures(parser: argparse.ArgumentParser, names: str, folder: str) -> int:
    """Rates the pictures of a folder; the exit code."""
    metrics = names.split(",")
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        parser.error(f"metric {unknown[0]!r} is not known; choose from {', '.join(METRICS)}")
    pictures = sorted(path for path in Path(folder).glob("*") if path.suffix.lower() in PICTURE_SUFFIXES)
    if not pictures:
        parser.error(f"{folder} has no pictures ({', '.join(PICTURE_SUFFIXES)})")
    if importlib.util.find_spec("pyiqa") is None:
        parser.error("--metrics needs the pyiqa package: pip install pyiqa (it downloads each metric's weights)")
    import pyiqa

    result = {name: _rate(pyiqa, name, pictures) for name in metrics}
    for name, rated in result.items():
        better = "lower" if rated.get("lower_is_better") else "higher"
        what = rated["error"] if "error" in rated else f"{rated['mean']:.4f} on average; {better} is better"
        print(f"  {name:<8} {what}")
    print(json.dumps(rounded({"mode": "metrics", "folder": folder, "pictures": len(pictures), "metrics": result})))
    return 0 if all("error" not in rated for rated in result.values()) else 1


def _rate(pyiqa: Any, name: str, pictures: Sequence[Path]) -> dict[str, Any]:
    """One metric of every picture, or why it cannot be had (its weights are downloaded when first used)."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        metric = pyiqa.create_metric(name, device=device)
    except (OSError, ImportError) as error:
        return {"error": f"not available: {type(error).__name__}: {error}"}
    with torch.no_grad():
        scores = {path.name: float(metric(str(path))) for path in pictures}
    return {"mean": statistics.mean(scores.values()), "lower_is_better": bool(metric.lower_better), "scores": scores}
