"""Decisions on a fake clock, with rows that are nothing but numbers."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
from transformers import Qwen2Tokenizer

from diffusers_continuous import embedded_model_path
from diffusers_continuous.config import ContinuousBatchingConfig
from diffusers_continuous.cost_model import Curve, StepCostModel
from diffusers_continuous.errors import QueueFullError
from diffusers_continuous.futures import RequestFuture
from diffusers_continuous.request import RequestState, RequestStatus, Row, SamplingParams, Stage
from diffusers_continuous.scheduler import AGEING_CHUNKS, MAX_BYPASSED, MAX_LOOKED_AT, StepScheduler


def request(name, num_rows=1, tokens=64, steps=2, priority=0, callback=None, output_type="pil", deadline_s=None):
    params = SamplingParams(
        128, 128, steps, 1.0, False, output_type=output_type, priority=priority, deadline_s=deadline_s
    )
    state = RequestState(name, params, RequestFuture(), callback=callback)
    state.rows = tuple(
        Row(
            request=state,
            index=i,
            num_image_tokens=tokens,
            latents=None,
            noise_scheduler=None,
            num_steps=steps,
            text=None,
            prompt="",
        )
        for i in range(num_rows)
    )
    return state


def scheduler(**options):
    return StepScheduler(ContinuousBatchingConfig(**{"scheduler_type": "fcfs", **options}))


def names(rows):
    return [row.request.request_id for row in rows]


def run_step(sched, now=0.0, errors=None):
    """One step as the runner would do it."""
    output = sched.schedule(now)
    for row in output.encode:
        row.text = SimpleNamespace(num_tokens=8)
    for row in output.decode:
        row.image = object()
    for row in output.denoise:
        row.step += 1
    ended = sched.update_from_output(output, errors or {})
    return output, ended


def test_a_newcomer_joins_at_the_next_step_and_a_finished_row_leaves_at_once():
    sched = scheduler()
    sched.add_request(request("a", steps=3))
    run_step(sched)
    sched.add_request(request("b", steps=1))
    output, _ = run_step(sched)
    assert names(output.encode) == ["b"]
    assert names(output.denoise) == ["a", "b"]
    output, ended = run_step(sched)  # b goes out before a's next step
    assert (names(output.decode), names(output.denoise)) == (["b"], [])
    assert [state.request_id for state in ended] == ["b"]
    run_step(sched)
    _, ended = run_step(sched)
    assert [(state.request_id, state.status) for state in ended] == [("a", RequestStatus.FINISHED)]
    assert not sched.has_requests()


def test_capacity_counts_rows_and_a_freed_place_is_refilled():
    sched = scheduler(max_requests_per_batch=2)
    sched.add_request(request("a", num_rows=3, steps=1, output_type="latent"))
    sched.add_request(request("b", steps=1))
    assert names(run_step(sched)[0].denoise) == ["a", "a"]
    assert names(run_step(sched)[0].denoise) == ["a", "b"]


def test_capacity_counts_tokens_with_a_bound_before_the_prompt_is_encoded():
    sched = scheduler(max_batch_tokens=160)
    for name in "abc":
        sched.add_request(request(name, tokens=64))  # 64 + 8 text tokens
    assert names(run_step(sched)[0].denoise) == ["a", "b"]


def test_a_row_larger_than_the_budget_runs_alone():
    sched = scheduler(max_batch_tokens=100)
    sched.add_request(request("large", tokens=4096, steps=1, output_type="latent"))
    sched.add_request(request("small", tokens=16, steps=1))
    assert names(run_step(sched)[0].denoise) == ["large"]
    assert names(run_step(sched)[0].denoise) == ["small"]


def test_small_followers_pass_a_large_head_but_not_for_ever():
    """A head that does not fit lets others use the room; after MAX_BYPASSED of them it gets the room itself."""
    sched = scheduler(max_batch_tokens=200)
    sched.add_request(request("running", tokens=64, steps=1000))
    run_step(sched)
    sched.add_request(request("head", tokens=180, steps=1))
    for i in range(3 * MAX_BYPASSED):
        sched.add_request(request(f"small{i}", tokens=64, steps=1, output_type="latent"))
    passed = 0
    for _ in range(3 * MAX_BYPASSED):
        output, _ = run_step(sched)
        passed += sum(name.startswith("small") for name in names(output.denoise))
    assert passed == MAX_BYPASSED
    sched.remove(sched.running[0].request)
    assert "head" in names(run_step(sched)[0].denoise)


def test_priority_outranks_arrival_and_arrival_decides_among_equals():
    sched = scheduler(max_requests_per_batch=1)
    for name, priority in (("a", 0), ("b", -1), ("c", 0), ("d", -1)):
        sched.add_request(request(name, steps=1, priority=priority, output_type="latent"))
    assert [names(run_step(sched)[0].denoise)[0] for _ in range(4)] == ["b", "d", "a", "c"]


def test_a_gang_is_admitted_whole_and_sits_out_while_its_callback_runs():
    sched = scheduler(max_requests_per_batch=3)
    gang = request("gang", num_rows=2, callback=object())
    sched.add_request(request("a", num_rows=2, steps=3))
    sched.add_request(gang)
    assert names(run_step(sched)[0].denoise) == ["a", "a"]  # one place is not enough
    sched.remove(sched.running[0].request)
    assert names(run_step(sched)[0].denoise) == ["gang", "gang"]
    gang.is_in_callback = True
    assert sched.schedule(0.0).is_empty
    gang.is_in_callback = False
    assert names(run_step(sched)[0].denoise) == ["gang", "gang"]


def test_a_gang_larger_than_the_batch_runs_alone():
    sched = scheduler(max_requests_per_batch=2)
    sched.add_request(request("gang", num_rows=5, callback=object(), steps=1))
    assert names(run_step(sched)[0].denoise) == ["gang"] * 5


def test_a_failed_row_fails_its_request_and_nobody_else():
    sched = scheduler()
    bad, good = request("bad", num_rows=2), request("good")
    sched.add_request(bad)
    sched.add_request(good)
    error = ValueError("broken")
    _, ended = run_step(sched, errors={bad.rows[1]: error})
    assert [(s.request_id, s.status, s.error) for s in ended] == [("bad", RequestStatus.FAILED, error)]
    assert names(sched.running) == ["good"]


def test_an_ended_request_is_not_revived_by_a_late_step():
    """A request cancelled while its last step ran must not come back for decoding."""
    sched = scheduler()
    state = request("a", steps=1)
    sched.add_request(state)
    output = sched.schedule(0.0)
    state.rows[0].text, state.rows[0].step = SimpleNamespace(num_tokens=8), 1
    sched.remove(state)
    state.status = RequestStatus.CANCELLED
    assert sched.update_from_output(output, {}) == []
    assert not sched.has_requests()


def test_the_queue_limit_counts_waiting_rows():
    sched = scheduler(max_queue_size=3)
    sched.add_request(request("a", num_rows=2))
    with pytest.raises(QueueFullError, match="max_queue_size=3"):
        sched.add_request(request("b", num_rows=2))
    sched.add_request(request("c"))
    assert sched.num_waiting == 3


def test_latents_need_no_decoding():
    sched = scheduler()
    sched.add_request(request("a", steps=1, output_type="latent"))
    _, ended = run_step(sched)
    assert [state.status for state in ended] == [RequestStatus.FINISHED]


def test_holding_admits_nobody():
    sched = scheduler()
    sched.add_request(request("a"))
    sched.is_holding = True
    assert sched.schedule(0.0).is_empty
    sched.is_holding = False
    assert names(sched.schedule(0.0).denoise) == ["a"]


@pytest.mark.parametrize("scheduler_type", ["fcfs", "edf", "slo"])
def test_who_is_held_is_told_what_it_takes_from_now_on(scheduler_type):
    model = StepCostModel({"encode": Curve(), "denoise": Curve(1e3), "decode": Curve(500.0)})
    config = ContinuousBatchingConfig(scheduler_type=scheduler_type, max_requests_per_batch=1)
    sched = StepScheduler(config, cost_model=model)
    states = [request("a", steps=3, deadline_s=20.0), request("b", deadline_s=30.0), request("late", deadline_s=0.1)]
    for state in states:
        sched.add_request(state)
    sched.is_holding = True
    assert sched.schedule(10.0).is_empty  # too late for one
    assert len(sched.late) == (scheduler_type == "slo")
    ends, places = ([find(state, 10.0) for state in states] for find in (sched.eta, sched.position))
    sched.is_holding = False
    assert ends == [sched.eta(state, 10.0) for state in states]
    assert places == [sched.position(state, 10.0) for state in states]
    assert sorted(places) == [1, 2, 3]
    assert min(ends) >= 12.5  # two steps and a picture


def test_a_forecast_counts_every_picture_of_a_call_with_a_callback(monkeypatch):
    model = StepCostModel({"encode": Curve(), "denoise": Curve(0.0, 1e3 / 72), "decode": Curve(500.0)})
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="edf"), cost_model=model)
    gang = request("gang", num_rows=3, callback=object())
    sched.add_request(gang)
    assert sched.eta(gang, 0.0) == pytest.approx(2 * 3.0 + 3 * 0.5)
    monkeypatch.setattr("diffusers_continuous.scheduler.MAX_FORESEEN", 1)
    first = request("first", steps=1, deadline_s=1.0)
    sched.add_request(first)
    assert sched.eta(gang, 0.0) - sched.eta(first, 0.0) == pytest.approx(3.0 + 3 * 0.5)  # a step of theirs is left


def test_phases_change_only_when_the_batch_drains_or_the_bound_passes():
    sched = StepScheduler(ContinuousBatchingConfig(max_phase_s=10.0), is_phased=True)
    kinds = []

    def step(now):
        output, _ = run_step(sched, now)
        kind = [name for name in ("encode", "decode", "denoise") if getattr(output, name)]
        assert len(kind) == 1  # never two components at once
        kinds.extend(kind)

    sched.add_request(request("a", steps=20))
    step(0.0)
    step(1.0)
    sched.add_request(request("b", steps=2))
    step(2.0)  # b waits: the batch goes on
    step(11.0)
    step(12.0)  # for 10 seconds, not longer
    step(13.0)
    assert kinds == ["encode", "denoise", "denoise", "denoise", "encode", "denoise"]


def test_while_the_text_encoder_is_there_waiting_prompts_are_encoded_too():
    sched = StepScheduler(ContinuousBatchingConfig(max_requests_per_batch=1), is_phased=True)
    for name in "abc":
        sched.add_request(request(name, steps=1, output_type="latent"))
    outputs = [run_step(sched)[0] for _ in range(4)]
    kinds = [kind for output in outputs for kind in ("encode", "denoise") if getattr(output, kind)]
    assert kinds == ["encode", "denoise", "denoise", "denoise"]


def test_texts_encoded_ahead_are_forgotten_when_the_encoder_may_have_changed():
    sched = StepScheduler(ContinuousBatchingConfig(max_requests_per_batch=1), is_phased=True)
    for name in "ab":
        sched.add_request(request(name, steps=1, output_type="latent"))
    run_step(sched)
    (ahead,) = sched.waiting
    assert ahead.is_encoded
    sched.forget_texts()
    assert not ahead.is_encoded
    run_step(sched)  # a is denoised
    assert names(run_step(sched)[0].encode) == ["b"]


def test_a_long_queue_of_rows_that_do_not_fit_is_not_searched_to_its_end():
    looked_at = []

    class CountedRow(Row):
        __slots__ = ()

        @property
        def num_tokens(self):
            looked_at.append(self)
            return super().num_tokens

    sched = scheduler(max_batch_tokens=100)
    sched.add_request(request("running", tokens=80, steps=10))
    run_step(sched)
    for i in range(1000):
        state = request(f"r{i}", tokens=80)
        state.rows = tuple(CountedRow(state, 0, 80, None, None, 2, prompt="") for _ in state.rows)
        sched.add_request(state)
    sched.schedule(0.0)
    assert 0 < len(looked_at) <= MAX_LOOKED_AT


def test_a_picture_and_a_newcomer_that_wait_together_wait_once():
    sched = StepScheduler(ContinuousBatchingConfig(max_phase_s=10.0), is_phased=True)
    sched.add_request(request("long", steps=50))
    sched.add_request(request("done", steps=1))
    run_step(sched, 0.0)
    run_step(sched, 1.0)  # the last step of "done"
    sched.add_request(request("new"))
    run_step(sched, 2.0)
    late = [run_step(sched, 12.0 + second)[0] for second in range(3)]
    assert [names(output.decode) for output in late] == [["done"], [], []]
    assert [names(output.encode) for output in late] == [[], ["new"], []]
    assert names(late[2].denoise) == ["long", "new"]


@pytest.mark.parametrize("seed", range(20))
def test_random_arrivals_and_cancels_leave_nothing_behind(seed):
    rng = random.Random(seed)
    sched = scheduler(max_requests_per_batch=rng.randint(1, 6), max_batch_tokens=rng.randint(60, 600))
    alive, ended = {}, []
    for number in range(60):
        if rng.random() < 0.5:
            state = request(
                f"r{number}", rng.randint(1, 3), rng.choice([16, 64, 256]), rng.randint(1, 6), rng.randint(-1, 1)
            )
            sched.add_request(state)
            alive[state.request_id] = state
        if alive and rng.random() < 0.1:
            state = alive.pop(rng.choice(list(alive)))
            sched.remove(state)
            state.status = RequestStatus.CANCELLED
            ended.append(state.request_id)
        output, done = run_step(sched)
        assert len(output.denoise) <= sched.config.max_requests_per_batch
        assert len(output.denoise) == 1 or sum(r.num_tokens for r in output.denoise) <= sched.config.max_batch_tokens
        ended.extend(state.request_id for state in done)
        for state in done:
            del alive[state.request_id]
    while sched.has_requests():
        ended.extend(state.request_id for state in run_step(sched)[1])
    assert len(ended) == len(set(ended))  # everybody ends exactly once
    assert [*sched.waiting, *sched.running, *sched.decoding] == []
    assert all(row.stage is Stage.DONE for state in alive.values() for row in state.rows)


def decoding_request(name, decoder, steps=1):
    state = request(name, steps=steps)
    state.params = dataclasses.replace(state.params, decoder=decoder)
    for row in state.rows:
        row.num_decode_steps = 4 if decoder == "pid" else 1
    return state


def run_decoding_step(sched, now):
    output = sched.schedule(now)
    for row in output.encode:
        row.text = SimpleNamespace(num_tokens=8)
    for row in output.decode:
        row.decode_step += 1
        row.image = object() if row.decode_step == row.num_decode_steps else None
    for row in output.denoise:
        row.step += 1
    sched.update_from_output(output, {})
    return output


@pytest.mark.parametrize("scheduler_type", ["fcfs", "edf", "least_slack", "slo"])
def test_denoising_waits_for_one_step_of_a_long_decoder_also_when_pictures_go_out_in_between(scheduler_type):
    sched = scheduler(scheduler_type=scheduler_type)
    for number in range(3):
        sched.add_request(decoding_request(f"pid{number}", "pid"))
    for number in range(6):
        sched.add_request(decoding_request(f"vae{number}", "vae", steps=2 + number))
    between, most = 0, 0
    for now in range(200):
        output = run_decoding_step(sched, float(now))
        between += any(row.request.params.decoder == "pid" for row in output.decode)
        if output.denoise:
            most, between = max(most, between), 0
        if not sched.running and not sched.waiting:
            break
    assert most == 1
    while sched.has_requests():
        assert not run_decoding_step(sched, 1e3).is_empty


def test_what_becomes_hopeless_in_the_middle_of_a_long_decoder_fails_there():
    model = StepCostModel({"encode": Curve(), "denoise": Curve(1e3), "decode": Curve(), "pid": Curve(1e3)})
    config = ContinuousBatchingConfig(scheduler_type="slo", on_hopeless="fail")
    sched = StepScheduler(config, cost_model=model)
    state = decoding_request("slow", "pid")
    state.params = dataclasses.replace(state.params, deadline_s=6.0)  # of the 5 s that it takes
    sched.add_request(state)
    for now in (0.0, 1.0, 2.0):
        run_decoding_step(sched, now)
    assert state.rows[0].decode_step == 2
    assert not sched.schedule(4.0).hopeless  # the last step took twice as long as predicted
    assert sched.schedule(4.5).hopeless == (state,)
    assert "would be done 6.5 s after its arrival at the earliest; its deadline is 6.0 s" in str(state.error)
    assert not sched.has_requests()


def test_a_picture_that_is_late_is_decoded_although_others_keep_coming():
    """Its decoder's steps belong to what is late; the oldest of that gets one chunk in so many."""
    model = StepCostModel({"encode": Curve(), "denoise": Curve(1e3), "decode": Curve(), "pid": Curve(1e3)})
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="slo", max_requests_per_batch=1), cost_model=model)
    late = decoding_request("late", "pid")
    late.params = dataclasses.replace(late.params, deadline_s=4.0)  # of the 5 s that it takes
    sched.add_request(late)
    for now in range(5 * (AGEING_CHUNKS + 2)):
        state = request(f"{now}", steps=1, output_type="latent", deadline_s=4.0)
        state.metrics.arrival_s = float(now)
        sched.add_request(state)
        run_decoding_step(sched, float(now))
        if late.status is RequestStatus.FINISHED:
            break
    assert late.status is RequestStatus.FINISHED


