"""The command line as a user meets it: mistakes, files, resuming, and pictures drawn by the embedded model."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffusers_continuous.cli import main
from diffusers_continuous.cli.pictures import read_metadata

STAR = "a red star on a blue background"
CIRCLE = "a green circle on a white background"
FAST = ("--size", "64x64", "--steps", "2")


def generate(*arguments: object) -> int:
    return main(["generate", *map(str, arguments)])


def pictures(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)  # (height, width, 3)


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


# mistakes: each is told in one line that names what is known, before any model is loaded


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generat"], ["'generat'", "did you mean 'generate'?", "demo, env, generate"]),
        (["generate", "x", "--sise", "64x64"], ["'--sise'", "did you mean '--size'?", "--negative-prompt"]),
        (["generate", "x", "--sise=64x64"], ["'--sise'", "did you mean '--size'?"]),
        (["generate", "x", "--siz", "64x64"], ["'--siz'", "did you mean '--size'?"]),
        (["generate", "x", "--size", "100x128"], ["100x128", "96x128 and 112x128"]),
        (["generate", "x", "--size", "128"], ["'128'", "WIDTHxHEIGHT"]),
        (["generate", "x", "--size", "1024x"], ["'1024x'", "WIDTHxHEIGHT"]),
        (["generate", "x", "--size", "0x64"], ["0x64", "16 to 8192"]),
        (["generate", "x", "--size=-64x64"], ["-64x64", "16 to 8192"]),
        (["generate", "x", "--size", "100000x10000"], ["100000x10000", "16 to 8192"]),
        (["generate", "x", "--size", "9" * 5000 + "x64"], ["size '999", "...", "WIDTHxHEIGHT"]),
        (["generate", "x", "--steps", "0"], ["'0'", "1 to 1000"]),
        (["generate", "x", "--steps", "two"], ["'two'", "1 to 1000"]),
        (["generate", "x", "--cfg", "nan"], ["'nan'"]),
        (["generate", "x", "--cfg", "high"], ["'high'"]),
        (["generate", "x", "--seed", "-1"], ["'-1'", "0 to"]),
        (["generate", "x", "--num-images", "0"], ["'0'", "1 to 1000"]),
        (["generate", "x", "--max-batch", "0"], ["'0'", "at least 1"]),
        (
            ["generate", "x", "--engine", "slo_scal=2"],
            ["--engine: ", "'slo_scal'", "did you mean 'slo_scale'?", "'compile'"],
        ),
        (["generate", "x", "--engine", "compile"], ["--engine: 'compile' is not NAME=VALUE"]),
        (["generate", "x", "--max-batch", "2", "--engine", "max_requests_per_batch=3"], ["contradicts --max-batch=2"]),
        (["serve", "--engine", "scheduler_type=fcsf"], ["--engine: scheduler_type='fcsf'", "did you mean 'fcfs'?"]),
        (["serve", "--max-queue", "5", "--engine", "max_queue_size=0"], ["max_queue_size=0 contradicts --max-queue=5"]),
        (["serve", "--max-queue", "256", "--engine", "max_queue_size=1"], ["contradicts --max-queue=256"]),
        (["generate", "x", "--decoder", "pidd"], ["'pidd'", "did you mean 'pid'?", "pid, vae"]),
        (["generate", "x", "--early-stop", "-1"], ["'-1'", "0 to 999"]),
        (["generate", "x", "--early-stop", "4", "--steps", "4"], ["early_stop 4", "none of 4 steps"]),
        (["generate", "x", "--early-stop", "1", "--decoder", "vae"], ["early_stop 1", "only decoder pid"]),
        (["generate"], ["nothing to draw"]),
        (["generate", "--prompts-file", "missing.txt"], ["missing.txt"]),
        (["generate", "--prompts-file", "prompts.csv"], ["prompts.csv", ".jsonl, .txt"]),
        (["generate", "x", "--output", "/dev/null"], ["--output '/dev/null' is a file"]),
        (["generate", "x", "--output", "/dev/null/out"], ["folder '/dev/null/out'", "Not a directory"]),
        (["demo", "--output", "/dev/null"], ["--output '/dev/null' is a file"]),
        (["env", "--al"], ["'--al'", "choose from --help"]),
        (["demo", "--outpt", "d"], ["'--outpt'", "did you mean '--output'?"]),
        (["serve", "--media-dir", "/proc/nope"], ["media_dir='/proc/nope'", "cannot be a folder"]),
        (["serve", "--media-dir", "/dev/null"], ["media_dir='/dev/null'", "it is a file"]),
        (["serve", "--cors-origin", "foo"], ["'foo'", "scheme://host:port"]),
        (["serve", "--cors-origin", "https://example.org/"], ["'https://example.org/'", "without a path"]),
        (["serve", "--cors-origin", "*", "--cors-origin", "https://Example.org"], ["Example.org", "small letters"]),
        (["--versio"], ["'--versio'", "did you mean '--version'?"]),
    ],
)
def test_a_mistake_is_told_with_what_is_known(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert all(part in message for part in expected), message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": STAR, "stepps": 3}, ["line 2", "'stepps'", "did you mean 'steps'?", "num_images"]),
        ({"prompt": STAR, "steps": True}, ["line 2", "'steps'", "True"]),
        ({"prompt": STAR, "steps": 2.5}, ["line 2", "'steps'", "2.5"]),
        ({"prompt": STAR, "size": "100x100"}, ["line 2", "'size'", "96x96 and 112x112"]),
        ({"prompt": STAR, "size": [64, "64"]}, ["line 2", "'size'"]),
        ({"prompt": 3}, ["line 2", "'prompt'", "3"]),
        ({"steps": 3}, ["line 2", "'prompt' is missing"]),
        ({"prompt": STAR, "model": "other"}, ["line 2", "'model'", "command line"]),
        ([STAR], ["line 2", "not an object"]),
    ],
)
def test_a_bad_row_names_its_line_and_key(row, expected, capsys, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": STAR}, row)
    with pytest.raises(SystemExit) as exit_:
        generate("--prompts-file", file, "--output", tmp_path / "out")
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert all(part in message for part in expected), message
    assert not (tmp_path / "out").exists()


def test_a_line_that_is_not_json_is_named(capsys, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(SystemExit):
        generate("--prompts-file", file)
    assert "rows.jsonl line 3: not JSON" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys, tmp_path):
    assert generate(STAR, "--model", tmp_path / "no-model", "--output", tmp_path / "out") == 1
    assert "no-model' cannot be loaded: there is no such folder" in capsys.readouterr().err


def test_a_model_or_decoder_that_is_a_file_is_named(capsys, tmp_path):
    (tmp_path / "model.safetensors").touch()
    for option in ("--model", "--decoder-model"):
        assert generate(STAR, option, tmp_path / "model.safetensors", "--output", tmp_path / "out") == 1
        assert "model.safetensors' cannot be loaded: it is a file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["generate", STAR]])
def test_a_decoder_that_is_not_there_is_named(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--decoder-model", "./no-decoder"]) == 1
    assert "no-decoder' cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", STAR]])
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("attention_backend=npu", "attention_backend='npu' cannot be used"),
        ("calibration=no-file.json", "calibration='no-file.json' is no file of scripts/calibrate_cost_model.py"),
        ("num_blocks=1000000000", "num_blocks=1000000000 of page_size=65536 bytes are more than"),
    ],
)
def test_an_engine_that_cannot_be_made_is_told_in_one_line(command, option, expected, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--engine", option]) == 1
    message = capfd.readouterr().err
    assert f"error: {expected}" in message.splitlines()[-1]
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["generate", "x", "--size", "5x5"],
        ["generate", "x", "--engine", "compile=maybe"],
        ["serve", "--engine", "compile=maybe"],
    ],
)
def test_help_and_mistakes_answer_without_torch(arguments):
    code = f"""
