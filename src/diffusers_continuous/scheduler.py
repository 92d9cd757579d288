"""Which rows run in the next step. Talks of ids, stages, steps, tokens and seconds; never imports torch.

A row goes ENCODE -> DENOISE -> DECODE -> DONE. It holds a place in the batch from its encoding until its last
denoising step; decoding needs no place, so the next row moves up at once. Decoders of several steps take turns with
the denoising, one step of theirs for one step of everybody else.

A preemptive policy chooses the batch anew from all rows that are active and says whether a long decoder is next: at
every chunk of steps before which somebody came or went, and now and then anyway. A row that makes way goes back to the
queue as it stands, with its latents, its step and its noise scheduler, so that it goes on later as if nothing had
happened; only what a step cache kept of it is lost.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from .admission import PageRoom, StepBatch, known_cost, pages_together
from .config import ContinuousBatchingConfig
from .cost_model import StepCostModel
from .errors import DeadlineError, QueueFullError, RequestError
from .memory.block_pool import PageLedger
from .policy import Policy, make_policy
from .request import RequestState, RequestStatus, Row, SchedulerOutput, Stage

# How many later rows may pass a row that does not fit yet. Passing keeps the device busy; the bound keeps the large
# row from starving.
MAX_BYPASSED = 16
# How many rows that do not fit are looked at before the search for one that does is given up.
MAX_LOOKED_AT = 64
# The same where the batch is chosen anew at every chunk, and a row that was passed is soon the first one.
MAX_PASSED = 16
# With model offload: how many waiting rows are encoded while the text encoder is on the device anyway.
MAX_ENCODED_AHEAD = 16
# What is late anyway goes last; still, one chunk in so many belongs to the oldest of it, however full we are.
AGEING_CHUNKS = 128
# A choice that nothing has happened to is made again after so many chunks.
MAX_SETTLED = 8
# Changes of the batch that are foreseen one by one; what comes later is added up.
MAX_FORESEEN = 64
# `steps_per_chunk="auto"`: deciding takes at most this part of the time, with chunks of at most so many steps.
MAX_OVERHEAD, MAX_AUTO_CHUNK = 0.01, 10
# Image tokens whose decoding steps are taken together: small pictures share a forward, large ones (1,024 tokens are
# 512 x 512 pixels before a decoder's own scale) would only make everybody else wait longer for their next step.
MAX_DECODE_TOKENS = 1024


@dataclass(slots=True)
class StepScheduler:
    """Holds the rows that wait, run and are decoded and decides what runs next. Not thread-safe: the engine locks.

    Args:
        config: Capacity in rows and tokens, queue limit, policy.
        policy: In which order rows are considered; by default what `config.scheduler_type` names.
        cost_model: Predicts durations.
        is_phased: True when only one big component fits the device (`enable_model_cpu_offload`): a step is then
            encoding only, denoising only or decoding only, and changes as seldom as `max_phase_s` allows.
        timer: Seconds; measures what a decision takes.

    Attributes:
        waiting: Sorted by the policy's key.
        late: Waits too, but can no longer be on time; the shortest in front.
        memory: Who has pages. A row gets all that it will ever need before it first runs, so that it never lacks one.
        num_preemptions: How often a row that ran went back to the queue.
    """

    config: ContinuousBatchingConfig
    policy: InitVar[Policy | None] = None
    cost_model: StepCostModel = field(default_factory=StepCostModel)
    is_phased: bool = False
    timer: Callable[[], float] = time.perf_counter
    waiting: list[Row] = field(default_factory=list)
    late: list[Row] = field(default_factory=list)
    running: list[Row] = field(default_factory=list)
    decoding: list[Row] = field(default_factory=list)
    memory: PageLedger = field(default_factory=PageLedger)
    is_holding: bool = False
    num_preemptions: int = 0
    _policy: Policy = field(init=False)
    _is_denoising_due: bool = False  # the policy would rather denoise than take a step of a long decoder
    _owes_denoising: bool = False  # such a step was the last
    _is_draining: bool = False
    _phase_since: float | None = None
    _chunk_left: int = 0
    _plan_left: int = 0
    _planned_for: tuple[object, ...] = ()
    _num_changes: int = 0
    _decision_ms: float = 0.0
    _costs_version: int = 0
    _guessed: set[RequestState] = field(default_factory=set)  # whose deadlines are only guesses so far
    _next_late_s: float = math.inf
    _ageing_due_s: float | None = None

    def __post_init__(self, policy: Policy | None) -> None:
        self._policy = policy or make_policy(self.config.scheduler_type, self.cost_model)

    # ------------------------------------------------------------------ requests in and out

    def add_request(self, state: RequestState) -> None:
        """Queue the rows of `state`, and set its deadline: `deadline_s` or `slo_scale` x its time alone after arrival.

        Raises:
            QueueFullError: when they would make more than `max_queue_size` rows wait; says for how long.
            RequestError: when they alone are more than that.
        """
        self._check_room(state)
        for row in state.rows:
            self._estimate(row)
        self._set_deadline(state)
        for leader in state.rows[:1] if state.is_gang else state.rows:
            self._enqueue(leader)

    def _check_room(self, state: RequestState) -> None:
        limit, num_rows = self.config.max_queue_size, len(state.rows)
        if limit and num_rows > limit:
            raise RequestError(f"a request of {num_rows} rows can never wait: max_queue_size={limit}")
        excess = self.num_waiting + num_rows - limit if limit else 0
        if excess > 0:
            now = state.metrics.arrival_s
            finishes = itertools.islice(self._forecast(now), excess - 1, None)
            room_s = next((finish_s for _, finish_s in finishes), now)
            raise QueueFullError(
                f"{num_rows} more rows do not fit: {self.num_waiting} rows wait and max_queue_size={limit}; "
                f"there will be room in about {room_s - now:.1f} s",
                retry_after_s=room_s - now,
            )

    def _set_deadline(self, state: RequestState) -> None:
        seconds = state.params.deadline_s
        if seconds is None:
            seconds = self.config.slo_scale * self.cost_model.standalone_ms(state) / 1e3
            is_known = all(map(self.cost_model.knows, state.rows))
            (self._guessed.discard if is_known else self._guessed.add)(state)
        state.metrics.deadline_s = state.metrics.arrival_s + seconds

    def _estimate(self, row: Row) -> None:
        """Work out what the row costs and what is left of it."""
        row.cost = self.cost_model.cost_of(row)
        row.remaining_ms = self.cost_model.remaining_ms(row)

    def _enqueue(self, leader: Row) -> None:
        self._num_changes += 1
        self._next_late_s = min(self._next_late_s, leader.latest_start_s)
        bisect.insort(self.waiting, leader, key=self._policy.key)

    def remove(self, state: RequestState) -> None:
        """Forget the rows of `state`, wherever they are."""
        for queue in (self.waiting, self.late, self.running, self.decoding):
            queue[:] = [row for row in queue if row.request is not state]
        for row in state.rows:
            self.memory.release(row)
        if state in self._guessed:
            self._set_deadline(state)
        if state in self._guessed:
            self._guessed.remove(state)
            state.metrics.deadline_s = math.inf  # nobody can say that it was late
        self._chunk_left = 0
        self._num_changes += 1

    def check_pages(self, state: RequestState) -> None:
        """Refuse what could never have all of its pages.

        Raises:
            RequestError: with the numbers.
        """
        sizes = [row.num_blocks for row in state.rows]
        needed, limit = sum(sizes) if state.is_gang else max(sizes), self.memory.device.num_blocks
        if needed > limit:
            what = f"{len(sizes)} pictures with a callback" if state.is_gang else "a picture"
            raise RequestError(
                f"{what} of {state.params.height} x {state.params.width} pixels can never run: it needs {needed} pages "
                f"and num_blocks={limit}"
            )

    def let_pass(self, state: RequestState) -> None:
        """Whoever has pages, or a change for which newcomers are held, waits for `state`: it must wait for neither."""
        state.passes_hold = True
        for row in state.rows:
            if not self.memory.has_pages(row):
                row.num_blocks = 0
        self._num_changes += 1

    def limit_tokens(self, num_tokens: int) -> None:
        """From now on at most so many tokens go into a batch."""
        if num_tokens != self.config.max_batch_tokens:
            self.config = dataclasses.replace(self.config, max_batch_tokens=num_tokens)
            self._num_changes += 1

    def forget_texts(self) -> None:
        """The text encoder may have changed: waiting prompts that were encoded ahead are encoded again."""
        for row in (row for leader in (*self.waiting, *self.late) for row in leader.gang):
            row.text = row.text if row.prompt is None else None
            row.negative_text = row.negative_text if row.negative_prompt is None else None
            row.stage = Stage.ENCODE

    def has_requests(self) -> bool:
        """True while any row waits, runs or is to be decoded."""
        return bool(self.waiting or self.late or self.running or self.decoding)

    def has_started(self) -> bool:
        """True while anything is under way: it runs, is decoded, or was paused in the middle."""
        return bool(self.running or self.decoding) or any(row.step for row in (*self.waiting, *self.late))

    @property
    def num_waiting(self) -> int:
        """Rows that wait for a place; a gang counts all of its rows."""
        return sum(len(row.gang) for row in (*self.waiting, *self.late))

    # ------------------------------------------------------------------ deciding

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step. Rows taken from `waiting` are in `running` afterwards.

        The requests in `hopeless` have left all queues, their error set; the caller ends them.
        """
        if self.cost_model.version != self._costs_version:
            self._follow_cost_model()
        hopeless = () if self._is_in_chunk or self._is_settled(now) else self._next_chunk(now)
        output = SchedulerOutput(
            encode=tuple(row for row in self.running if row.stage is Stage.ENCODE and not row.is_encoded),
            decode=self._next_decodes(),
            denoise=self._fitting(),
        )
        output = self._one_phase(output, now) if self.is_phased else self._one_turn(output)
        self._chunk_left -= 1
        moves = () if output.is_empty else self.memory.take_moves()
        return dataclasses.replace(output, hopeless=hopeless, moves=moves) if hopeless or moves else output

    @property
    def _is_in_chunk(self) -> bool:
        """True while it is settled who runs."""
        return self._chunk_left > 0 and not all(row.request.is_in_callback for row in self.running)

    def _is_settled(self, now: float) -> bool:
        """True while the last choice would be made again: nobody came or went, and steps take what was predicted.

        A choice among a thousand takes longer than all else between two steps. Since predictions are never quite
        right, it is made again after a while all the same.
        """
        can_wait = self._policy.is_preemptive and self.config.on_hopeless != "fail"
        can_wait = can_wait and bool(self.running) and not self.decoding
        can_wait = can_wait and (self._ageing_due_s is None or now < self._ageing_due_s)
        callbacks = tuple(row.request.is_in_callback for row in self.running)
        circumstances = self._num_changes, self.is_holding, self._costs_version, callbacks
        self._plan_left -= 1
        if can_wait and self._plan_left >= 0 and circumstances == self._planned_for:
            return True
        self._plan_left, self._planned_for = MAX_SETTLED - 1, circumstances
        return False

    def _next_chunk(self, now: float) -> tuple[RequestState, ...]:
        """Settle who runs in the next steps; hands back the requests that fail for want of time."""
        start = self.timer()
        hopeless = self._set_late_aside(now) if self._policy.keeps_deadlines else ()
        if self._policy.is_preemptive:
            self._choose(now)
        else:
            self._admit(now)
        took_ms = 1e3 * (self.timer() - start)
        self._decision_ms = 0.9 * self._decision_ms + 0.1 * took_ms if self._decision_ms else took_ms
        self._chunk_left = self._num_chunk_steps()
        return hopeless

    def _num_chunk_steps(self) -> int:
        steps = self.config.steps_per_chunk
        if isinstance(steps, int):
            return steps
        step_ms = self.cost_model.rows_ms("denoise", self.running)
        enough = self._decision_ms / MAX_OVERHEAD
        return next((n for n in range(1, MAX_AUTO_CHUNK) if n * step_ms >= enough), MAX_AUTO_CHUNK)

    def _one_turn(self, output: SchedulerOutput) -> SchedulerOutput:
        """Decode, or encode and denoise."""
        # Finished pictures go out before the others' next step, not after it; a decoder of many steps takes turns.
        is_long = any(_has_long_decode(row) for row in output.decode)
        is_due = self._is_denoising_due or self._owes_denoising
        if output.decode and not (is_long and is_due and (output.encode or output.denoise)):
            self._owes_denoising |= is_long
            return SchedulerOutput(decode=output.decode)
        self._owes_denoising = False
        return SchedulerOutput(encode=output.encode, denoise=output.denoise)

    # ------------------------------------------------------------------ the parts of a step

    def _next_decodes(self) -> tuple[Row, ...]:
        """Everything that one step finishes; else the first row's next step, shared with others of its size."""
        quick = [row for row in self.decoding if not _has_long_decode(row)]
        ready = [row for row in self.decoding if self._has_pages(row)]
        if quick or not ready:
            return tuple(quick)
        alike = [row for row in ready if _size(row) == _size(ready[0])]
        return tuple(alike[: max(1, MAX_DECODE_TOKENS // ready[0].num_image_tokens)])

    def _fitting(self) -> tuple[Row, ...]:
        """Running rows that take part now. A gang's place is free while its callback runs, and may be taken then."""
        rows: list[Row] = []
        num_tokens = 0
        for leader in self.running:
            gang = leader.gang
            if leader is not gang[0] or leader.request.is_in_callback or leader.stage is Stage.DECODE:
                continue
            if not all(map(self._has_pages, gang)):
                continue
            gang_tokens = sum(row.num_tokens for row in gang)
            fits_rows = len(rows) + len(gang) <= self.config.max_requests_per_batch
            if not rows or (fits_rows and num_tokens + gang_tokens <= self.config.max_batch_tokens):
                rows.extend(gang)
                num_tokens += gang_tokens
        return tuple(rows)

    def _admissible(self, queue: list[Row]) -> list[Row]:
        """Those of `queue` that may run now: while newcomers are held, what is under way or keeps pages from others."""
        if not self.is_holding:
            return queue
        return [row for row in queue if row.step or row.request.passes_hold or self.memory.is_on_device(row)]

    def _one_phase(self, output: SchedulerOutput, now: float) -> SchedulerOutput:
        """Keep one kind of work: denoise while there is a batch, but let nobody wait longer than `max_phase_s`."""
        denoise = tuple(row for row in output.denoise if row.is_encoded)
        if self._is_draining and output.decode:
            return SchedulerOutput(decode=output.decode)
        self._is_draining = False
        others_wait = bool(output.encode or output.decode)
        if not others_wait:
            self._phase_since = None
        elif denoise and self._phase_since is None:
            self._phase_since = now
        is_due = self._phase_since is not None and now - self._phase_since >= self.config.max_phase_s
        if denoise and not is_due:
            return SchedulerOutput(denoise=denoise)
        if not (output.encode and output.decode):  # else the other one has waited as long and is next
            self._phase_since = None
        # Pictures first: their callers have waited longest.
        if output.decode:
            self._is_draining = True  # every step of every picture that waits, since what they need is on the device
            return SchedulerOutput(decode=output.decode)
        ahead = [row for leader in self.waiting[:MAX_ENCODED_AHEAD] for row in leader.gang if not row.is_encoded]
        return SchedulerOutput(encode=(*output.encode, *ahead[:MAX_ENCODED_AHEAD]) if output.encode else ())

    # ------------------------------------------------------------------ first come, first served

    def _admit(self, now: float) -> None:
        """Move rows from `waiting` to `running` in policy order while rows and tokens fit."""
        running = [row for row in self.running if not row.request.is_in_callback]
        room = self._room()
        leaders = [row for row in running if row is row.gang[0]]
        leaders.sort(key=lambda row: not all(map(self._has_pages, row.gang)))
        have_room = [room.take(row.gang) for row in leaders]
        room.commit()
        if not all(have_room):
            return  # somebody was sent out in its callback: pages that become free are for it
        room_rows = self.config.max_requests_per_batch - len(running)
        waiting = self._admissible(self.waiting)
        if not waiting or room_rows <= 0 or len(self.decoding) >= self.config.max_requests_per_batch:
            return  # also where pictures come in faster than they are decoded
        room_tokens = self.config.max_batch_tokens - sum(row.num_tokens for row in running)
        passed: Row | None = None
        num_passed = 0
        admitted: set[Row] = set()
        for leader in self._policy.order(waiting, running, now):
            gang = leader.gang
            num_tokens = sum(row.num_tokens for row in gang)
            fits = len(gang) <= room_rows and num_tokens <= room_tokens
            fits |= not (running or admitted)  # what is larger than the budget runs alone
            if fits and room.take(gang):
                admitted.add(leader)
                self.running.extend(gang)
                room_rows -= len(gang)
                room_tokens -= num_tokens
                if passed is not None:
                    passed.num_bypassed += 1
            else:
                passed = passed or leader
                num_passed += 1
            is_due = passed is not None and passed.num_bypassed >= MAX_BYPASSED
            if room_rows <= 0 or room_tokens <= 0 or is_due or num_passed >= MAX_LOOKED_AT:
                break
        room.commit()
        if admitted:
            self.waiting[:] = [row for row in self.waiting if row not in admitted]

    # ------------------------------------------------------------------ choosing anew

    def _choose(self, now: float) -> None:
        """Choose the batch from all that is active; who ran and is not in it goes back to the queue as it stands."""
        movable, room = self._movable(), self._room()
        aged = self._take_aged(movable, now)
        order = self._in_order(self._admissible(self.waiting), self._admissible(self.late), movable, now, aged)
        first = next(order, None)
        if first is None:
            return
        if room.could_hold(first):
            order = _until_many_are_refused(room.could_hold, order)
        else:
            if first is aged:
                self._ageing_due_s = now  # its turn is not over
            order = filter(self._has_pages, order)  # nobody else takes pages before it can have its own
            first = next(order, None)
            if first is None:
                return
        self._is_denoising_due = first.stage is not Stage.DECODE
        if first.stage is Stage.DECODE:
            self.decoding.remove(first)
            self.decoding.insert(0, first)
        self._run(self._make_batch(itertools.chain((first,), order), now, room).leaders, movable, now)
        room.commit()

    def _movable(self) -> list[Row]:
        """Who runs and can be stopped: a gang has a step half done while its callback runs."""
        return [row for row in self.running if not row.request.is_in_callback and row is row.gang[0]]

    def _in_order(
        self, waiting: Sequence[Row], late: Sequence[Row], movable: Sequence[Row], now: float, aged: Row | None = None
    ) -> Iterator[Row]:
        """Everybody who may run next: `aged`, then, by priority, the policy's order and what is late."""
        running_late = [row for row in movable if self._is_late(row, now)]
        on_time = [row for row in movable if row not in running_late]
        decoding = [row for row in self.decoding if _has_long_decode(row)]
        order = iter(self._policy.order(waiting, [*on_time, *decoding], now))
        if late or running_late:
            by_length = heapq.merge(sorted(running_late, key=_by_length), late, key=_by_length)
            order = heapq.merge(order, by_length, key=_priority)
        return order if aged is None else itertools.chain((aged,), (row for row in order if row is not aged))

    def _make_batch(self, order: Iterable[Row], now: float, room: PageRoom | None = None) -> StepBatch:
        """Rows in order while there is room for them; pages are only looked at with `room`."""
        is_guarded = self._policy.keeps_deadlines and self.cost_model.is_informed  # a guess keeps nobody out
        batch = StepBatch(self.config, self.cost_model, is_guarded, now)
        num_passed = 0
        for leader in order:
            together = pages_together(leader)
            has_pages = room is None or room.could_take(together)
            is_in = has_pages and (leader.stage is Stage.DECODE or batch.take(leader))
            if is_in and room is not None:
                room.add(together)
            num_passed += not is_in
            if batch.is_full or num_passed >= MAX_PASSED:
                break
        return batch

    def _run(self, leaders: Mapping[Row, None], before: Sequence[Row], now: float) -> None:
        """Let `leaders` run with their gangs; those of `before` that are not among them wait again."""
        new = dict.fromkeys(row for row in leaders if row not in before)
        stay = [row for row in self.running if row.request.is_in_callback or row.gang[0] in leaders]
        self.running[:] = [*stay, *(row for leader in new for row in leader.gang)]
        num_found = 0
        for queue in (self.waiting, self.late):
            found = itertools.islice((i for i, row in enumerate(queue) if row in new), len(new) - num_found)
            places = list(found)
            num_found += len(places)
            for place in reversed(places):
                del queue[place]
        for row in before:
            if row not in leaders:
                self._pause(row, now)

    def _pause(self, leader: Row, now: float) -> None:
        self.num_preemptions += 1
        for row in leader.gang:
            row.step_cache.clear()  # or all that wait would keep as much as all that run
        if self._is_late(leader, now):
            bisect.insort(self.late, leader, key=_by_length)
        else:
            self._enqueue(leader)

    # ------------------------------------------------------------------ memory

    def _room(self) -> PageRoom:
        return PageRoom(self.memory, self._leavers)

    def _has_pages(self, row: Row) -> bool:
        return not row.num_blocks or self.memory.is_on_device(row)

    def _leavers(self) -> list[Row]:
        """Who may go to host memory: most slack first, callbacks last. What only waits for its picture may not.

        Without preemption nobody makes way, unless all pages belong to calls whose callbacks run: these may be waiting
        for somebody else's picture.
        """
        owners = [row for row in self.memory.device.owners if row.stage is not Stage.DECODE or _has_long_decode(row)]
        if not self._policy.is_preemptive and not all(row.request.is_in_callback for row in owners):
            return []
        return sorted(owners, key=lambda row: (row.request.is_in_callback, -row.latest_start_s))

    # ------------------------------------------------------------------ what is late

    def _is_late(self, row: Row, now: float) -> bool:
        """True when the row would miss its deadline even alone, and the policy minds."""
        return self._policy.keeps_deadlines and row.latest_start_s < now

    def _set_late_aside(self, now: float) -> tuple[RequestState, ...]:
        """Move what is late to `late`, or, with `on_hopeless="fail"`, hand back its requests, removed."""
        if self.config.on_hopeless == "fail":
            return self._give_up(now)
        if self._next_late_s < now:
            starts = [(row.latest_start_s, row) for row in self.waiting]
            self.waiting[:] = [row for start_s, row in starts if start_s >= now]
            self._next_late_s = min((start_s for start_s, _ in starts if start_s >= now), default=math.inf)
            self.late.extend(row for start_s, row in starts if start_s < now)
            self.late.sort(key=_by_length)
        return ()

    def _give_up(self, now: float) -> tuple[RequestState, ...]:
        decoding = (row for row in self.decoding if _has_long_decode(row))
        active = (*self.waiting, *self.late, *self._movable(), *decoding)
        late = [row for row in active if self._is_late(row, now) and self.cost_model.knows(row)]
        hopeless = tuple(dict.fromkeys(row.request for row in late))
        for state in hopeless:
            arrival_s, left_s = state.metrics.arrival_s, max(row.remaining_ms for row in state.rows) / 1e3
            state.error = DeadlineError(
                f"request {state.request_id!r} would be done {now + left_s - arrival_s:.1f} s after its arrival at the "
                f"earliest; its deadline is {state.deadline_s - arrival_s:.1f} s"
            )
            self.remove(state)
        return hopeless

    def _take_aged(self, movable: Sequence[Row], now: float) -> Row | None:
        """The oldest of what is late, when its turn has come."""
        started = [*movable, *(row for row in self.decoding if _has_long_decode(row))]
        late = [row for row in started if self._is_late(row, now)]
        if not late and not self.late:
            self._ageing_due_s = None
            return None
        if self._ageing_due_s is not None and now < self._ageing_due_s:
            return None
        oldest = min((*self._admissible(self.late), *late), key=_arrival, default=None)
        is_due = self._ageing_due_s is not None
        if oldest is not None:
            self._ageing_due_s = now + AGEING_CHUNKS * self._num_chunk_steps() * known_cost(oldest).step_ms / 1e3
        return oldest if is_due else None

    def _follow_cost_model(self) -> None:
        """Predictions have changed: so have the order of the queue and, where they were guesses, deadlines."""
        self._costs_version = self.cost_model.version
        leaders = (*self.waiting, *self.late, *self.running, *self.decoding)
        for row in (row for leader in leaders for row in leader.gang):
            row.remaining_ms = self.cost_model.remaining_ms(row)
        for state in tuple(self._guessed):
            self._set_deadline(state)
        self.waiting[:] = sorted((*self.waiting, *self.late), key=self._policy.key)
        self.late.clear()
        self._next_late_s = -math.inf

    # ------------------------------------------------------------------ looking ahead

    def position(self, state: RequestState, now: float) -> int:
        """How many requests get a place before `state`, itself counted; 0 when it has one. Nobody is held back."""
        if any(row.request is state for row in (*self.running, *self.decoding)):
            return 0
        is_preemptive = self._policy.is_preemptive
        order = self._in_order(self.waiting, self.late, (), now) if is_preemptive else self.waiting
        requests = dict.fromkeys(row.request for row in order if row.stage is not Stage.DECODE)
        return 1 + sum(1 for _ in itertools.takewhile(lambda other: other is not state, requests))

    def eta(self, state: RequestState, now: float) -> float:
        """When `state` will have ended if nobody else comes and nobody is held back, on the engine's clock."""
        return self.ends(now).get(state.request_id, now)

    def ends(self, now: float) -> dict[str, float]:
        """`eta` of every request, by its id."""
        found: dict[str, float] = {}
        for row, finish_s in self._forecast(now):
            request_id = row.request.request_id
            found[request_id] = max(finish_s, found.get(request_id, now))
        return found

    def backlog_s(self, now: float) -> float:
        """Seconds until everything that is here will have ended, if nobody else comes."""
        return max((finish_s for _, finish_s in self._forecast(now)), default=now) - now

    def _forecast(self, now: float) -> Iterator[tuple[Row, float]]:
        """Every active row (of a gang one) with its predicted finish, soonest first."""
        for row in self.decoding:
            now += row.remaining_ms / 1e3
            yield row, now
        called = [row for row in self.running if row.request.is_in_callback]  # which may be back at any moment
        order: Iterable[Row] = (*self.running, *self.waiting)
        if self._policy.is_preemptive:
            order = self._in_order(self.waiting, self.late, self._movable(), now)
        rows = dict.fromkeys((*called, *order))
        queue = [row for row in rows if row.stage is not Stage.DECODE and row is row.gang[0]]
        steps_left = {row: row.num_steps - row.step for row in queue}
        pace = 1.0
        for _ in range(MAX_FORESEEN):
            if not queue:
                break
            batch = self._make_batch(queue, -math.inf)
            pace = batch.step_ms / sum(known_cost(row).step_ms for leader in batch.leaders for row in leader.gang)
            num_steps = min(steps_left[row] for row in batch.leaders)
            now += num_steps * batch.step_ms / 1e3
            for row in batch.leaders:
                steps_left[row] -= num_steps
                if steps_left[row] <= 0:
                    now += _decode_ms(row) / 1e3
                    yield row, now
            queue = [row for row in queue if steps_left[row] > 0]
        for row in queue:
            step_ms = sum(known_cost(each).step_ms for each in row.gang)
            now += (pace * steps_left[row] * step_ms + _decode_ms(row)) / 1e3
            yield row, now

    # ------------------------------------------------------------------ after a step

    def update_from_output(self, output: SchedulerOutput, errors: Mapping[Row, BaseException]) -> list[RequestState]:
        """Move every row of `output` on and hand back the requests that ended, their status and error set.

        A request with a failed row fails as a whole; the rows of other requests are untouched.
        """
        live = [row for row in output.rows if not row.request.status.is_ending]
        for row in live:
            if row in errors and not row.request.status.is_ending:
                row.request.status, row.request.error = RequestStatus.FAILED, errors[row]
        for row in live:
            if not row.request.status.is_ending:
                self._move_on(row)
                row.remaining_ms = self.cost_model.remaining_ms(row)
        ended = [state for state in dict.fromkeys(row.request for row in live) if self.settle(state)]
        for state in ended:
            if state.status is RequestStatus.FAILED:
                self.remove(state)
        return ended

    def _move_on(self, row: Row) -> None:
        if row.stage is Stage.ENCODE and row.is_encoded:
            row.stage = Stage.DENOISE
            row.cost = self.cost_model.cost_of(row)  # how long its text is, is known now
        if row.stage is Stage.DENOISE and row.remaining_steps == 0 and not row.request.is_in_callback:
            self.finish_denoising(row)
        elif row.stage is Stage.DECODE and row.image is not None:
            row.stage = Stage.DONE
            self.decoding.remove(row)
            self.memory.release(row)
            self._num_changes += 1

    def finish_denoising(self, row: Row) -> None:
        """Free the row's place in the batch; it is decoded next, or done when only its latents were asked for."""
        if row in self.running:
            self.running.remove(row)
            self._chunk_left = 0
            self._num_changes += 1
        row.step_cache.clear()
        if row.request.params.output_type == "latent":
            row.stage = Stage.DONE
            self.memory.release(row)
        else:
            row.stage = Stage.DECODE
            self.decoding.append(row)

    def settle(self, state: RequestState) -> bool:
        """Set the request's status from its rows; True when it has ended."""
        if not state.status.is_ending:
            state.status = RequestStatus.FINISHED if state.is_done else RequestStatus.RUNNING
        return state.status.is_ending


def _until_many_are_refused(is_fine: Callable[[Row], bool], order: Iterable[Row]) -> Iterator[Row]:
    """Those of `order` that are fine, until so many were not that looking further would take too long."""
    num_refused = 0
    for row in order:
        if is_fine(row):
            yield row
        else:
            num_refused += 1
            if num_refused >= MAX_LOOKED_AT:
                return


def _has_long_decode(row: Row) -> bool:
    """True for a decoder of steps that take as long as a denoising step or longer."""
    return row.request.params.decoder == "pid"


def _decode_ms(leader: Row) -> float:
    """What the pictures of the row and its gang take, one after the other."""
    return sum(row.num_decode_steps * known_cost(row).decode_ms for row in leader.gang)


def _size(row: Row) -> tuple[int, int]:
    return row.request.params.height, row.request.params.width


def _priority(row: Row) -> int:
    return row.request.params.priority


def _by_length(row: Row) -> tuple[int, float]:
    return row.request.params.priority, row.remaining_ms


def _arrival(row: Row) -> float:
    return row.request.metrics.arrival_s
