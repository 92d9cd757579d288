"""The verbs that the runner asks of a model, and how tokens lie in a batch. Nouns only.

A batch keeps the image tokens of all branches in one sequence and their text tokens in another; `layouts` draws the
three ways. The packed one, without padding:

    image   | row 0 ........ | row 1 ........ | row 2 .. |      row = one branch of one request,
    text    | row 0 .. | row 1 .... | row 2 .. |                 sorted so that equal lengths are neighbours
    joint   | text 0, image 0 | text 1, image 1 | text 2, image 2 |      what attention sees
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ..batch import InputBatch
    from ..request import RequestState, Row


# A float32 product of fewer rows than this may add up in another order than a larger one (on a CPU: 1 to 3 rows, and
# where threads share them the last few of up to 11). What the stock pipeline computes in one small product is computed
# in the same one here, and in the same place, so that not even the last bit of a picture depends on its neighbours.
SMALL_PRODUCT = 12


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Neighbouring rows of one length: tokens `start:stop` viewed as (num_rows, length, ...)."""

    start: int
    stop: int
    first_row: int
    num_rows: int
    length: int

    @property
    def rows(self) -> slice:
        """Which rows of the stream these are."""
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True, slots=True, eq=False)
class SmallProduct:
    """Lines `start:stop`, which in the stock pipeline's product of `num_lines` lines begin at line `first`.

    That has more than `stop - start` where other pictures of the same call are not in this batch. See `SMALL_PRODUCT`.
    """

    start: int
    stop: int
    first: int
    num_lines: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """How the rows of one stream share its token axis.

    Attributes:
        runs: The stream cut into runs of equal-length rows.
        modulation_index: (rows,) which row of the modulation table belongs to each row.
        token_modulation_index: (tokens,) the same per token, for streams of small runs.
        small_products: The tokens of pipeline calls that have only a few in this stream.
    """

    runs: tuple[Run, ...]
    modulation_index: torch.Tensor
    token_modulation_index: torch.Tensor
    small_products: tuple[SmallProduct, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class JointRows:
    """Which tokens of the joint order may see each other: all that an attention backend has to know of a batch.

    Attributes:
        runs: Runs of equal-length rows.
        lengths: Tokens of every row, on the host.
        cu_seqlens: (rows + 1,) int32 on the device, where every row starts and the last one ends.
        valid: (tokens,) bool, False at padding; None when nothing is padded. Nobody may see padding, and what a
            backend returns for it is finite and of no consequence. Only a layout of a single run has any.
        kept: What a backend works out once for this batch; ends with it.
    """

    runs: tuple[Run, ...]
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    valid: torch.Tensor | None = None
    kept: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """Everything about a batch that does not change from step to step.

    Attributes:
        name: One of `config.BATCH_LAYOUTS`, but not "auto".
        image, text: The two streams.
        joint: The rows in the joint order; attention stays inside a row.
        joint_index: (tokens,) joint order as indices into [all text tokens, all image tokens].
        text_index, image_index: Where the text and image tokens lie in the joint order.
        rotary: (tokens, head_dim / 2) complex64 in joint order.
        calls: The rows of the modulation table, pipeline call by pipeline call.
        scatter_index: (image tokens,) image order, row after row, to the order of the image stream: `x[scatter_index]`
            cuts images into tiles. None where the two are one.
        recover_index: (image tokens,) the way back: `x[recover_index]` puts the tiles together.
        kept: What the model works out once for this batch; ends with it.
    """

    name: str
    image: TokenStream
    text: TokenStream
    joint: JointRows
    joint_index: torch.Tensor
    text_index: torch.Tensor
    image_index: torch.Tensor
    rotary: torch.Tensor
    calls: tuple[SmallProduct, ...]
    scatter_index: torch.Tensor | None = None
    recover_index: torch.Tensor | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Branches of the batch."""
        return len(self.joint.lengths)

    @property
    def is_joint(self) -> bool:
        """True when all text tokens and then all image tokens are the joint order."""
        return self.num_rows == 1 and self.scatter_index is None


class StepModel(Protocol):
    """A diffusion model taken apart into steps. All methods run on the runner's thread under `no_grad`.

    Attributes:
        num_branch_steps: Guidance branches that went through `denoise_step`, a branch counted at every step.
        num_skipped_branch_steps: How many of them used their step cache in place of most of the network.
        batch_layout: How the tokens of its batches lie, one of `config.BATCH_LAYOUTS`.
    """

    num_branch_steps: int
    num_skipped_branch_steps: int
    batch_layout: str

    @property
    def device(self) -> torch.device:
        """Where rows live and forwards run."""
        ...

    @property
    def is_phased(self) -> bool:
        """True when only one big component fits the device at a time."""
        ...

    def compile(self) -> None:
        """Compile what the config asks for, with rows of nobody; no effect where that cannot be done."""
        ...

    def prepare_encode(self, rows: Sequence[Row]) -> None:
        """Set `text` (and `negative_text`) of every row."""
        ...

    def encode_examples(self) -> None:
        """Encode at least as much as is ever encoded at one time, of prompts that nobody made. Keeps nothing."""
        ...

    def decode_examples(self, num_tokens: int) -> None:
        """Take a decoding step of a picture of at most so many image tokens with every decoder that there is."""
        ...

    def rotary(self, row: Row, is_negative: bool) -> torch.Tensor:
        """Rotary table of one branch: (text + image tokens, head_dim / 2), text first."""
        ...

    def prepare_denoise(self, rows: Sequence[Row]) -> None:
        """Bring rows to where the model is now, before their first step: it may have moved while they waited."""
        ...

    def state_bytes(self, row: Row) -> list[list[int]]:
        """Bytes of the tensors that the row keeps between its steps, in each of its stages."""
        ...

    def step_cache_bytes(self, num_tokens: int) -> int:
        """The most bytes that the step caches of a batch of so many tokens take."""
        ...

    def example_row(self, num_tokens: int) -> Row:
        """A row of at most so many tokens, ready to be denoised, of no request that anybody made."""
        ...

    def denoise_step(self, batch: InputBatch) -> list[torch.Tensor]:
        """Guided noise prediction of every row: (image tokens, channels) each. Changes no row."""
        ...

    def step_scheduler(self, rows: Sequence[Row], noise_pred: torch.Tensor) -> None:
        """Take one noise-scheduler step for rows that share one: `noise_pred` is (rows, image tokens, channels).

        After an error, as long as no row's `step` has moved, it can be taken again.
        """
        ...

    def post_decode(self, rows: Sequence[Row]) -> None:
        """Take the next decoding step of rows of one size and one decoder; the last step sets `image`."""
        ...

    def release(self) -> None:
        """Nothing to do for now: let offloaded components leave the device."""
        ...

    def moment(self, row: Row) -> Any:
        """What `preview` needs to draw the row as it stands now; costs a copy of its latents."""
        ...

    def can_preview_aside(self, moment: Any) -> bool:
        """True when `preview` of it only computes with copies, so that another thread may do it beside a step."""
        ...

    def preview(self, moment: Any) -> Any:
        """A small picture of a moment, worked out without decoding it."""
        ...

    def drop_caches(self) -> None:
        """Forget what it keeps to be faster and can make again: memory is short."""
        ...

    def make_output(self, state: RequestState) -> Any:
        """The finished request's pictures in stock order, in the `output_type` that was asked for."""
        ...

    def reset(self) -> None:
        """Forget what was worked out from components that may have changed."""
        ...

    def close(self) -> None:
        """Leave the components as they were found."""
        ...