import sys
from diffusers_continuous.cli import main
try:
    main({arguments!r})
finally:
    print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines()[-1] == "False"


# pictures


def test_pictures_say_what_made_them(tmp_path, capsys):
    prompt = 'ein roter Stern, "蓝色"'
    assert generate(prompt, *FAST, "--seed", 5, "--num-images", 2, "--cfg", 3, "--output", tmp_path) == 0
    files = pictures(tmp_path)
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    for index, file in enumerate(files):
        text = read_metadata(file)
        assert text["prompt"] == prompt
        assert text["seed"] == str(5 + index)
        assert text["negative_prompt"] == " "
        settings = json.loads(text["settings"])
        assert (settings["size"], settings["steps"], settings["cfg"]) == ("64x64", 2, 3.0)
        assert pixels(file).shape == (64, 64, 3)
    assert len(files) == 2
    assert not np.array_equal(pixels(files[0]), pixels(files[1]))


def test_the_reported_seed_draws_the_picture_again(tmp_path):
    assert generate(STAR, *FAST, "--output", tmp_path / "a") == 0
    (first,) = pictures(tmp_path / "a")
    assert generate(STAR, *FAST, "--seed", read_metadata(first)["seed"], "--output", tmp_path / "b") == 0
    (again,) = pictures(tmp_path / "b")
    assert np.abs(pixels(first).astype(int) - pixels(again)).max() <= 1


