"""One transformer over two processes: the pictures are the stock pipeline's, and what cannot be spread is refused.

The two processes have this file as their program, on gloo and the CPU. Diffusers shards on accelerators only, so they
tell it that a CPU is one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from conftest import assert_latents_equal, generator, load_stock
from diffusers_continuous import ContinuousBatchingConfig, ContinuousBatchingPipeline, embedded_model_path
from diffusers_continuous.errors import ConfigError, EngineStoppedError, UnsupportedModelError
from diffusers_continuous.models.parallel import check_parallelism

TIMEOUT_S = 240
KINDS = (("a red star", 64, 6, 4.0), ("a blue circle on a green background", 96, 4, 1.0), ("x", 80, 5, 3.0))


def arguments(number: int) -> dict[str, Any]:
    """The request of that number in `KINDS`."""
    prompt, side, steps, scale = KINDS[number]
    return {
        "prompt": prompt,
        "negative_prompt": " " if scale > 1 else None,
        "height": side,
        "width": side,
        "num_inference_steps": steps,
        "true_cfg_scale": scale,
        "generator": generator(number),
        "output_type": "latent",
    }


def load() -> ContinuousBatchingPipeline:
    return ContinuousBatchingPipeline.from_pretrained(embedded_model_path())


# ---------------------------------------------------------------------- what the two processes do

CONFIG = {"parallel": {"tp": 2}}


def refuse(pipe: ContinuousBatchingPipeline, rank: int) -> None:
    """What each process has to be told before anything is shared out."""
    call, other = pipe.init_continuous_batching, pipe.follow_continuous_batching
    if rank:
        call, other = other, call
    with pytest.raises(UnsupportedModelError, match="packed rows"):
        call({"parallel": {"cp": 2}})
    with (
        mock.patch.object(torch.accelerator, "device_count", return_value=0),
        pytest.raises(UnsupportedModelError, match="among accelerators; there is none here"),
    ):
        call(CONFIG)
    with pytest.raises(ConfigError, match="needs a process group of 3 ranks and there is 2"):
        call({"parallel": {"tp": 3}})
    with pytest.raises(ConfigError, match="call pipe.follow_continuous" if rank else "rank 0 has the engine"):
        other(CONFIG)


def draw(pipe: ContinuousBatchingPipeline, rank: int) -> list[torch.Tensor]:
    """Rank 0 draws a crowd, whose latents it hands back, and rank 1 follows."""
    if rank:
        pipe.follow_continuous_batching(CONFIG)
        return []
    with pipe.continuous_batching_context_manager(CONFIG) as engine:
        with engine.pause():  # so that they share their steps
            ids = [engine.add_request(**arguments(number)) for number in range(len(KINDS))]
        outputs = [engine.get_result(request_id) for request_id in ids]
    assert [output.error for output in outputs] == [None] * len(KINDS)
    assert engine.stats().mean_rows_per_step > 1
    return [output.latents for output in outputs]


def die(pipe: ContinuousBatchingPipeline, rank: int) -> None:
    """Rank 1 ends in the middle of a request: its caller is told, and the engine is dead."""
    if rank:
        transformer = pipe.transformer
        forwards = iter(range(10**6))
        transformer.register_forward_pre_hook(lambda *_: os._exit(0) if next(forwards) == 4 else None)
        pipe.follow_continuous_batching(CONFIG)
    engine = pipe.init_continuous_batching(CONFIG, num_blocks=64)
    engine.start()
    output = engine.get_result(engine.add_request(**arguments(0)))
    assert isinstance(output.error, EngineStoppedError), output.error
    assert "2 ranks share" in str(output.error)
    with pytest.raises(EngineStoppedError):
        engine.add_request(**arguments(1))


def _main(rank: int, port: int, folder: Path) -> None:
    from diffusers.hooks import tensor_parallel

    tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)
    torch.accelerator.device_count = lambda: 1  # type: ignore[assignment]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo")
    pipe = load()
    refuse(pipe, rank)
    torch.save([draw(pipe, rank) for _ in range(2)], folder / f"latents{rank}.pt")
    weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight
    assert weight.to_local().shape[0] == weight.shape[0] // 2  # each process has half of it
    with pytest.raises(UnsupportedModelError, match=r'2 processes.*parallel=\{"tp": 2\}'):
        pipe.init_continuous_batching()
    die(pipe, rank)


def run_two(folder: Path) -> None:
    """Run `_main` in two processes; fails with what they said unless both end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(port), str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-3000:] for text in said)


# ---------------------------------------------------------------------- the tests


def test_a_crowd_over_two_processes_gets_the_stock_pipelines_pictures(tmp_path):
    """One test for all that needs two processes, since starting them takes longest."""
    run_two(tmp_path)
    stock = load_stock()
    expected = [stock(**arguments(number)).images for number in range(len(KINDS))]
    for found in torch.load(tmp_path / "latents0.pt"):
        for latents, of_stock in zip(found, expected, strict=True):
            assert_latents_equal(latents, of_stock)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"dp": 2}, "'dp' is not known; choose from ['cp', 'tp']"),
        ({"tp": 1}, "at least 2"),
        ({"tp": True}, "at least 2"),
        ({"tp": 2.0}, "at least 2"),
        ({"tp": 2, "cp": 2}, '{"tp": n} or {"cp": n}'),
        ({}, '{"tp": n} or {"cp": n}'),
        (2, '{"tp": n} or {"cp": n}'),
    ],
)
def test_the_option_is_checked(parallel, expected):
    with pytest.raises(ConfigError) as error:
        ContinuousBatchingConfig(parallel=parallel)
    assert expected in str(error.value)


@pytest.mark.parametrize("other", [{"step_cache_threshold": 0.1}, {"compile": True}])
def test_what_cannot_be_used_beside_it_is_refused(other):
    with pytest.raises(ConfigError, match=next(iter(other))):
        ContinuousBatchingConfig(parallel={"tp": 2}, **other)


def test_without_a_process_group_the_way_to_one_is_told(make_pipe):
    pipe = make_pipe()
    for call in (pipe.init_continuous_batching, pipe.follow_continuous_batching):
        with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
            call(parallel={"tp": 2})
    with pytest.raises(ConfigError, match="parallel"):
        pipe.follow_continuous_batching()


def test_context_parallelism_is_refused_with_a_way_out(make_pipe):
    with pytest.raises(UnsupportedModelError, match=r'parallel=\{"tp": n\}'):
        make_pipe().init_continuous_batching(parallel={"cp": 2})


def test_a_transformer_that_was_spread_by_hand_is_refused(components, monkeypatch):
    from types import SimpleNamespace

    transformer = components["transformer"]
    found = SimpleNamespace(context_parallel_config=object(), tensor_parallel_config=None)
    monkeypatch.setattr(transformer, "_parallel_config", found)
    with pytest.raises(UnsupportedModelError, match="packed rows"):
        check_parallelism(transformer, None)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
