"""`scripts/bench_pid.py`: its formulas are what the networks do, and its runs are the stock pipeline's."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from diffusers_continuous.pid import PiDDecoder, PiDScheduler, PiDTransformer2DModel
from test_pid import PEAK_CONFIG, tiny_gemma, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
bench = importlib.import_module("bench_pid")
PeakBytes = importlib.import_module("benchmarking").PeakBytes
costs = importlib.import_module("pid_costs")

MAIN = {"num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 48}
MAIN["axes_dims_rope"] = (8, 12, 12)
VAE = {"base_dim": 8}
PID = {**PEAK_CONFIG, "pixel_depth": 2}
V1 = {**PID, "lq_gate_type": "sigma_aware_per_token_per_dim", "lq_conv_padding_mode": "zeros", "pit_lq_inject": False}
SETTINGS = bench.Settings(steps=3, early_stop=1, decode_steps=2, cfg=4.0, repeats=3)


# formulas


class Counter:
    """Operations of what runs under it; attention is counted by its shapes, since not every kernel of it is known."""

    def __init__(self) -> None:
        self.attention = 0
        self.rest = FlopCounterMode(display=False)

    def attend(self, query: Any, key: Any, value: Any, **_: Any) -> torch.Tensor:
        self.attention += 4 * query.numel() * key.shape[2]
        return torch.empty_like(query)

    @property
    def flops(self) -> int:
        return self.attention + self.rest.get_total_flops()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    counter = Counter()
    monkeypatch.setattr(F, "scaled_dot_product_attention", counter.attend)
    with torch.no_grad(), counter.rest:
        yield counter


def run_transformer(model: QwenImageTransformer2DModel, side: int, text_tokens: int) -> Any:
    tokens = costs.image_tokens(side, side)
    inputs = torch.zeros(1, tokens, 64), torch.zeros(1, text_tokens, model.config.joint_attention_dim)
    shapes = [[(1, side // 16, side // 16)]]
    return inputs, lambda: model(inputs[0], inputs[1], timestep=torch.ones(1), img_shapes=shapes)


def test_the_transformers_formula_is_exact(counter):
    model = QwenImageTransformer2DModel(**MAIN)
    run_transformer(model, 128, 5)[1]()
    assert counter.flops == costs.transformer_flops(model.config, 64, 5)


def test_the_vaes_formula_is_exact(counter):
    vae = AutoencoderKLQwenImage(**VAE)
    vae.decode(torch.zeros(1, 16, 1, 4, 6))
    assert counter.flops == costs.vae_flops(vae.config, 32, 48)


@pytest.mark.parametrize("config", [PID, V1, {**PID, "pixel_depth": 1}])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_the_decoders_formula_is_exact(config, in_chunks, counter):
    net = PiDTransformer2DModel(**config)
    picture, latents, caption = torch.zeros(1, 3, 64, 96), torch.zeros(1, 16, 2, 3), torch.zeros(1, 7, 24)
    net(picture, 500.0, caption, latents, 0.1, chunk=4 if in_chunks else None)  # multiples of 4 need no filling
    expected = costs.pid_adapter_flops(net.config, 24) + costs.pid_step_flops(net.config, 24, 7, in_chunks)
    assert counter.flops == expected + (0 if in_chunks else costs.pid_heads_flops(net.config, 24))


@torch.no_grad()
def test_the_formulas_of_bytes_are_what_is_seen(monkeypatch):
    """Within 5 %: time embeddings, rotary tables, filling at the edges and the kernels are left out."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, key, value, **_: torch.empty_like(query))
    vae = AutoencoderKLQwenImage(**VAE)
    latents = torch.zeros(1, 16, 1, 16, 16)
    with PeakBytes((latents,), vae.parameters()) as watch:
        vae.decode(latents)
    assert costs.vae_bytes(vae.config, 128, 128, 4) == pytest.approx(watch.peak, rel=0.05)
    model = QwenImageTransformer2DModel(**{**MAIN, "num_layers": 1, "num_attention_heads": 16})
    inputs, run = run_transformer(model, 512, 8)
    tables = model.pos_embed.pos_freqs, model.pos_embed.neg_freqs
    with PeakBytes(inputs, [*model.parameters(), *tables]) as watch:
        run()
    assert costs.transformer_bytes(model.config, 1024, 8, 4) == pytest.approx(watch.peak, rel=0.05)