def test_rows_override_the_options(tmp_path):
    file = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": STAR, "size": "64x96", "steps": 3, "cfg": 1, "seed": 7},
        {"prompt": CIRCLE, "num_images": 2, "negative_prompt": "red"},
    )
    assert generate("a cross", "--prompts-file", file, *FAST, "--seed", 1, "--output", tmp_path / "out") == 0
    by_prompt = {}
    for path in pictures(tmp_path / "out"):
        by_prompt.setdefault(read_metadata(path)["prompt"], []).append(path)
    assert {prompt: len(paths) for prompt, paths in by_prompt.items()} == {"a cross": 1, STAR: 1, CIRCLE: 2}
    star, circle = read_metadata(by_prompt[STAR][0]), read_metadata(by_prompt[CIRCLE][1])
    assert pixels(by_prompt[STAR][0]).shape == (96, 64, 3)
    assert (star["seed"], star["negative_prompt"], json.loads(star["settings"])["steps"]) == ("7", "", 3)
    assert (circle["seed"], circle["negative_prompt"], json.loads(circle["settings"])["steps"]) == ("2", "red", 2)


def test_resume_draws_only_what_is_missing(tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text(f"{STAR}\n\n{CIRCLE}\n{STAR}\n")  # the repeated prompt is a request of its own
    out = tmp_path / "out"
    call = ("--prompts-file", file, *FAST, "--num-images", 2, "--output", out, "--resume")
    assert generate(*call) == 0
    files = pictures(out)
    assert len(files) == 6
    before = {path: path.stat().st_mtime_ns for path in files}

    assert generate(*call) == 0
    assert "3 of 3 requests are in" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in pictures(out)} == before

    files[5].unlink()  # one of two pictures of the repeated prompt: that request is drawn again, under its own names
    assert generate(*call) == 0
    assert "2 of 3 requests are in" in capsys.readouterr().err
    redrawn = {path for path in pictures(out) if path.stat().st_mtime_ns != before[path]}
    assert redrawn == set(files[4:6])
    assert pictures(out) == files


def test_resume_draws_a_request_whose_settings_changed(tmp_path):
    assert generate(STAR, *FAST, "--seed", 1, "--output", tmp_path) == 0
    assert generate(STAR, *FAST, "--seed", 2, "--output", tmp_path, "--resume") == 0
    assert [read_metadata(path)["seed"] for path in pictures(tmp_path)] == ["1", "2"]


def test_the_engines_options_hold_and_pictures_say_where_steps_were_left_out(tmp_path):
    call = (STAR, *FAST[:2], "--steps", 6, "--seed", 1, "--output", tmp_path, "--resume")
    assert generate(*call) == 0
    assert generate(*call, "--engine", "step_cache_threshold=0.9", "--engine", "max_batch_tokens=64") == 0
    exact, cached = pictures(tmp_path)
    assert "step_cache_threshold" not in json.loads(read_metadata(exact)["settings"])
    assert json.loads(read_metadata(cached)["settings"])["step_cache_threshold"] == 0.9
    assert not np.array_equal(pixels(exact), pixels(cached))