def test_in_phases_a_long_decoder_is_not_put_off_by_pictures_that_keep_coming():
    sched = scheduler(max_phase_s=5.0, scheduler_type="fcfs")
    sched.is_phased = True
    sched.add_request(decoding_request("pid", "pid"))
    for now in range(60):
        if now % 2 == 0:
            sched.add_request(decoding_request(f"vae{now}", "vae"))
        run_decoding_step(sched, float(now))
        if not any(row.request.request_id == "pid" for row in (*sched.waiting, *sched.running, *sched.decoding)):
            break
    assert now <= 20


def test_nobody_is_admitted_while_a_batch_of_pictures_waits_to_be_decoded():
    sched = scheduler(max_requests_per_batch=2, scheduler_type="fcfs")
    for number in range(8):
        sched.add_request(decoding_request(f"{number}", "pid"))
    longest = 0
    for now in range(100):
        run_decoding_step(sched, float(now))
        longest = max(longest, len(sched.decoding))
    assert longest <= 4
    assert not sched.has_requests()


@pytest.mark.parametrize("prompt", ["\u0958" * 60, "\U0001d15e" * 60, "\ufb1d" * 60, "a cat"], ids=ascii)
def test_a_prompt_never_has_more_tokens_than_were_counted(prompt):
    """Some characters get longer when the tokenizer normalizes them."""
    tokenizer = Qwen2Tokenizer.from_pretrained(embedded_model_path(), subfolder="tokenizer")
    state = request("a")
    state.rows[0].prompt = prompt
    assert len(tokenizer(prompt).input_ids) <= state.rows[0].num_text_tokens
