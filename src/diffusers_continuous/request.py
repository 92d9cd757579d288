"""The nouns of a request: what was asked, where each of its rows stands, what comes back.

Knows no device and no scheduling rule. Tensors are named here but never touched, so that importing the scheduler
imports no torch.
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from .cost_model import RowCost
    from .futures import RequestFuture
    from .memory.block_pool import Move
    from .memory.host_swap import PagedTensors

# Tokens that follow every prompt in the chat template, plus a few for normalisation: a byte-level tokenizer never
# makes more tokens than bytes, so `len(bytes) + this` bounds a prompt that is not encoded yet.
TEMPLATE_SUFFIX_TOKENS = 8

_row_ids = itertools.count()

T = TypeVar("T")


class RequestStatus(enum.StrEnum):
    """Where a request stands. The last three are endings; every accepted request reaches exactly one of them."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_ending(self) -> bool:
        """True for finished, cancelled and failed."""
        return self in (RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED)


class Stage(enum.Enum):
    """What a row needs next."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one call asked for, in plain numbers. Sizes are pixels of the diffusion, already multiples of 16."""

    height: int
    width: int
    num_inference_steps: int
    true_cfg_scale: float
    do_true_cfg: bool
    max_sequence_length: int = 512
    output_type: str = "pil"
    decoder: str = "vae"
    early_stop_steps: int = 0
    lora_scale: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    callback_tensor_inputs: tuple[str, ...] = ("latents",)


@dataclass(frozen=True, slots=True, eq=False)
class TextEmbeds:
    """The valid text tokens of one prompt.

    Attributes:
        embeds: (tokens, joint_attention_dim), only the tokens that the mask keeps.
        positions: Their places in the padded prompt, when these are not simply 0, 1, 2, ...; rotary needs them.
        width: Tokens of the padded prompt that the embeddings were cut from.
    """

    embeds: torch.Tensor
    width: int
    positions: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of valid tokens."""
        return int(self.embeds.shape[0])


class Paged:
    """An attribute that lies in its owner's `pages` once it has some; until then it is an attribute like any other."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        """The tensor; a copy of what lies in the pages."""
        if owner is None:
            return self
        pages = owner.pages  # asked once: another thread may be taking them away
        return vars(owner)[self._name] if pages is None else pages.get(self._name)

    def __set__(self, owner: Any, value: Any) -> None:
        """Keep it, in the pages if there are any."""
        pages = owner.pages
        if pages is None:
            vars(owner)[self._name] = value
        else:
            pages.put(self._name, value)


def in_pages(name: str) -> Callable[[type[T]], type[T]]:
    """Make the attribute of that name a `Paged` one. The class has an attribute `pages`."""

    def add(cls: type[T]) -> type[T]:
        """The same class, changed."""
        setattr(cls, name, Paged(name))
        return cls

    return add