def test_pid_draws_pictures_of_the_size_that_was_asked_for(tmp_path, capsys):
    rows = ({"prompt": CIRCLE}, {"prompt": "x", "size": "96x128"})
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    options = ("--decoder", "pid", "--early-stop", 1, "--size", "256x384", "--steps", 3, "--seed", 1)
    assert generate("--prompts-file", file, *options, "--output", tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert "line 2 (x): ValueError: size 96x128" in message
    assert "multiples of 64" in message
    (path,) = pictures(tmp_path / "out")
    assert pixels(path).shape == (384, 256, 3)
    assert json.loads(read_metadata(path)["settings"])["decoder"] == "pid"
    assert json.loads(read_metadata(path)["settings"])["early_stop"] == 1


def test_without_resume_nothing_is_overwritten(tmp_path):
    (tmp_path / "0041-mine.png").write_bytes(b"not a picture")
    assert generate(STAR, *FAST, "--seed", 1, "--output", tmp_path) == 0
    assert generate(STAR, *FAST, "--seed", 1, "--output", tmp_path) == 0
    assert [path.name[:4] for path in pictures(tmp_path)] == ["0041", "0042", "0043"]
    assert (tmp_path / "0041-mine.png").read_bytes() == b"not a picture"


def test_one_failing_request_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    from diffusers_continuous.cli import generate as command

    save = command.save_picture

    def save_all_but_circles(picture, path, metadata):
        if metadata["prompt"] == CIRCLE:
            raise OSError("no space left on device")
        save(picture, path, metadata)

    monkeypatch.setattr(command, "save_picture", save_all_but_circles)
    assert generate(STAR, CIRCLE, "a blue ring", *FAST, "--output", tmp_path) == 1
    message = capsys.readouterr().err
    assert f"failed: prompt 2 ({CIRCLE}): OSError: no space left on device" in message
    assert "1 of 3 requests failed, 2 are done" in message
    assert {read_metadata(path)["prompt"] for path in pictures(tmp_path)} == {STAR, "a blue ring"}


def test_a_refused_request_does_not_stop_the_others(tmp_path, capsys):
    last_seed = 2**63 - 1  # the engine needs room above the seed for the pictures that follow
    file = write_rows(tmp_path / "rows.jsonl", {"prompt": CIRCLE, "seed": last_seed}, {"prompt": STAR})
    assert generate("--prompts-file", file, *FAST, "--output", tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert f"failed: rows.jsonl line 1 ({CIRCLE}): RequestError: seed={last_seed}" in message
    assert [read_metadata(path)["prompt"] for path in pictures(tmp_path / "out")] == [STAR]


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    from diffusers_continuous.cli.pictures import save_picture

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        save_picture(Image.new("RGB", (16, 16)), tmp_path / "a.png", {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """In children too, which inherit that a job in a shell's background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_keeps_what_is_finished_and_resume_draws_the_rest(tmp_path):
    rows = [{"prompt": STAR, "steps": 2, "seed": 1}, {"prompt": CIRCLE, "steps": 1000, "seed": 2}]
    file, out = write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "out"
    arguments = ["generate", "--prompts-file", str(file), "--size", "64x64", "--output", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "diffusers_continuous.cli", *arguments], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not pictures(out) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, message
    assert "1 of 2 requests are done" in message
    assert "Traceback" not in message
    (kept,) = pictures(out)
    assert read_metadata(kept)["prompt"] == STAR
    assert pixels(kept).shape == (64, 64, 3)


def test_env_tells_versions_device_and_backends(capsys):
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "attention" not in line)
    import torch

    assert lines["torch"].split()[0] == torch.__version__
    assert "device" in lines


def test_demo_draws_what_the_stock_pipeline_draws_and_leaves_its_files(tmp_path, capsys, caplog, monkeypatch):
    from diffusers_continuous.cli import demo

    callers = tuple(dataclasses.replace(c, steps=1 + c.steps // 8, delay_s=c.delay_s / 8) for c in demo.CALLERS)
    monkeypatch.setattr(demo, "CALLERS", callers)
    monkeypatch.setattr(demo, "DECODED", demo.DECODED[:1])
    monkeypatch.setattr(demo, "DECODED_STEPS", 4)
    assert main(["demo", "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert caplog.messages == []
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {*(f"picture-{n}.png" for n in range(1, 9)), "contact-sheet.png", "timeline.png", "decoders.png"}
    difference = next(line for line in text.splitlines() if line.startswith("largest difference"))
    assert int(difference.split()[-3]) <= 1, text
    assert "images/s" in text
    assert str(tmp_path) in text
    assert len({pixels(tmp_path / f"picture-{n}.png").shape for n in range(1, 9)}) == 8
