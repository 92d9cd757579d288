"""Who goes first: traces of arrivals against the schedules that they must give, on a clock that is a number."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from diffusers_continuous.config import ContinuousBatchingConfig
from diffusers_continuous.cost_model import Curve, StepCostModel
from diffusers_continuous.errors import DeadlineError
from diffusers_continuous.memory.block_pool import BlockPool, PageLedger
from diffusers_continuous.policy import SLO
from diffusers_continuous.request import RequestStatus
from diffusers_continuous.scheduler import AGEING_CHUNKS, StepScheduler
from test_scheduler import names, request, run_step

STEP_S = 1.0
PLAIN = Curve(1e3 * STEP_S)
SHARED = Curve(16.0, 5.0 / 72)  # 16 ms and 5 more for each row


class Machine:
    """A scheduler whose steps take what its cost model says; knows who ran when."""

    def __init__(self, scheduler_type, rows=1, curve=PLAIN, **options):
        free = {kind: Curve() for kind in ("encode", "decode", "pid")}
        self.model = StepCostModel({**free, "denoise": curve})
        config = ContinuousBatchingConfig(scheduler_type=scheduler_type, max_requests_per_batch=rows, **options)
        self.scheduler = StepScheduler(config, cost_model=self.model)
        self.now, self.trace, self.ended = 0.0, [], {}

    def add(self, name, steps, deadline_s=None, **options):
        state = request(name, steps=steps, output_type="latent", deadline_s=deadline_s, **options)
        state.metrics.arrival_s = self.now
        self.scheduler.add_request(state)
        return state

    def run(self, num_steps=None):
        """Run so many steps, or to the end; the names that ran, a batch joined by +."""
        start = len(self.trace)
        while self.scheduler.has_requests() and (num_steps is None or len(self.trace) < start + num_steps):
            output, ended = run_step(self.scheduler, self.now)
            if output.denoise:
                self.now += self.model.rows_ms("denoise", output.denoise) / 1e3
                self.trace.append("+".join(names(output.denoise)))
            self.ended.update((state.request_id, self.now) for state in (*ended, *output.hopeless))
        return " ".join(self.trace[start:])


def test_fcfs_runs_what_came_first_to_its_end():
    machine = Machine("fcfs")
    machine.add("long", 4)
    assert machine.run(1) == "long"
    machine.add("short", 1, deadline_s=1.0)
    assert machine.run() == "long long long short"
    assert machine.scheduler.num_preemptions == 0


def test_edf_pauses_a_running_row_for_an_earlier_deadline_and_resumes_it_where_it_was():
    machine = Machine("edf")
    machine.add("long", 4, deadline_s=20.0)
    assert machine.run(2) == "long long"
    machine.add("short", 2, deadline_s=5.0)
    assert machine.run() == "short short long long"
    assert machine.scheduler.num_preemptions == 1


def test_least_slack_puts_the_long_one_first_where_edf_does_not():
    for policy, expected in (("least_slack", "long"), ("edf", "short")):
        machine = Machine(policy)
        machine.add("short", 1, deadline_s=9.0)
        machine.add("long", 9, deadline_s=10.0)
        assert machine.run(1) == expected


def test_slo_gives_up_the_longest_and_keeps_everybody_else():
    """Four requests of which any three fit: the long one goes last, though its deadline comes first."""
    machine = Machine("slo")
    machine.add("long", 6, deadline_s=6.5)
    for name, deadline_s in (("a", 7.0), ("b", 8.0), ("c", 9.0)):
        machine.add(name, 2, deadline_s=deadline_s)
    assert machine.run() == "a a b b c c " + " ".join(["long"] * 6)


def test_slo_is_earliest_deadline_first_while_everything_fits():
    machine = Machine("slo")
    machine.add("late", 3, deadline_s=30.0)
    machine.add("soon", 3, deadline_s=10.0)
    machine.add("middle", 3, deadline_s=20.0)
    assert machine.run().split()[::3] == ["soon", "middle", "late"]


def test_slo_runs_what_is_late_shortest_first():
    machine = Machine("slo")
    for name, steps in (("nine", 9), ("three", 3), ("six", 6)):
        machine.add(name, steps, deadline_s=0.5)
    machine.add("fits", 2, deadline_s=2.0)
    assert list(dict.fromkeys(machine.run().split())) == ["fits", "three", "six", "nine"]


def test_slo_keeps_as_many_as_any_order_could():
    """Against all subsets, whose best order is by deadline."""
    rng = random.Random(0)
    for _ in range(40):
        jobs = [(rng.randint(1, 6), rng.randint(1, 16) + 0.5) for _ in range(6)]
        machine = Machine("slo")
        for index, (steps, deadline_s) in enumerate(jobs):
            machine.add(str(index), steps, deadline_s=deadline_s)
        machine.run()
        on_time = sum(machine.ended[str(index)] <= deadline_s for index, (_, deadline_s) in enumerate(jobs))
        assert on_time == max(n for n in range(7) for some in itertools.combinations(jobs, n) if fits(some))


def fits(jobs):
    by_deadline = sorted(jobs, key=lambda job: job[1])
    return all(
        done <= deadline_s
        for done, (_, deadline_s) in zip(itertools.accumulate(s for s, _ in by_deadline), by_deadline, strict=True)
    )


@pytest.mark.parametrize("policy", ["edf", "least_slack", "slo"])
def test_priority_outranks_deadlines_and_interrupts(policy):
    machine = Machine(policy)
    machine.add("common", 2, deadline_s=3.0)
    assert machine.run(1) == "common"
    machine.add("urgent", 2, deadline_s=100.0, priority=-1)
    machine.add("later", 1, deadline_s=1.0, priority=1)
    assert machine.run() == "urgent urgent common later"


def test_without_a_deadline_of_its_own_a_request_gets_three_times_its_time_alone():
    machine = Machine("slo", slo_scale=3.0)
    machine.now = 100.0
    assert machine.add("a", 10).deadline_s == pytest.approx(130.0)
    assert machine.add("b", 10, deadline_s=5.0).deadline_s == pytest.approx(105.0)


def test_guessed_deadlines_are_set_again_when_the_first_steps_have_been_timed():
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="slo"))
    default, own = request("a", steps=10, output_type="latent"), request("b", steps=10, deadline_s=7.0)
    for state in (default, own):
        sched.add_request(state)
    for _ in range(3):
        sched.cost_model.observe("denoise", default.rows, 1000.0)
    sched.schedule(0.0)
    assert default.deadline_s == pytest.approx(30.0, rel=0.1)
    assert own.deadline_s == 7.0


def test_a_guessed_deadline_follows_until_all_stages_have_been_timed():
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="slo"))
    state = request("a", steps=10)
    sched.add_request(state)
    for kind, ms, expected_s in (("denoise", 1000.0, 30.0), ("decode", 100_000.0, 330.0)):
        for _ in range(3):
            sched.cost_model.observe(kind, state.rows, ms)
        sched.schedule(0.0)
        assert state.deadline_s == pytest.approx(expected_s, rel=0.1)


def test_what_ends_before_its_own_speed_is_known_was_not_late():
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="slo"))
    unknown, own, known = request("a"), request("b", deadline_s=7.0), request("c", output_type="latent")
    for state in (unknown, own, known):
        sched.add_request(state)
    sched.remove(unknown)
    sched.remove(own)
    for _ in range(3):
        for kind in ("encode", "denoise"):
            sched.cost_model.observe(kind, known.rows, 1000.0)
    sched.remove(known)
    assert (unknown.deadline_s, own.deadline_s) == (math.inf, 7.0)
    assert known.deadline_s == pytest.approx(3 * (1 + known.rows[0].num_steps), rel=0.1)


def test_what_is_late_ends_within_the_promised_bound_however_many_come():
    """Requests that can be on time come for ever and fill the machine; the late one still gets one chunk in 128."""
    machine = Machine("slo")
    late = machine.add("late", 3, deadline_s=0.5)
    number = 0
    while late.status is not RequestStatus.FINISHED:
        machine.add(str(number), 1, deadline_s=3.0)
        number += 1
        machine.run(1)
        assert machine.now <= 3 * (AGEING_CHUNKS + 1) * STEP_S + 1
    assert machine.now > 2 * AGEING_CHUNKS * STEP_S


def test_late_ones_age_in_order_of_arrival():
    machine = Machine("slo")
    for index in range(3):
        machine.add(f"late{index}", 3 - index, deadline_s=0.1)
        machine.now += 0.01
    order = []
    for number in range(1000):
        machine.add(str(number), 1, deadline_s=3.0)
        order += [name for name in machine.run(1).split() if name.startswith("late")]
    assert order == ["late0"] * 3 + ["late1"] * 2 + ["late2"]


def test_a_hopeless_request_fails_at_once_where_that_is_asked_for_and_says_when_it_would_be_done():
    machine = Machine("slo", on_hopeless="fail")
    fine, hopeless = machine.add("fine", 4, deadline_s=5.0), machine.add("hopeless", 9, deadline_s=8.0)
    output = machine.scheduler.schedule(machine.now)
    assert output.hopeless == (hopeless,)
    assert names(output.denoise) == ["fine"]
    assert isinstance(hopeless.error, DeadlineError)
    assert "'hopeless' would be done 9.0 s after its arrival" in str(hopeless.error)
    assert [row.request for row in machine.scheduler.running] == [fine]
    assert machine.scheduler.num_waiting == 0


def test_nobody_is_kept_out_of_a_batch_on_a_guess():
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="slo"))
    for index in range(20):
        sched.add_request(request(str(index), steps=10, deadline_s=0.001))
    assert len(sched.schedule(0.0).denoise) == 20


def test_nobody_fails_on_a_guess():
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="slo", on_hopeless="fail"))
    sched.add_request(request("a", steps=1000, deadline_s=0.001))
    assert sched.schedule(0.0).hopeless == ()


def test_rows_share_a_step_only_while_that_makes_nobody_late():
    """16 + 5 ms per row: each joins until the first one's deadline allows no slower step."""
    machine = Machine("slo", rows=32, curve=SHARED)
    machine.add("tight", 10, deadline_s=0.33)  # 33 ms per step: three rows
    for index in range(6):
        machine.add(str(index), 10, deadline_s=100.0)
    assert machine.run(1) == "tight+0+1"
    machine.run()
    assert machine.ended["tight"] <= 0.33


