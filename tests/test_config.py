"""Options: mistakes say what is known, and nothing is written to afterwards."""

from __future__ import annotations

import dataclasses

import pytest

from diffusers_continuous import ConfigError, ContinuousBatchingConfig, resolve_config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheduler_type": "fcsf"}, r"scheduler_type='fcsf' is not known; choose from \['edf', 'fcfs',.*'fcfs'"),
        ({"on_hopeless": "drop"}, r"choose from \['fail', 'run_last'\]"),
        ({"steps_per_chunk": 0}, "steps_per_chunk=0 .* at least 1, or 'auto'"),
        ({"slo_scale": 0}, "slo_scale=0"),
        ({"calibration": 3}, "calibration=3 must be a path"),
        ({"batch_layout": "paked"}, r"choose from \['auto', 'packed', 'padded', 'tiled'\]"),
        ({"max_requests_per_batch": 0}, "max_requests_per_batch=0 .* at least 1"),
        ({"max_batch_tokens": 2.5}, "max_batch_tokens=2.5"),
        ({"max_queue_size": -1}, "max_queue_size=-1 .* at least 0"),
        ({"max_phase_s": float("nan")}, "max_phase_s=nan"),
        ({"slo_scale": 10**400}, "slo_scale=10+ must be a finite number"),
        ({"cpu_offload_space": 10**400}, "cpu_offload_space=10+ must be a finite number"),
        ({"max_rows": 3}, "option='max_rows' is not known"),
    ],
)
def test_a_wrong_option_names_itself_and_what_is_known(options, text):
    with pytest.raises(ConfigError, match=text):
        resolve_config(options)


def test_a_config_is_frozen_and_resolving_hands_back_a_new_one():
    config = ContinuousBatchingConfig()
    changed = resolve_config(config, max_requests_per_batch=3)
    assert (changed.max_requests_per_batch, config.max_requests_per_batch) == (3, 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_requests_per_batch = 5