# the embedded models


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder with random weights."""
    torch.manual_seed(0)
    net = PiDTransformer2DModel(**PID)
    folder = tmp_path_factory.mktemp("decoder")
    PiDDecoder(net, PiDScheduler(), tiny_gemma(), tiny_tokenizer(), "User Prompt : ").save_pretrained(folder)
    return folder


def parse(*arguments: object) -> Any:
    return bench._parser().parse_args([*map(str, arguments)])


def test_an_early_stop_leaves_the_latents_and_the_noise_level_of_that_step(decoder_folder):
    models = bench.load_embedded(parse("--decoder", decoder_folder))
    seen = {}

    def keep(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen[index] = tensors["latents"].clone()
        return {}

    finished = models._call(64, SETTINGS, output_type="latent", callback_on_step_end=keep)
    sigmas = models.pipe.scheduler.sigmas.tolist()
    for early_stop in (1, 0):
        latents, sigma = models.draw(64, SETTINGS, early_stop)
        assert torch.equal(latents, seen[2 - early_stop])
        assert sigma == sigmas[3 - early_stop]
    assert torch.equal(latents, finished)
    assert sigma == 0
    decoded = np.asarray(models.decode_vae(finished, 64)[0])
    assert np.array_equal(decoded, np.asarray(models.draw_and_decode(64, SETTINGS)[0]))


@pytest.mark.usefixtures("loggers_kept")
def test_the_embedded_run_ends_in_one_json_line_with_the_ratios(decoder_folder, capsys, monkeypatch):
    monkeypatch.setattr(bench, "LIKENESS_SIDE", 64)
    options = ("--targets", 64, "--steps", 3, "--early-stop", 1, "--decode-steps", 2, "--repeats", 3, "--scenes", 1)
    monkeypatch.setattr(sys, "argv", ["bench_pid.py", "--decoder", str(decoder_folder), *map(str, options)])
    assert bench.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    target = result["targets"]["64"]
    a, b, chunked = (target["end_to_end"][name]["peak_bytes"] for name in ("vae", "pid", "pid_in_chunks"))
    assert result["memory_ratio"]["64"] == pytest.approx(b / a, rel=1e-3)
    assert result["chunked_memory_ratio"]["64"] == pytest.approx(chunked / a, rel=1e-3)
    assert result["time_ratio"]["64"] > 0
    assert set(target["decoders"]) == set(bench.DECODERS)
    assert 0 < target["sigma"] < 1
    for size in ("2048", "4096"):
        assert result["formula"][size]["flops_ratio"] < 0.05
    assert {"vae_bicubic", "pid", "pid_early"} <= set(result["likeness"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--decoder", "/no/such/folder"), "no PiDDecoder in /no/such/folder"),
        (("--steps", 2, "--early-stop", 2), "--early-stop 2 must leave at least one of --steps 2"),
        (("--repeats", 1), "too few for a median"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments, expected):
    with pytest.raises(bench.BenchError, match=expected):
        bench.run_embedded(parse(*arguments))


@pytest.mark.parametrize("text", ["", "100", "256,", "0", "large"])
def test_targets_that_make_no_pictures_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        parse("--targets", text)
    assert "multiples of 64" in capsys.readouterr().err


# the released sizes


def test_full_size_is_refused_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(bench.pid_formulas, "count_parameters", lambda: {"transformer": 20_430_401_088})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(bench.BenchError, match=r"room for 38 GiB of weights.* there is none here"):
        bench.run_full_size(parse("--full-size"))


def test_the_full_size_run_adds_up_single_steps():
    """The same program with shrunk networks, on the CPU."""
    models = bench.random_models(torch.device("cpu"), MAIN, VAE, PID)
    assert {weight.dtype for weight in models.weights() if weight.is_floating_point()} == {torch.bfloat16}
    result = bench.measure_full_size(models, (64,), SETTINGS)["targets"]["64"]
    parts, whole = result["parts"], result["end_to_end"]
    assert set(parts) == set(bench.PARTS)
    assert whole["vae"]["peak_bytes"] == max(parts["step"]["peak_bytes"], parts["vae"]["peak_bytes"])
    assert result["memory_ratio"]["pid"] == whole["pid"]["peak_bytes"] / whole["vae"]["peak_bytes"]


def test_a_sum_pairs_the_runs_and_what_does_not_fit_stays_out():
    step, decode = bench.Measured((1.0, 2.0, 3.0), 10), bench.Measured((1.0, 1.0, 2.0), 30)
    parts = {"step": step, "small_step": step, "vae": None, "pid": decode, "pid_in_chunks": decode}
    whole = bench.add_up(parts, SETTINGS)
    assert whole["vae"] is None
    assert whole["pid"] == bench.Measured((3.0, 5.0, 8.0), 30)
    assert bench.against_vae(whole)["time_ratio"] == {"pid": None, "pid_in_chunks": None}


def test_what_the_device_cannot_run_is_left_out_and_told(capsys):
    def too_large() -> None:
        raise torch.OutOfMemoryError("no room")

    def broken() -> None:
        raise ValueError("ours")

    models = SimpleNamespace(device=torch.device("cpu"), weights=list)
    found = bench.measure({"large": too_large, "small": lambda: torch.zeros(4)}, models, 3)
    assert found["large"] is None
    assert found["small"].peak_bytes == 16
    assert len(found["small"].times_s) == 3
    assert "large does not run: no room" in capsys.readouterr().err
    with pytest.raises(ValueError, match="ours"):
        bench.measure({"broken": broken}, models, 3)


# no-reference metrics


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for value in (10, 30):
        Image.new("RGB", (8, 8), (value,) * 3).save(tmp_path / "pictures" / f"{value}.png")
    return tmp_path / "pictures"


def rate(*metrics: object) -> int:
    return bench.rate_pictures(bench._parser(), *map(str, metrics))


FAKE_PYIQA = """
from PIL import Image

def create_metric(name, device):
    if name == "niqe":
        raise OSError("no network")
    metric = lambda path: Image.open(path).getpixel((0, 0))[0]
    metric.lower_better = False
    return metric
"""


def test_metrics_rate_every_picture_and_tell_what_is_not_available(picture_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "pyiqa.py").write_text(FAKE_PYIQA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyiqa", raising=False)
    assert rate("musiq", picture_folder) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]["musiq"]["mean"] == 20
    assert rate("musiq,niqe", picture_folder) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["metrics"]["musiq"]["scores"] == {"10.png": 10, "30.png": 30}
    assert "no network" in result["metrics"]["niqe"]["error"]
    monkeypatch.delitem(sys.modules, "pyiqa")


def test_metrics_that_cannot_be_had_are_refused(picture_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for metrics, folder, expected in (
        ("musik", picture_folder, "'musik' is not known; choose from maniqa, musiq"),
        ("musiq", tmp_path, "has no pictures"),
        ("musiq", picture_folder, "pip install pyiqa"),
    ):
        with pytest.raises(SystemExit):
            rate(metrics, folder)
        assert expected in capsys.readouterr().err