def test_rows_that_save_nothing_together_run_one_after_the_other():
    machine = Machine("slo", rows=32, curve=Curve(0.5, 1.0))
    for name in "ab":
        machine.add(name, 2, deadline_s=100.0)
    assert machine.run() == "a a b b"


def test_the_rows_of_a_request_are_kept_or_given_up_together():
    machine = Machine("slo")
    machine.add("pair", 3, deadline_s=5.0, num_rows=2)  # 6 s of work
    machine.add("one", 3, deadline_s=6.0)
    assert machine.run(3) == "one one one"


def test_decisions_are_made_at_the_ends_of_chunks():
    machine = Machine("edf", steps_per_chunk=3)
    machine.add("long", 7, deadline_s=100.0)
    assert machine.run(1) == "long"
    machine.add("short", 1, deadline_s=2.0)
    assert machine.run() == "long long short long long long long"


def test_automatic_chunks_keep_deciding_below_one_percent():
    machine = Machine("edf", steps_per_chunk="auto")
    machine.add("a", 50, deadline_s=100.0)
    ticks = itertools.count(0, 0.029)  # a decision takes 29 ms, a step 1,000
    machine.scheduler.timer = lambda: next(ticks)
    machine.run(40)
    assert machine.scheduler._num_chunk_steps() == 3


