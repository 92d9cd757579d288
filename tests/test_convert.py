"""`diffusers-continuous convert-pid` on files laid out as NVIDIA's, and on what is not such a file.

The released networks are too large to make here: the table's full-size configuration is swapped for that of a recorded
net of the same family, whose recorded outputs the converted folder must then repeat.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusers_continuous.cli import main
from diffusers_continuous.pid import conversion
from diffusers_continuous.pid.checkpoints import FILE_NAME, Checkpoint, find_checkpoint
from diffusers_continuous.pid.pipeline import PiDDecoder
from test_pid import (
    CASES,
    MANIFEST,
    inputs_of,
    max_error,
    official_file,
    official_weights,
    recorded_case,
    tiny_gemma,
    tiny_tokenizer,
)


def convert(*arguments: object) -> int:
    return main(["convert-pid", *map(str, arguments)])


@pytest.fixture
def shrink(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives every checkpoint of the table the configuration of a recorded net."""

    def swap(net: str) -> None:
        config = conversion.convert_config(MANIFEST["nets"][net]["config"])
        monkeypatch.setattr(Checkpoint, "config", property(lambda self: config))

    return swap


# net, options: both families; the file has prefixes, networks that only training used and, v1.5, the training head
FAMILIES = [("qwen_v15", ()), ("flux_v1", ("--backbone", "flux", "--variant", "2k"))]


@pytest.mark.parametrize(("net", "options"), FAMILIES)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@torch.no_grad()
def test_a_converted_file_repeats_the_recorded_outputs(net, options, suffix, tmp_path, shrink, capsys):
    shrink(net)
    file, output = official_file(net, tmp_path / f"official{suffix}"), tmp_path / "converted"
    assert convert(file, output, *options) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(output)
    num_tensors = len(conversion.convert_state_dict(official_weights(net)))
    assert f"{num_tensors} tensors" in told.err
    assert "bfloat16" in told.err
    assert "--text-encoder" in told.err
    decoder = PiDDecoder.from_pretrained(output, dtype=torch.float32)
    assert decoder.scheduler.max_steps == 4
    case = next(case for case in CASES.values() if case["net"] == net)
    data = recorded_case(case["name"])
    assert max_error(decoder.transformer(*inputs_of(data)).sample, data["out.f32"]) <= case["tol_maxabs"]


def test_options_reach_the_folder(tmp_path, shrink):
    """A repository's layout, the teacher, float32, and a text encoder beside the network."""
    shrink("qwen_v15")
    place = tmp_path / "repository" / "checkpoints" / find_checkpoint("qwenimage", checkpoint_type="undistilled").folder
    place.mkdir(parents=True)
    official_file("qwen_v15", place / FILE_NAME)
    tiny_gemma().save_pretrained(tmp_path / "gemma")
    tiny_tokenizer().save_pretrained(tmp_path / "gemma")
    options = ["--type", "undistilled", "--sr-scale", 4, "--dtype", "fp32", "--text-encoder", tmp_path / "gemma"]
    assert convert(tmp_path / "repository", tmp_path / "converted", *options) == 0
    decoder = PiDDecoder.from_pretrained(tmp_path / "converted", dtype="auto")
    assert not decoder.is_distilled
    assert decoder.encode_prompt("a red cat").shape[2] == decoder.transformer.config.txt_embed_dim
    stored = json.loads((tmp_path / "converted" / "text_encoder" / "config.json").read_text())
    assert stored["dtype"] == "bfloat16"  # --dtype is the network's
    weights = next((tmp_path / "converted" / "transformer").glob("*.safetensors"))
    assert {tensor.dtype for tensor in conversion.read_checkpoint(weights).values()} == {torch.float32}


