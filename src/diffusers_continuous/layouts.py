"""How the tokens of a batch lie in memory: packed, padded or tiled. Knows lengths and sizes; no latents, no model.

A layout answers three questions: in which order tokens lie, which row of the modulation table belongs to which token,
and which tokens attention may compare. In all three, attention sees row after row, each as its text and then its image
in image order, so that neither it nor the rotary tables depend on the layout.

    packed    image   | row 0 ........ | row 1 ........ | row 2 .. |      all tokens, without padding
              text    | row 0 .. | row 1 .... | row 2 .. |

    padded    image   | row 0 ........ | row 1 ........ | row 2 ........ |      equally many image tokens in every row,
              text    | row 0 .. 0 0 | row 1 ...... | row 2 . 0 0 0 |           every text as long as the longest

    tiled     image   | 0,0 | 0,1 | 0,2 | 0,3 | 1,0 | 1,1 | 2,0 |      row, tile: equal squares, a run of short rows
              text    | row 0 .. | row 1 .... | row 2 .. |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .devices import upload
from .models.interface import SMALL_PRODUCT, BatchLayout, JointRows, Run, SmallProduct, TokenStream
from .request import TextEmbeds

# Pixels of an image token's side; no tile is smaller.
TOKEN_SIDE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One sequence of the forward: the conditional or the negative side of a row.

    It is picture number `picture` of a pipeline call that has `num_pictures`, not all of which need be in the batch;
    `call` is the first row of those that are. `height` and `width` are the image's, in pixels.
    """

    row: int
    call: int
    picture: int
    num_pictures: int
    is_negative: bool
    text: TextEmbeds
    height: int
    width: int

    @property
    def num_image_tokens(self) -> int:
        """Tokens of the image."""
        return self.height // TOKEN_SIDE * (self.width // TOKEN_SIDE)

    @property
    def length(self) -> int:
        """Tokens of text and image."""
        return self.text.num_tokens + self.num_image_tokens


def choose_layout(batch_layout: str, branches: Sequence[Branch]) -> str:
    """The layout of a batch, where the config says `batch_layout`.

    Rows that cannot be padded are packed. `"auto"` is packed, whatever the rows: measured by `scripts/bench_layouts.py`
    over equal, mixed and transposed sizes and short and long texts, no other layout was faster by more than the noise.
    Padded costs what it pads, up to three times the time; tiled compares the same tokens in another order, and where
    the greatest common divisor is small its tiles are single tokens, each with a modulation row of its own.
    """
    can_pad = len({branch.num_image_tokens for branch in branches}) == 1
    if batch_layout == "auto" or (batch_layout == "padded" and not can_pad):
        return "packed"
    return batch_layout


def tile_side(sizes: Iterable[tuple[int, int]]) -> int:
    """Side in pixels of the largest square that tiles images of all these (height, width), at least a token's."""
    return max(TOKEN_SIDE, math.gcd(*itertools.chain.from_iterable(sizes)))


# ---------------------------------------------------------------------- the three


def packed(branches: Sequence[Branch], calls: tuple[SmallProduct, ...], rotary: Sequence[torch.Tensor]) -> BatchLayout:
    """All tokens and nothing else.

    Args:
        branches: Sorted so that equal lengths are neighbours.
        calls: The rows of each pipeline call.
        rotary: Of every branch, (text + image tokens, head_dim / 2).
    """
    return _in_turn(branches, calls, rotary, _text_lengths(branches))


def padded(branches: Sequence[Branch], calls: tuple[SmallProduct, ...], rotary: Sequence[torch.Tensor]) -> BatchLayout:
    """As `packed`, but with every text padded at its end to the length of the longest.

    All images must have equally many tokens. Where no text is shorter than another, nothing is padded.
    """
    lengths = _text_lengths(branches)
    longest = int(lengths.max())
    tables = [_pad(table, n, longest) for table, n in zip(rotary, lengths.tolist(), strict=True)]
    layout = _in_turn(branches, calls, tables, np.full_like(lengths, longest))
    if lengths.min() == longest:
        return replace(layout, name="padded")
    is_word = np.arange(longest) < lengths[:, None]  # (rows, longest)
    is_image = np.ones((len(branches), branches[0].num_image_tokens), dtype=bool)
    valid = torch.from_numpy(np.concatenate([is_word, is_image], axis=1).ravel())
    return replace(
        layout,
        name="padded",
        text=replace(layout.text, small_products=_small_padded_texts(branches, longest)),
        joint=replace(layout.joint, valid=valid),
    )


