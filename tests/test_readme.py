"""The README names what is there, and nothing that is not: its file map, and its links."""

from __future__ import annotations

import re
import tomllib
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


def test_every_linked_file_is_there_and_in_the_source_distribution():
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    links = [target for target in targets if "://" not in target]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = [ROOT / name for name in build["targets"]["sdist"]["include"]]
    assert [link for link in links if not any((ROOT / link).is_relative_to(place) for place in included)] == []
