"""The README's file map names what is there, and nothing that is not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "diffusers_continuous"


def mapped_paths() -> set[Path]:
    file_map = (ROOT / "README.md").read_text().partition("## File map")[2]
    rows = [line.split("|")[1] for line in file_map.splitlines() if line.startswith("| `")]
    return {ROOT / name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_file_that_is_mapped_is_there():
    assert [path for path in mapped_paths() if not path.exists()] == []


def test_every_part_of_the_package_is_mapped():
    parts = [p for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name != "__pycache__")]
    assert [path for path in parts if path not in mapped_paths()] == []


def test_every_script_is_mapped():
    assert [path for path in (ROOT / "scripts").glob("*.py") if path not in mapped_paths()] == []
