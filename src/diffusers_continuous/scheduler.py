"""Which rows run in the next step. Talks of ids, stages, steps, tokens and seconds; never imports torch.

A row goes ENCODE -> DENOISE -> DECODE -> DONE. It holds a place in the batch from its encoding until its last
denoising step; decoding needs no place, so the next row moves up at once. Decoders of several steps take turns with
the denoising, one step of theirs for one step of everybody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .config import ContinuousBatchingConfig
from .errors import QueueFullError, RequestError
from .policy import POLICIES, Policy
from .request import RequestState, RequestStatus, Row, SchedulerOutput, Stage

# How many later rows may pass a row that does not fit yet. Passing keeps the device busy; the bound keeps the large
# row from starving.
MAX_BYPASSED = 16
# How many rows that do not fit are looked at before the search for one that does is given up.
MAX_LOOKED_AT = 64
# With model offload: how many waiting rows are encoded while the text encoder is on the device anyway.
MAX_ENCODED_AHEAD = 16
# Image tokens whose decoding steps are taken together: small pictures share a forward, large ones (1,024 tokens are
# 512 x 512 pixels before a decoder's own scale) would only make everybody else wait longer for their next step.
MAX_DECODE_TOKENS = 1024


@dataclass(slots=True)
class StepScheduler:
    """Holds `waiting`, `running` and `decoding` rows and decides what runs next. Not thread-safe: the engine locks.

    Args:
        config: Capacity in rows and tokens, queue limit.
        policy: In which order waiting rows are considered; by default what `config.scheduler_type` names.
        is_phased: True when only one big component fits the device (`enable_model_cpu_offload`): a step is then
            encoding only, denoising only or decoding only, and changes as seldom as `max_phase_s` allows.
    """

    config: ContinuousBatchingConfig
    policy: Policy | None = None
    is_phased: bool = False
    waiting: list[Row] = field(default_factory=list)
    running: list[Row] = field(default_factory=list)
    decoding: list[Row] = field(default_factory=list)
    is_holding: bool = False
    _is_denoising_due: bool = False
    _phase_since: float | None = None

    def __post_init__(self) -> None:
        if self.policy is None:
            self.policy = POLICIES[self.config.scheduler_type]()

    # ------------------------------------------------------------------ requests in and out

    def add_request(self, state: RequestState) -> None:
        """Queue the rows of `state`.

        Raises:
            QueueFullError: when they would make more than `max_queue_size` rows wait.
            RequestError: when they alone are more than that.
        """
        limit = self.config.max_queue_size
        if limit and len(state.rows) > limit:
            raise RequestError(f"a request of {len(state.rows)} rows can never wait: max_queue_size={limit}")
        if limit and self.num_waiting + len(state.rows) > limit:
            raise QueueFullError(
                f"{len(state.rows)} more rows do not fit: {self.num_waiting} rows wait and max_queue_size={limit}"
            )
        self.waiting.extend(state.rows[:1] if state.is_gang else state.rows)

    def remove(self, state: RequestState) -> None:
        """Forget the rows of `state`, wherever they are, and what they keep from step to step."""
        for queue in (self.waiting, self.running, self.decoding):
            queue[:] = [row for row in queue if row.request is not state]
        for row in state.rows:
            row.step_cache.clear()
            row.decode_state = None

    def forget_texts(self) -> None:
        """The text encoder may have changed: waiting prompts that were encoded ahead are encoded again."""
        for row in (row for leader in self.waiting for row in _gang(leader)):
            row.text = row.text if row.prompt is None else None
            row.negative_text = row.negative_text if row.negative_prompt is None else None
            row.stage = Stage.ENCODE

    def has_requests(self) -> bool:
        """True while any row waits, runs or is to be decoded."""
        return bool(self.waiting or self.running or self.decoding)

    @property
    def num_waiting(self) -> int:
        """Rows that wait for a place; a gang counts all of its rows."""
        return sum(len(_gang(row)) for row in self.waiting)

    # ------------------------------------------------------------------ deciding

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step. Rows taken from `waiting` are in `running` afterwards."""
        self._admit(now)
        output = SchedulerOutput(
            encode=tuple(row for row in self.running if row.stage is Stage.ENCODE and not row.is_encoded),
            decode=self._next_decodes(),
            denoise=self._fitting(),
        )
        if self.is_phased:
            return self._one_phase(output, now)
        # Finished pictures go out before the others' next step, not after it; a decoder of many steps takes turns.
        is_long = any(row.num_decode_steps > 1 for row in output.decode)
        if output.decode and not (is_long and self._is_denoising_due and (output.encode or output.denoise)):
            self._is_denoising_due = is_long
            return SchedulerOutput(decode=output.decode)
        self._is_denoising_due = False
        return SchedulerOutput(encode=output.encode, denoise=output.denoise)

    def _next_decodes(self) -> tuple[Row, ...]:
        """Everything that one step finishes; else the first row's next step, shared with others of its size."""
        quick = [row for row in self.decoding if row.num_decode_steps == 1]
        if quick or not self.decoding:
            return tuple(quick)
        first = self.decoding[0]
        alike = [row for row in self.decoding if _size(row) == _size(first)]
        return tuple(alike[: max(1, MAX_DECODE_TOKENS // first.num_image_tokens)])

    def _admit(self, now: float) -> None:
        """Move rows from `waiting` to `running` in policy order while rows and tokens fit."""
        running = [row for row in self.running if not row.request.is_in_callback]
        room_rows = self.config.max_requests_per_batch - len(running)
        waiting = [row for row in self.waiting if row.request.passes_hold] if self.is_holding else self.waiting
        if not waiting or room_rows <= 0:
            return
        room_tokens = self.config.max_batch_tokens - sum(row.num_tokens for row in running)
        assert self.policy is not None
        passed: Row | None = None
        num_passed = 0
        admitted: set[Row] = set()
        for leader in self.policy.order(waiting, running, now):
            gang = _gang(leader)
            num_tokens = sum(row.num_tokens for row in gang)
            fits = len(gang) <= room_rows and num_tokens <= room_tokens
            if fits or not (running or admitted):  # what is larger than the budget runs alone
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
        if admitted:
            self.waiting[:] = [row for row in self.waiting if row not in admitted]

    def _fitting(self) -> tuple[Row, ...]:
        """Running rows that take part now. A gang's place is free while its callback runs, and may be taken then."""
        rows: list[Row] = []
        num_tokens = 0
        for leader in self.running:
            gang = _gang(leader)
            if leader is not gang[0] or leader.request.is_in_callback or leader.stage is Stage.DECODE:
                continue
            gang_tokens = sum(row.num_tokens for row in gang)
            fits_rows = len(rows) + len(gang) <= self.config.max_requests_per_batch
            if not rows or (fits_rows and num_tokens + gang_tokens <= self.config.max_batch_tokens):
                rows.extend(gang)
                num_tokens += gang_tokens
        return tuple(rows)

    def _one_phase(self, output: SchedulerOutput, now: float) -> SchedulerOutput:
        """Keep one kind of work: denoise while there is a batch, but let nobody wait longer than `max_phase_s`."""
        denoise = tuple(row for row in output.denoise if row.is_encoded)
        if any(row.decode_step for row in output.decode):
            return SchedulerOutput(decode=output.decode)  # what it needs is on the device
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
            return SchedulerOutput(decode=output.decode)
        ahead = [row for leader in self.waiting[:MAX_ENCODED_AHEAD] for row in _gang(leader) if not row.is_encoded]
        return SchedulerOutput(encode=(*output.encode, *ahead[:MAX_ENCODED_AHEAD]) if output.encode else ())

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
        ended = [state for state in dict.fromkeys(row.request for row in live) if self.settle(state)]
        for state in ended:
            if state.status is RequestStatus.FAILED:
                self.remove(state)
        return ended

    def _move_on(self, row: Row) -> None:
        if row.stage is Stage.ENCODE and row.is_encoded:
            row.stage = Stage.DENOISE
        if row.stage is Stage.DENOISE and row.remaining_steps == 0 and not row.request.is_in_callback:
            self.finish_denoising(row)
        elif row.stage is Stage.DECODE and row.image is not None:
            row.stage = Stage.DONE
            self.decoding.remove(row)

    def finish_denoising(self, row: Row) -> None:
        """Free the row's place in the batch; it is decoded next, or done when only its latents were asked for."""
        if row in self.running:
            self.running.remove(row)
        row.step_cache.clear()
        if row.request.params.output_type == "latent":
            row.stage = Stage.DONE
        else:
            row.stage = Stage.DECODE
            self.decoding.append(row)

    def settle(self, state: RequestState) -> bool:
        """Set the request's status from its rows; True when it has ended."""
        if not state.status.is_ending:
            state.status = RequestStatus.FINISHED if state.is_done else RequestStatus.RUNNING
        return state.status.is_ending


def _size(row: Row) -> tuple[int, int]:
    return row.request.params.height, row.request.params.width


def _gang(leader: Row) -> tuple[Row, ...]:
    """The rows that must be admitted together with `leader`."""
    return leader.request.rows if leader.request.is_gang else (leader,)
