"""The simulator: small worlds in which the answer is known."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from diffusers_continuous.cli.workload import bursty
from diffusers_continuous.cost_model import StepCostModel

SCRIPT = Path(__file__).parents[1] / "scripts" / "simulate_slo.py"


@pytest.fixture(scope="module")
def simulator():
    spec = importlib.util.spec_from_file_location("simulate_slo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_slo"] = module
    spec.loader.exec_module(module)
    return module


def run_script(*options):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seeds", "1", "--jobs", "1", *options],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def is_feasible(jobs):
    """Preemptive earliest deadline first on whole numbers, a unit of time after another."""
    left = {index: work for index, (_, _, work) in enumerate(jobs)}
    for now in range(max(deadline for _, deadline, _ in jobs)):
        ready = [i for i, (release, _, _) in enumerate(jobs) if release <= now and left[i]]
        if ready:
            left[min(ready, key=lambda i: jobs[i][1])] -= 1
        if any(left[i] and jobs[i][1] <= now + 1 for i in left):
            return False
    return not any(left.values())


def test_the_reference_accepts_the_shortest_as_long_as_all_accepted_are_on_time(simulator):
    rng = random.Random(0)
    for _ in range(60):
        jobs = []
        for _ in range(12):
            release, work = rng.randint(0, 30), rng.randint(1, 6)
            jobs.append((release, release + rng.randint(1, 3) * work, work))
        expected = set()
        for index in sorted(range(len(jobs)), key=lambda i: jobs[i][2]):
            if is_feasible([jobs[i] for i in (*expected, index)]):
                expected.add(index)
        assert simulator.clairvoyant(jobs) == expected


def test_slo_keeps_more_than_the_others_and_nearly_as_many_as_hindsight(simulator):
    stdout, result = run_script("--requests", "300", "--loads", "0.8", "--clairvoyant", "0.8")
    found = {mean["policy"]: mean["attainment"] for mean in result["results"]}
    assert set(found) == {"fifo", "fcfs", "edf", "least_slack", "slo", "clairvoyant"}
    assert max(found.values()) == found["clairvoyant"]
    assert found["slo"] >= max(found[name] for name in ("fifo", "fcfs", "edf", "least_slack"))
    assert found["slo"] >= 0.95 * found["clairvoyant"]
    assert "| slo | one |" in stdout


def test_one_row_of_fcfs_is_what_the_request_level_queue_does(simulator):
    """Two programs for one thing: the scheduler's steps add up to whole requests."""
    _, result = run_script("--requests", "100", "--loads", "0.9", "--policies", "fifo", "fcfs", "--mix", "dataset-c")
    fifo, fcfs = result["results"]
    assert fifo["by_class"] == fcfs["by_class"]
    assert fifo["p50_slowdown"] == pytest.approx(fcfs["p50_slowdown"], rel=0.01)


def test_a_trace_is_read_and_stretched_to_the_load(simulator, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"arrival_s": t, "side": 512, "steps": 10}) for t in range(50)))
    options = ("--loads", "0.5", "2", "--policies", "slo", "--device", "h200")
    stdout, result = run_script("--arrivals", str(trace), *options)
    assert f"trace {trace}, 50 requests, " in stdout
    assert (result["settings"]["mix"], result["settings"]["requests"]) == (None, 50)
    attainment = [mean["attainment"] for mean in result["results"]]
    assert attainment[0] == 1.0 > attainment[1]


@pytest.mark.parametrize("count", [1, 3])
def test_a_trace_of_one_moment_cannot_be_stretched(simulator, tmp_path, count):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(count * (json.dumps({"arrival_s": 7.5, "side": 512, "steps": 20}) + "\n"))
    model = StepCostModel(simulator.device_curves("small")[0])
    for load in (0.5, 2.0):
        arrivals = simulator.arrivals_of(argparse.Namespace(arrivals=str(trace)), model, load, 0)
        assert arrivals == count * [simulator.Arrival(0.0, 512, 20)]


def test_an_empty_trace_is_refused(simulator, tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n")
    monkeypatch.setattr(sys, "argv", ["simulate_slo.py", "--arrivals", str(trace)])
    with pytest.raises(SystemExit):
        simulator.main()
    assert "there is no request in it" in capsys.readouterr().err


def test_bursts_are_harder_than_chance(simulator):
    gaps = list(itertools.islice(bursty(random.Random(0)), 20000))
    mean = sum(gaps) / len(gaps)
    assert sum((gap / mean - 1) ** 2 for gap in gaps) / len(gaps) > 1.1  # 1 for a Poisson process


def test_the_simulator_needs_no_torch():
    code = f"import sys, runpy; runpy.run_path({str(SCRIPT)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_small_pool_swaps_and_costs_no_deadline():
    options = ("--requests", "300", "--loads", "1.0", "--policies", "slo")
    figures = []
    for pool in ((), ("--num-blocks", "32")):  # two pictures of 1024 x 1024
        _, result = run_script(*options, *pool)
        figures.append(result["results"][0])
    assert figures[0]["num_swaps"] == 0 < figures[1]["num_swaps"]
    assert figures[0]["attainment"] == figures[1]["attainment"]
