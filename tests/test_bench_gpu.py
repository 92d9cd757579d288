"""`scripts/bench_gpu.py --tiny`: everything that it does on a card, on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F

from attention_fakes import installed
from diffusers_continuous import attention
from diffusers_continuous.config import BATCH_LAYOUTS

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
bench = importlib.import_module("bench_gpu")

pytestmark = pytest.mark.usefixtures("loggers_kept")


@pytest.fixture(autouse=True)
def few_and_fast(monkeypatch):
    """Fewer cells, of no more steps than a median needs."""
    tiny = dataclasses.replace(bench.TINY, sizes=(32, 48), counts=(1, 4), engine_requests=3)
    monkeypatch.setattr(bench, "TINY", tiny)
    monkeypatch.setattr(bench, "CELL_S", 0.0)


def run(capsys, *arguments):
    code = bench.main(["--tiny", "--no-compile", *arguments])
    lines = capsys.readouterr().out.splitlines()
    return code, lines, json.loads(lines[-1])


def test_every_layout_and_backend_is_measured_against_the_stock_transformer(capsys):
    with installed("torch_varlen", float32=True):
        code, lines, result = run(capsys)
    assert (code, result["left_out"]) == (0, [])
    layouts = set(BATCH_LAYOUTS) - {"auto"}
    found = {(cell["size"], cell["rows"], cell["layout"], cell["backend"]) for cell in result["cells"]}
    expected = set(itertools.product((32, 48), (1, 4), layouts, ("sdpa", "torch_varlen")))
    expected |= set(itertools.product((bench.MIXED,), (4,), layouts - {"padded"}, ("sdpa", "torch_varlen")))
    assert found == expected
    assert all(cell["error"] <= 1e-4 for cell in result["cells"])
    assert all(cell["ratio"] == pytest.approx(cell["stock_ms"] / cell["step_ms"], 0.01) for cell in result["cells"])
    assert set(result["stock_ms"]) == {"32", "48"}
    assert result["layers"] == 2
    assert result["engine"]["requests"] == 3
    assert 1 <= result["engine"]["mean_rows_per_step"] <= 3
    assert "not usable" not in lines[0]
    assert sum(line.startswith(("32px", "48px", "mixed")) for line in lines) == len(expected)


def test_what_there_is_no_time_for_is_named(capsys):
    code, lines, result = run(capsys, "--minutes", "1e-4")
    assert code == 0
    assert result["cells"] == []
    assert result["engine"] is None
    assert "the engine run" in result["left_out"]
    assert "48px x 4  packed sdpa" in result["left_out"]
    assert [line for line in lines if line.startswith("left out")] == [
        f"left out, for want of time: {text}" for text in result["left_out"]
    ]


class Mixing:
    """Lets every token see every other."""

    name = "mixing"
    isolates_rows = True

    def forward(self, q, k, v, rows):
        return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1).flatten(1)


class Broken(Mixing):
    """A kernel that is not there after all."""

    def forward(self, q, k, v, rows):
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(("backend", "sign"), [(Mixing, "WRONG"), (Broken, "failed: no kernel image is available")])
def test_a_backend_that_is_wrong_or_fails_is_told(backend, sign, capsys, monkeypatch):
    monkeypatch.setitem(attention.ATTENTION_BACKENDS, "mixing", attention.BackendSpec(lambda device: backend()))
    monkeypatch.setattr(bench, "TINY", dataclasses.replace(bench.TINY, sizes=(32,), counts=(4,)))
    code, lines, result = run(capsys)
    assert code == 1
    assert any("x 4" in line and "mixing" in line and sign in line for line in lines)
    assert not any("sdpa" in line and sign in line for line in lines)
    assert result["engine"] is not None