def test_position_and_eta_follow_the_policy():
    machine = Machine("slo")
    states = {name: machine.add(name, 4, deadline_s=d) for name, d in (("a", 30.0), ("b", 10.0), ("c", 20.0))}
    machine.run(1)
    scheduler = machine.scheduler
    assert {name: scheduler.position(state, machine.now) for name, state in states.items()} == {"b": 0, "c": 1, "a": 2}
    etas = {name: scheduler.eta(state, machine.now) for name, state in states.items()}
    assert etas == pytest.approx({"b": 4.0, "c": 8.0, "a": 12.0})
    machine.run()
    assert machine.ended == pytest.approx(etas)


@pytest.mark.parametrize("policy", ["fcfs", "edf", "least_slack", "slo"])
def test_an_eta_can_be_asked_for_inside_a_callback(policy):
    machine = Machine(policy)
    called, other = machine.add("a", 4, callback=object()), machine.add("b", 4, deadline_s=100.0)
    machine.run(1)
    called.is_in_callback = True
    etas = [machine.scheduler.eta(state, machine.now) for state in (called, other)]
    assert etas == [4 * STEP_S, 8 * STEP_S]
    assert machine.scheduler.backlog_s(machine.now) == 7 * STEP_S


def test_a_long_queue_is_foreseen_without_following_every_step_of_it():
    machine = Machine("fcfs", rows=4, curve=SHARED)
    states = [machine.add(str(index), 10) for index in range(400)]
    for state in (states[0], states[200], states[399]):
        expected = 10 * 0.036 * (1 + int(state.request_id) // 4)
        assert machine.scheduler.eta(state, 0.0) == pytest.approx(expected, rel=0.05)
    assert machine.scheduler.position(states[399], 0.0) == 400


@pytest.mark.parametrize("policy", ["fcfs", "edf", "least_slack", "slo"])
def test_etas_of_a_batch_are_near_what_happens(policy):
    machine = Machine(policy, rows=4, curve=SHARED)
    rng = random.Random(1)
    states = [machine.add(str(index), rng.randint(3, 20), num_rows=rng.randint(1, 2)) for index in range(12)]
    etas = {state.request_id: machine.scheduler.eta(state, 0.0) for state in states}
    machine.run()
    errors = sorted(abs(etas[name] / ended - 1) for name, ended in machine.ended.items())
    assert errors[len(errors) // 2] <= 0.2


@pytest.mark.parametrize("policy", ["fcfs", "edf", "least_slack", "slo"])
@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_and_cancels_leave_nothing_behind(policy, seed):
    rng = random.Random(seed)
    machine = Machine(
        policy,
        rows=rng.randint(1, 6),
        curve=SHARED,
        max_batch_tokens=rng.randint(100, 600),
        steps_per_chunk=rng.randint(1, 3),
    )
    scheduler, alive = machine.scheduler, {}
    for number in range(80):
        if rng.random() < 0.6:
            state = machine.add(
                f"r{number}", rng.randint(1, 8), num_rows=rng.randint(1, 3), priority=rng.choice((0, 0, 0, -1))
            )
            alive[state.request_id] = state
        running = [name for name in alive if name not in machine.ended]
        if running and rng.random() < 0.1:
            state = alive.pop(rng.choice(running))
            scheduler.remove(state)
            state.status = RequestStatus.CANCELLED
        machine.run(1)
        assert len(scheduler.running) <= scheduler.config.max_requests_per_batch
        queued = [*scheduler.waiting, *scheduler.late, *scheduler.running, *scheduler.decoding]
        assert len(queued) == len(set(queued))
    machine.run()
    assert not scheduler.has_requests()
    assert set(alive) <= set(machine.ended)


def test_a_choice_is_made_again_when_something_happens_and_seldom_otherwise():
    machine = Machine("slo")
    for number in range(20):
        machine.add(f"long{number}", 40, deadline_s=1000.0 + number)
    calls = itertools.count()
    machine.scheduler.timer = lambda: float(next(calls))  # asked before and after each decision
    assert machine.run(33) == " ".join(["long0"] * 33)
    assert next(calls) / 2 <= 6
    machine.add("short", 2, deadline_s=5.0)
    assert machine.run(3) == "short short long0"
    assert machine.run(8) == " ".join(["long0"] * 6 + ["long1"] * 2)


@pytest.mark.parametrize("policy", ["slo", "edf", "least_slack", "fcfs"])
def test_a_large_row_gets_its_pages_though_small_ones_keep_coming(policy):
    """Nobody can be sent to host memory here, so pages are free only when somebody has ended."""
    machine = Machine(policy, rows=8, curve=SHARED)
    machine.scheduler.memory = PageLedger(BlockPool(100), BlockPool(0))

    def add(name, num_blocks, steps, deadline_s):
        state = request(name, steps=steps, output_type="latent", deadline_s=deadline_s)
        state.metrics.arrival_s, state.rows[0].num_blocks = machine.now, num_blocks
        machine.scheduler.add_request(state)

    for number in range(800):
        add(f"small{number}", 10, 6, 3.0)
        if number == 5:
            add("large", 80, 3, 6.0)
        machine.run(1)
        machine.scheduler.memory.check_integrity()
    assert "large" in machine.ended
    assert len(machine.ended) > 50


@pytest.mark.parametrize("policy", ["slo", "edf", "fcfs"])
def test_the_pages_of_a_finished_picture_are_used_at_the_next_decision(policy):
    machine = Machine(policy)
    machine.scheduler.memory = PageLedger(BlockPool(1), BlockPool(0))
    state = request("three", num_rows=3, steps=2, deadline_s=1e6)
    for row in state.rows:
        row.num_blocks = 1
    machine.scheduler.add_request(state)
    num_empty = 0
    while machine.scheduler.has_requests():
        output, _ = run_step(machine.scheduler, machine.now)
        machine.now += 1.0
        num_empty += output.is_empty
    assert num_empty == 0


def test_one_slow_first_step_decides_nothing():
    machine = Machine("slo", on_hopeless="fail")
    machine.scheduler.cost_model = model = StepCostModel()  # knows nothing yet
    machine.scheduler._policy = SLO(model)
    state = machine.add("a", 50)
    state.metrics.deadline_s = 20.0
    for ms in (20_000.0, 200.0, 200.0, 200.0):
        output, ended = run_step(machine.scheduler, machine.now)
        assert (output.hopeless, ended) == ((), [])
        model.observe("denoise", output.denoise, ms)
    assert model.is_informed
    machine.scheduler.schedule(machine.now)
    assert state.error is None
    assert state.metrics.deadline_s < 60.0


def test_a_guess_about_any_stage_makes_nothing_hopeless():
    machine = Machine("slo", on_hopeless="fail")
    model = StepCostModel({"encode": Curve(), "denoise": Curve(1.0)})  # decoding is not known
    machine.scheduler.cost_model = model
    state = request("a", steps=1, deadline_s=1e-6)
    machine.scheduler.add_request(state)
    assert machine.scheduler.schedule(0.0).hopeless == ()
    for _ in range(3):
        model.observe("decode", state.rows, 10.0)
    assert machine.scheduler.schedule(0.0).hopeless == (state,)


def test_two_calls_whose_callbacks_ran_in_host_memory_both_come_back():
    sched = StepScheduler(ContinuousBatchingConfig(scheduler_type="fcfs", max_requests_per_batch=2))
    sched.memory = PageLedger(BlockPool(1), BlockPool(4))
    ended = []

    def add(name, callback):
        state = request(name, steps=2, callback=callback, output_type="latent")
        state.rows[0].num_blocks = 1
        sched.add_request(state)
        return state

    def step():
        output, done = run_step(sched)
        ended.extend(state.request_id for state in done)
        return names(output.denoise)

    calls = [add("a", object()), add("b", object())]
    for call in calls:
        assert step() == [call.request_id]
        call.is_in_callback = True
    add("c", None)
    assert (step(), step()) == (["c"], ["c"])
    for call in calls:
        call.is_in_callback = False
    for _ in range(6):
        step()
    assert sorted(ended) == ["a", "b", "c"]
