"""Options: mistakes say what is known, and nothing is written to afterwards."""

from __future__ import annotations

import dataclasses

import pytest

from diffusers_continuous import ConfigError, ContinuousBatchingConfig, resolve_config
from diffusers_continuous.config import read_config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheduler_type": "fcsf"}, r"scheduler_type='fcsf' is not known; choose from \['edf', 'fcfs',.*'fcfs'"),
        ({"on_hopeless": "drop"}, r"choose from \['fail', 'run_last'\]"),
        ({"steps_per_chunk": 0}, "steps_per_chunk=0 .* at least 1, .*, or 'auto'"),
        ({"slo_scale": 0}, "slo_scale=0"),
        ({"calibration": 3}, "calibration=3 must be a path"),
        ({"batch_layout": "paked"}, r"choose from \['auto', 'packed', 'padded', 'tiled'\]"),
        ({"max_requests_per_batch": 0}, "max_requests_per_batch=0 .* at least 1"),
        ({"max_batch_tokens": 2.5}, "max_batch_tokens=2.5"),
        ({"max_queue_size": -1}, "max_queue_size=-1 .* at least 0"),
        ({"max_phase_s": float("nan")}, "max_phase_s=nan"),
        ({"slo_scale": 10**400}, r"slo_scale=10+\.\.\. must be a finite number"),
        ({"cpu_offload_space": 10**400}, r"cpu_offload_space=10+\.\.\. must be a finite number"),
        ({"max_rows": 3}, "option='max_rows' is not known"),
        ({"num_blocks": 2**63}, r"num_blocks=9223372036854775808 .* below 2\*\*63"),
        ({"num_blocks": 10**5000}, "num_blocks=<int, too long to print> must be"),
        ({"scheduler_type": 10**5000}, "scheduler_type=<int, too long to print> is not known"),
        ({"parallel": {"tp": 10**5000}}, "parallel=<dict, too long to print> must be over"),
    ],
)
def test_a_wrong_option_names_itself_and_what_is_known(options, text):
    with pytest.raises(ConfigError, match=text):
        resolve_config(options)


def test_words_set_any_field_and_their_values_are_json_else_text():
    words = [
        "compile=true",
        "slo_scale=2",
        "num_blocks=null",
        "calibration=cost=1.json",
        "scheduler_type=edf",
        'attention_backend="sdpa"',
        "max_phase_s=1e3",
    ]
    assert read_config("--engine", words, {}) == ContinuousBatchingConfig(
        compile=True,
        slo_scale=2,
        num_blocks=None,
        calibration="cost=1.json",
        scheduler_type="edf",
        attention_backend="sdpa",
        max_phase_s=1000.0,
    )
    assert read_config("--engine", ['parallel={"tp": 2}', "compile=False"], {}).parallel == {"tp": 2}


def test_words_go_before_defaults_and_may_say_again_what_another_option_says():
    own = {"max_queue_size": ("--max-queue", None), "max_requests_per_batch": ("--max-batch", 3)}
    words = ["max_queue_size=1", "max_requests_per_batch=3", "slo_scale=2", "slo_scale=2.0"]
    config = read_config("--engine", words, own, max_queue_size=256, scheduler_type="fcfs")
    assert config == ContinuousBatchingConfig(
        max_queue_size=1, max_requests_per_batch=3, slo_scale=2, scheduler_type="fcfs"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["compile"], "--engine: 'compile' is not NAME=VALUE"),
        (["=3"], "--engine: option='' is not known"),
        (["slo_scal=2"], r"--engine: option='slo_scal' is not known; choose from .*did you mean 'slo_scale'"),
        (["slo_scale=fast"], "--engine: slo_scale='fast' must be"),
        (["slo_scale=NaN"], "slo_scale=nan must be"),
        (["slo_scale=2", "slo_scale=3"], "--engine: slo_scale=3 contradicts slo_scale=2"),
        (["max_queue_size=0"], "--engine: max_queue_size=0 contradicts --max-queue=5"),
        (["slo_scale=" + "[" * 100_000], "slo_scale='"),
    ],
)
def test_words_that_make_no_config_are_told_with_their_option(words, text):
    with pytest.raises(ConfigError, match=text):
        read_config("--engine", words, {"max_queue_size": ("--max-queue", 5)})


def test_a_config_is_frozen_and_resolving_hands_back_a_new_one():
    config = ContinuousBatchingConfig()
    changed = resolve_config(config, max_requests_per_batch=3)
    assert (changed.max_requests_per_batch, config.max_requests_per_batch) == (3, 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_requests_per_batch = 5