# mistakes: told before anything is read


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nvidia/PiD"], ["OUTPUT"]),
        (["nvidia/PiD", "out", "--backbone", "qwenimge"], ["'qwenimge'", "did you mean 'qwenimage'?", "zimage"]),
        (["nvidia/PiD", "out", "--variant", "2kto4k_v1p5"], ["did you mean '2kto4k_v1pt5'?", "2k, 2kto4k"]),
        (["nvidia/PiD", "out", "--type", "teacher"], ["'teacher'", "distilled, undistilled"]),
        (["nvidia/PiD", "out", "--sr-scale", "16"], ["'16'", "choose from 4, 8"]),
        (["nvidia/PiD", "out", "--dtype", "fp16"], ["'fp16'", "bf16, fp32"]),
        (["nvidia/PiD", "out", "--bakbone", "flux"], ["'--bakbone'", "did you mean '--backbone'?"]),
        (["nvidia/PiD", "out", "--variant", "2k"], ["There are:", "'2kto4k_v1pt5', checkpoint_type='undistilled'"]),
        (["nvidia/PiD", "out", "--backbone", "siglip", "--variant", "2k", "--sr-scale", "4"], ["sr_scale=8"]),
        (["missing.pth", "out"], ["'missing.pth' is not there"]),
        (["weights/missing.pth", "out"], ["'weights/missing.pth' is not there"]),
        (["/no/such/folder", "out"], ["'/no/such/folder' is not there"]),
        (["nvidia/PiD", "full"], ["'full' is in use"]),
        (["nvidia/PiD", "full/file"], ["in use"]),
    ],
)
def test_a_mistake_is_told_with_what_is_known(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(SystemExit) as exit_:
        convert(*arguments)
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert all(part in message for part in expected), message
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "file").read_text() == "mine"


@pytest.mark.parametrize("arguments", [["--help"], ["nvidia/PiD", "out", "--variant", "2k"]])
def test_help_and_mistakes_answer_without_torch(arguments):
    code = f"""
import sys
from diffusers_continuous.cli import main
try:
    main(["convert-pid", *{arguments!r}])
finally:
    print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("net.pixel_blocks.1.mlp.fc2.bias"), "1 missing: pixel_blocks.1.mlp.fc2.bias"),
        (lambda t: t.update({"net.extra.weight": torch.zeros(1)}), "1 unexpected: extra.weight"),
        (lambda t: t.update({"net.final_layer.linear.bias": torch.zeros(4)}), "final_layer.linear.bias (4,)"),
    ],
)
def test_a_file_that_is_not_exactly_the_checkpoint_names_the_tensors(change, expected, tmp_path, shrink, capsys):
    shrink("qwen_v15")
    assert convert(official_file("qwen_v15", tmp_path / "official.pth", change), tmp_path / "out") == 1
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_of_the_other_family_is_told_apart(tmp_path, shrink, capsys):
    shrink("qwen_v15")
    assert convert(official_file("flux_v1", tmp_path / "official.pth"), tmp_path / "out") == 1
    assert "look like v1" in capsys.readouterr().err


class Evil:
    """Runs a command when it is unpickled carelessly."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def write_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("letter.txt", "hello")


def write_evil(path: Path) -> None:
    torch.save({"net.weight": Evil(path.with_name("touched"))}, path)


@pytest.mark.parametrize(
    ("name", "write", "expected"),
    [
        ("noise.pth", lambda path: path.write_bytes(bytes(range(100))), "noise.pth is no PyTorch checkpoint"),
        ("noise.safetensors", lambda path: path.write_bytes(b"\xff" * 100), "noise.safetensors cannot be converted"),
        ("empty.pth", lambda path: path.touch(), "empty.pth is no PyTorch checkpoint"),
        ("evil.pth", write_evil, "Weights only load failed"),
        ("old.pth", lambda path: path.write_bytes(pickle.dumps({})), "old.pth is no PyTorch checkpoint"),
        ("archive.pth", write_archive, "archive.pth is no PyTorch checkpoint"),
        ("nested.pth", lambda path: torch.save({"state_dict": {}}, path), "not a flat table"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(name, write, expected, tmp_path, capsys):
    write(tmp_path / name)
    assert convert(tmp_path / name, tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 2  # the other says what is being converted
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_file_says_where_it_was_looked_for(tmp_path, capsys):
    (tmp_path / "repository").mkdir()
    assert convert(tmp_path / "repository", tmp_path / "out") == 1
    assert find_checkpoint("qwenimage").folder in capsys.readouterr().err