def tiled(branches: Sequence[Branch], calls: tuple[SmallProduct, ...], rotary: Sequence[torch.Tensor]) -> BatchLayout:
    """As `packed`, but with every image cut into squares of one `tile_side`, so that all are rows of one length."""
    layout = packed(branches, calls, rotary)
    side = tile_side((branch.height, branch.width) for branch in branches) // TOKEN_SIDE
    scatter_index = np.concatenate([_tile_order(branch, side) for branch in branches])
    image_lengths = np.array([branch.num_image_tokens for branch in branches])
    scatter_index += np.repeat(np.cumsum(image_lengths) - image_lengths, image_lengths)
    num_tokens, length = len(scatter_index), side**2
    owners = np.array([branch.row for branch in branches])
    image = replace(
        layout.image,
        runs=(Run(0, num_tokens, 0, num_tokens // length, length),),
        modulation_index=index_tensor(np.repeat(owners, image_lengths // length)),
    )
    if (np.diff(scatter_index) == 1).all():
        return replace(layout, name="tiled", image=image)
    recover_index = np.argsort(scatter_index)
    num_text = len(layout.text_index)
    moved = index_tensor(np.concatenate([np.arange(num_text), num_text + recover_index]))
    scatter = index_tensor(scatter_index)
    return replace(
        layout,
        name="tiled",
        image=image,
        joint_index=moved[layout.joint_index],
        image_index=layout.image_index[scatter],
        scatter_index=scatter,
        recover_index=index_tensor(recover_index),
    )


LAYOUTS = {"packed": packed, "padded": padded, "tiled": tiled}


# ---------------------------------------------------------------------- pieces


def _in_turn(
    branches: Sequence[Branch],
    calls: tuple[SmallProduct, ...],
    rotary: Sequence[torch.Tensor],
    text_lengths: np.ndarray,
) -> BatchLayout:
    """The branches' images one behind the other, and their texts, which take `text_lengths` tokens in memory."""
    image_lengths = np.array([branch.num_image_tokens for branch in branches])
    lengths = text_lengths + image_lengths
    starts = np.cumsum(lengths) - lengths
    text_index = ranges(starts, text_lengths)
    image_index = ranges(starts + text_lengths, image_lengths)
    joint_index = np.empty(len(text_index) + len(image_index), dtype=np.int64)
    joint_index[text_index] = np.arange(len(text_index))
    joint_index[image_index] = np.arange(len(text_index), len(joint_index))
    return BatchLayout(
        name="packed",
        image=_stream(branches, image_lengths),
        text=_stream(branches, text_lengths),
        calls=calls,
        joint=_joint_rows(lengths),
        joint_index=index_tensor(joint_index),
        text_index=index_tensor(text_index),
        image_index=index_tensor(image_index),
        rotary=torch.cat(list(rotary)),
    )


def _joint_rows(lengths: np.ndarray) -> JointRows:
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return JointRows(_runs(lengths), tuple(lengths.tolist()), cu_seqlens)


def _stream(branches: Sequence[Branch], lengths: np.ndarray) -> TokenStream:
    owners = np.array([branch.row for branch in branches])
    ends = np.cumsum(lengths)
    products = []
    # Pictures of a call that follow each other there, too.
    keys = [(b.call, b.is_negative, n, b.picture - i) for i, (b, n) in enumerate(zip(branches, lengths, strict=True))]
    for part in neighbours(keys):
        branch, length = branches[part.start], int(lengths[part.start])
        start, stop = int(ends[part.start]) - length, int(ends[part.stop - 1])
        products.append(SmallProduct(start, stop, branch.picture * length, branch.num_pictures * length))
    return TokenStream(
        _runs(lengths),
        index_tensor(owners),
        index_tensor(np.repeat(owners, lengths)),
        _unlike(products, int(ends[-1])),
    )


def _unlike(products: Iterable[SmallProduct], num_lines: int) -> tuple[SmallProduct, ...]:
    """Those that one product of `num_lines` lines may not sum as the stock pipeline does."""

    def is_like(product: SmallProduct) -> bool:
        """Sums alike are those of two large products, and of small ones of as many lines in the same place."""
        if num_lines >= SMALL_PRODUCT:
            return product.num_lines >= SMALL_PRODUCT
        return (product.first, product.num_lines) == (product.start, num_lines)

    return tuple(product for product in products if product.stop > product.start and not is_like(product))


def _small_padded_texts(branches: Sequence[Branch], longest: int) -> tuple[SmallProduct, ...]:
    """The texts without their padding, row by row, since those of one call lie apart."""
    lengths = _text_lengths(branches).tolist()
    products = (
        SmallProduct(i * longest, i * longest + length, branch.picture * length, branch.num_pictures * length)
        for i, (branch, length) in enumerate(zip(branches, lengths, strict=True))
    )
    return _unlike(products, len(branches) * longest)


def _text_lengths(branches: Sequence[Branch]) -> np.ndarray:
    return np.array([branch.text.num_tokens for branch in branches])


def _pad(rotary: torch.Tensor, num_words: int, longest: int) -> torch.Tensor:
    """Zeros between the `num_words` of a text and its image, so that the text has `longest` tokens."""
    words, image = rotary[:num_words], rotary[num_words:]
    return torch.cat([words, rotary.new_zeros(longest - num_words, rotary.shape[1]), image])


def _tile_order(branch: Branch, side: int) -> np.ndarray:
    """The image's tokens tile by tile, as indices into image order; `side` in tokens."""
    height, width = branch.height // TOKEN_SIDE, branch.width // TOKEN_SIDE
    grid = np.arange(height * width).reshape(height // side, side, width // side, side)
    return grid.swapaxes(1, 2).ravel()  # (rows of tiles, columns of tiles, side, side)


def neighbours(keys: Sequence[object]) -> list[slice]:
    """Cut into slices of neighbours with one key."""
    cuts = [0, *(i for i in range(1, len(keys)) if keys[i] != keys[i - 1]), len(keys)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


def _runs(lengths: np.ndarray) -> tuple[Run, ...]:
    """Cut a stream into runs of neighbouring rows of one length; rows without tokens are in none."""
    runs, start, first = [], 0, 0
    for last in range(1, len(lengths) + 1):
        if last < len(lengths) and lengths[last] == lengths[first]:
            continue
        length, count = int(lengths[first]), last - first
        if length:
            runs.append(Run(start, start + length * count, first, count, length))
        start, first = start + length * count, last
    return tuple(runs)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenated `arange(start, start + length)`."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)


def index_tensor(array: np.ndarray) -> torch.Tensor:
    """An int64 tensor of the array, on the host."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def upload_with(
    layout: BatchLayout, others: Sequence[torch.Tensor], device: torch.device
) -> tuple[BatchLayout, list[torch.Tensor]]:
    """A layout that was made on the host, and other small tensors, in one copy to the device of the forward."""
    image, text, joint = layout.image, layout.text, layout.joint
    always = [image.modulation_index, image.token_modulation_index, text.modulation_index, text.token_modulation_index]
    always += [joint.cu_seqlens, layout.joint_index, layout.text_index, layout.image_index]
    optional = [joint.valid, layout.scatter_index, layout.recover_index]
    there = iter(upload([*always, *(tensor for tensor in optional if tensor is not None), *others], device))
    image = replace(image, modulation_index=next(there), token_modulation_index=next(there))
    text = replace(text, modulation_index=next(there), token_modulation_index=next(there))
    cu_seqlens, joint_index, text_index, image_index = (next(there) for _ in range(4))
    valid, scatter_index, recover_index = (None if tensor is None else next(there) for tensor in optional)
    moved = replace(
        layout,
        image=image,
        text=text,
        joint=replace(joint, cu_seqlens=cu_seqlens, valid=valid),
        joint_index=joint_index,
        text_index=text_index,
        image_index=image_index,
        scatter_index=scatter_index,
        recover_index=recover_index,
    )
    return moved, list(there)