@in_pages("latents")
@dataclass(eq=False, repr=False)
class Row:
    """One picture on its way: its latents, its own noise scheduler, its text, its place in the schedule.

    `latents` is (image tokens, channels); `image` is (3, height, width) in -1..1 once decoded. `num_steps` are the
    denoising steps to be done, which are fewer than the noise scheduler's when the request stops early.
    `decode_state` is what a decoder of several steps keeps between them; `step_cache` what a branch (negative or not)
    keeps of its last full step, which may be thrown away at any time. The scheduler keeps `cost` and `remaining_ms`,
    the predicted time until the row's picture if it were alone.

    Latents, texts and a decoder's sample lie in `pages` from the row's first step to its end; it never needs more than
    `num_blocks` of them, 0 for a row that is to have none.
    """

    request: RequestState
    index: int
    num_image_tokens: int
    latents: torch.Tensor
    noise_scheduler: Any
    num_steps: int
    prompt: str | None = None
    negative_prompt: str | None = None
    text: TextEmbeds | None = None
    negative_text: TextEmbeds | None = None
    seed: int | None = None
    generator: torch.Generator | None = None
    decode_seed: int | None = None
    num_decode_steps: int = 1
    stage: Stage = Stage.ENCODE
    step: int = 0
    decode_step: int = 0
    num_bypassed: int = 0
    cost: RowCost | None = None
    remaining_ms: float = 0.0
    num_blocks: int = 0
    pages: PagedTensors | None = None
    noise_pred: torch.Tensor | None = None
    step_cache: dict[bool, Any] = field(default_factory=dict)
    decode_state: Any = None
    image: torch.Tensor | None = None
    row_id: int = field(default_factory=lambda: next(_row_ids))

    def __repr__(self) -> str:
        """Its name: its tensors are long, and may be in nobody's pages any more."""
        return f"<row {self.index} of request {self.request.request_id!r}>"

    def let_go(self) -> None:
        """Forget everything that only a row under way needs."""
        self.text = self.negative_text = self.noise_pred = self.decode_state = self.image = None
        self.step_cache.clear()

    @property
    def has_caches(self) -> bool:
        """True when there is anything that `drop_caches` would throw away."""
        has_heads = self.decode_state is not None and self.decode_state.has_heads
        return has_heads or any(cache.first is not None for cache in self.step_cache.values())

    def drop_caches(self) -> None:
        """Forget what can be made again wherever it is used."""
        self.step_cache.clear()
        if self.decode_state is not None:
            self.decode_state.drop_heads()

    def drop_texts(self) -> None:
        """Denoising is over: give their pages to the decoder."""
        self.text = self.negative_text = None
        if self.pages is not None:
            self.pages.drop("text", "negative_text")

    @property
    def gang(self) -> tuple[Row, ...]:
        """The rows that advance together with this one, itself among them."""
        return self.request.rows if self.request.is_gang else (self,)

    @property
    def latest_start_s(self) -> float:
        """The last moment at which the row, alone from then on, would still be on time."""
        return self.request.metrics.deadline_s - self.remaining_ms / 1e3

    @property
    def remaining_steps(self) -> int:
        """Denoising steps that are left."""
        return self.num_steps - self.step

    @property
    def num_branches(self) -> int:
        """2 with guidance, else 1."""
        return 2 if self.request.params.do_true_cfg else 1

    @property
    def is_encoded(self) -> bool:
        """True when the texts of all branches are there."""
        return self.text is not None and (self.num_branches == 1 or self.negative_text is not None)

    @property
    def num_text_tokens(self) -> int:
        """Text tokens of all branches; an upper bound while a prompt is not encoded yet."""
        return sum(self.text_tokens)

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """`num_text_tokens` of each branch."""
        limits = self._text_limits
        tokens = limits[0] if self.text is None else self.text.num_tokens
        if self.num_branches == 1:
            return (tokens,)
        return tokens, limits[1] if self.negative_text is None else self.negative_text.num_tokens

    @cached_property
    def _text_limits(self) -> tuple[int, int]:
        """The most tokens that the prompts can have; worked out once, since the scheduler asks at every step."""
        limit = self.request.params.max_sequence_length
        return _most_tokens(self.prompt, limit), _most_tokens(self.negative_prompt, limit)

    @property
    def num_tokens(self) -> int:
        """Tokens that this row adds to a forward: image and text of all branches."""
        return self.num_image_tokens * self.num_branches + self.num_text_tokens


def _most_tokens(prompt: str | None, max_sequence_length: int) -> int:
    words = prompt or ""
    if not words.isascii():
        words = unicodedata.normalize("NFC", words)  # as the tokenizer does; some characters get longer
    return min(len(words.encode()) + TEMPLATE_SUFFIX_TOKENS, max_sequence_length)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request on the engine's clock, in seconds. `deadline_s` is when its pictures should be there.

    It is infinite in the end where nobody named one, and how long such a request takes is not known yet.
    `num_prompt_tokens` are those of the prompt of the row that ran first; None until then.
    """

    arrival_s: float
    deadline_s: float = math.inf
    first_step_s: float | None = None
    first_step_end_s: float | None = None
    finish_s: float | None = None
    num_prompt_tokens: int | None = None

    @property
    def queue_wait_s(self) -> float | None:
        """From arrival to the start of the first denoising step."""
        return None if self.first_step_s is None else self.first_step_s - self.arrival_s

    @property
    def first_step_latency_s(self) -> float | None:
        """From arrival to the end of the first denoising step."""
        return None if self.first_step_end_s is None else self.first_step_end_s - self.arrival_s

    @property
    def is_on_time(self) -> bool | None:
        """True when it ended by its deadline; None until it has ended."""
        return None if self.finish_s is None else self.finish_s <= self.deadline_s

    @property
    def latency_s(self) -> float | None:
        """From arrival to the ending."""
        return None if self.finish_s is None else self.finish_s - self.arrival_s


class GangCallback(Protocol):
    """A caller's `callback_on_step_end` over the stacked rows of its request."""

    def run(self, state: RequestState) -> dict[str, Any]:
        """Call it, in the caller's thread; hand back what it returned."""
        ...

    def apply(self, state: RequestState, result: dict[str, Any]) -> bool:
        """Put returned tensors into the rows; True when the callback asked to finish now."""
        ...


