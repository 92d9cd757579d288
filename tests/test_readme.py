"""The README names what is there, and nothing that is not: its file map, and its links. Its programs run."""

from __future__ import annotations

import ast
import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from diffusers_continuous import (
    ContinuousBatchingConfig,
    ContinuousBatchingPipeline,
    PiDDecoder,
    embedded_decoder_path,
    embedded_model_path,
)
from live_server import serve

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PACKAGE = ROOT / "src" / "diffusers_continuous"


def mapped_paths() -> set[Path]:
    file_map = README.partition("## File map")[2]
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
    targets = re.findall(r"\]\(([^)#]+)", README)
    links = [target for target in targets if "://" not in target]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = [ROOT / name for name in build["targets"]["sdist"]["include"]]
    assert [link for link in links if not any((ROOT / link).is_relative_to(place) for place in included)] == []


# ---------------------------------------------------------------------- its programs, small and on the embedded model


def program_with(words: str) -> str:
    """The README's Python program that has these words."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if words in text]
    return found


def run(program: str, changes: dict[str, str], **names: Any) -> dict[str, Any]:
    """What the program has named in the end, some of its words changed; it may await things."""
    for before, after in changes.items():
        assert before in program
        program = program.replace(before, after)
    coroutine = eval(compile(program, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if coroutine is not None:
        asyncio.run(coroutine)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_quickstart_draws(folder: Path) -> None:
    changes = {
        '"Qwen/Qwen-Image", dtype=torch.bfloat16).to("cuda")': "embedded_model_path())",
        "1024, 50": "64, 4",
        "512, 20": "48, 2",
        "num_inference_steps=30": "num_inference_steps=3",
    }
    names = run(program_with("lighthouse"), changes, embedded_model_path=embedded_model_path)
    names["pipe"].engine.stop()
    assert {path.name for path in folder.iterdir()} == {"fox.png", "cat.png", "lighthouse.png"}


def test_pid_enlarges() -> None:
    program = program_with("from_original")
    decoder = PiDDecoder.from_pretrained(embedded_decoder_path())
    changes = {
        program[program.index("decoder = PiD") : program.index("pipe = ")]: "",
        '"Qwen/Qwen-Image"': "embedded_model_path()",
        ', dtype=torch.bfloat16).to("cuda")': ")",
        "early_stop_at=44": "early_stop_at=3, num_inference_steps=4",
        'decoder="vae"': 'decoder="vae", num_inference_steps=2',
        "height=512, width=512": "height=64, width=64",
    }
    names = run(program, changes, decoder=decoder, embedded_model_path=embedded_model_path)
    names["pipe"].engine.stop()
    assert (names["image"].size, names["plain"].size) == ((256, 256), (64, 64))


def test_openais_client_draws(components: dict[str, Any], folder: Path) -> None:
    changes = {'"num_inference_steps": 20': '"num_inference_steps": 3', "128x128": "64x64"}
    with serve(components) as server:
        run(program_with("openai"), changes | {"http://127.0.0.1:8000": server.url})["client"].close()
    assert {path.name for path in folder.iterdir()} == {"star.png", "ring.png", *(f"ring-{n}.png" for n in range(3))}


def test_more_of_the_api_is_there(pipe: ContinuousBatchingPipeline) -> None:
    changes = {
        'prompt="a cat"': 'prompt="a cat", **SMALL',
        'agenerate("a cat"': 'agenerate("a cat", **SMALL',
        '{"prompt": "a"}': '{"prompt": "a", **SMALL}',
        '"height": 512}': '**SMALL, "height": 48}',
    }
    small = {"height": 64, "width": 64, "num_inference_steps": 2}
    config = ContinuousBatchingConfig
    names = run(program_with("generate_batch"), changes, pipe=pipe, ContinuousBatchingConfig=config, SMALL=small)
    assert names["output"].error is None
    assert [output.images[0].size for output in names["results"].values()] == [(64, 64), (64, 48)]
    assert names["image"].size == (64, 64)