@dataclass(slots=True, eq=False)
class RequestState:
    """One call: its rows in stock order, its future, its standing. Belongs to the engine once submitted."""

    request_id: str
    params: SamplingParams
    future: RequestFuture
    streaming: bool = False
    rows: tuple[Row, ...] = ()
    callback: GangCallback | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_s=0.0))
    status: RequestStatus = RequestStatus.WAITING
    error: BaseException | None = None
    is_in_callback: bool = False
    caller_thread: threading.Thread | None = None
    passes_hold: bool = False

    @property
    def is_gang(self) -> bool:
        """True when the rows must advance together, because a callback sees them stacked."""
        return self.callback is not None

    @property
    def deadline_s(self) -> float:
        """When its pictures should be there, on the engine's clock."""
        return self.metrics.deadline_s

    @property
    def step(self) -> int:
        """Steps that every row has done."""
        return min(row.step for row in self.rows)

    @property
    def num_steps(self) -> int:
        """Denoising steps to be done."""
        return self.rows[0].num_steps

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each row; None where the caller gave a generator or the latents."""
        return [row.seed for row in self.rows]

    @property
    def decode_seeds(self) -> list[int | None]:
        """The decode seed of each row; None for a decoder that draws no noise."""
        return [row.decode_seed for row in self.rows]

    @property
    def final_sigmas(self) -> list[float] | None:
        """Noise level that each row's own schedule leaves in its latents now, 0 after its end; None if unknown."""
        if not all(hasattr(row.noise_scheduler, "sigmas") for row in self.rows):
            return None
        return [float(row.noise_scheduler.sigmas[row.step]) for row in self.rows]

    @property
    def is_done(self) -> bool:
        """True when every row has its picture."""
        return all(row.stage is Stage.DONE for row in self.rows)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The scheduler's decision: the rows of the next step, by what they need. A newcomer is encoded, then denoised.

    `hopeless` are requests that end now, since they can no longer be on time; no rows of theirs are in the step.
    `moves` of pages are to be carried out first.
    """

    encode: tuple[Row, ...] = ()
    decode: tuple[Row, ...] = ()
    denoise: tuple[Row, ...] = ()
    hopeless: tuple[RequestState, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to do."""
        return not (self.encode or self.decode or self.denoise)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every row of the step, each once."""
        return tuple(dict.fromkeys((*self.encode, *self.decode, *self.denoise)))


@dataclass(frozen=True, slots=True, eq=False)
class CallbackCall:
    """One due `callback_on_step_end`: to be run in the caller's thread, its answer given to `reply`."""

    run: Callable[[], dict[str, Any]]
    reply: Callable[[dict[str, Any] | None, BaseException | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutput:
    """What a caller sees of its request, in the middle or at the end.

    Attributes:
        step: Steps that every row has done, of `num_steps`.
        images: All pictures of the call in stock order, in the asked `output_type`; None until finished.
        latents: (rows, image tokens, channels) as they stood at the end; None until finished.
        seeds: Each row's seed; None for a row whose noise came from the caller.
        decode_seeds: Each row's seed of the decoder's own noise; None where the decoder draws none.
        final_sigmas: Noise level of each row's `latents`, 0 unless stopped early; None until finished, and for a noise
            scheduler that does not tell.
        error: Why the request has no pictures, when it has none.
        finished: True for the last output of a request, whatever its status.
    """

    request_id: str
    status: RequestStatus
    step: int
    num_steps: int
    seeds: list[int | None]
    metrics: RequestMetrics
    images: Any = None
    latents: torch.Tensor | None = None
    decode_seeds: list[int | None] = field(default_factory=list)
    final_sigmas: list[float] | None = None
    error: BaseException | None = None
    make_preview: Callable[[], list[Image.Image]] | None = field(default=None, repr=False)

    @property
    def finished(self) -> bool:
        """True for the last output of a request."""
        return self.status.is_ending

    @property
    def preview(self) -> list[Image.Image] | None:
        """One small picture per row of what the model expects so far; worked out when asked for, undecoded."""
        return None if self.make_preview is None else self.make_preview()
