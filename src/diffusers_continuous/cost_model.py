"""Predicted milliseconds of every kind of work, from its tokens and sequences. Knows numbers; no torch, no policy.

A step of a batch takes a constant, plus its sequences, plus its tokens, plus the pairs of tokens that attention
compares, and never less than launching its kernels takes. The same curve, with other numbers, serves encoding, VAE
decoding and the steps of PiD. A curve that was fitted to measured samples (`scripts/calibrate_cost_model.py`) is kept
as JSON and followed online by one factor; without one, a guess is followed, and fitted anew, online.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .errors import ConfigError
from .request import TEMPLATE_SUFFIX_TOKENS, RequestState, Row, Stage

if TYPE_CHECKING:
    from .request import TextEmbeds

KINDS = ("encode", "denoise", "decode", "pid")

# The factor is the lower median of so many ratios: work is slowed down by chance, never sped up.
NUM_RATIOS = 15
# The first work of a process is often much slower than all that follows; among three, one such does not count.
MIN_RATIOS = 3
# A factor that moved by less than this is left alone, so that plans made with it stay valid.
FACTOR_TOLERANCE = 0.05
# Bytes of a prompt that make a token, about; only until it is encoded.
BYTES_PER_TOKEN = 4
# Rows whose texts differ by less than this many tokens share a cost; so many different ones are kept.
TEXT_UNIT = 16
MAX_COSTS = 1024
# Where among the samples a floor is looked for. It is believed when some samples lie there and the loss is much lower.
FLOOR_QUANTILES, FLOOR_SPREAD, MIN_FLOOR_SAMPLES, MIN_FLOOR_GAIN = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5), 1.1, 3, 0.7
# A model that nobody calibrated fits its curves itself, whenever it has twice the samples of the last time.
FIRST_FIT, LAST_FIT = 16, 1024
# What it believed before counts as a few weak samples, of these sizes, so that what it has not seen stays sane.
PRIOR_TOKENS, PRIOR_WEIGHT = (256, 1024, 4096, 16384), 0.05


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds of one piece of work: a constant and what its tokens, pairs and sequences take; at least `floor_ms`.

    Pairs are pairs of tokens that attention compares. Sequences are the branches of a step's rows (a guided row has
    two), each with its own modulation and small products; the pictures of a decoding; the lengths among the prompts of
    an encoding, since prompts of one length are encoded together wherever others would change their last bits.
    """

    constant_ms: float = 0.0
    per_token_ms: float = 0.0
    per_pair_ms: float = 0.0
    per_sequence_ms: float = 0.0
    floor_ms: float = 0.0

    def ms(self, tokens: float, pairs: float, sequences: float) -> float:
        """How long the work takes."""
        ms = self.constant_ms + self.per_token_ms * tokens
        ms += self.per_pair_ms * pairs + self.per_sequence_ms * sequences
        return ms if ms > self.floor_ms else self.floor_ms


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured piece of work."""

    tokens: float
    pairs: float
    sequences: float
    ms: float


# Only the shape of these matters until the first samples are there: a constant worth 1,000 tokens, so that small rows
# are batched, and encoding and decoding worth a few steps.
DEFAULT_CURVES = {
    "encode": Curve(50.0, 0.5),
    "denoise": Curve(25.0, 0.025),
    "decode": Curve(5.0, 0.05),
    "pid": Curve(25.0, 0.25),
}


@dataclass(slots=True)
class RowCost:
    """What one row costs when it is alone; rows of one shape share it and see it change.

    Attributes:
        tokens, pairs, sequences: What it adds to a denoising step.
        encode_ms, step_ms, decode_ms: Its encoding, one of its denoising steps, one step of its decoder.
    """

    tokens: float
    pairs: float
    sequences: float
    num_text_tokens: int
    num_image_tokens: int
    decode_kind: str | None
    encode_ms: float = 0.0
    step_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(slots=True)
class StepCostModel:
    """Predicts durations and learns from measured ones. Not thread-safe: the engine locks.

    Args:
        curves: Per kind of work; kinds that are missing start from a rough default and are fitted while running.
        r2: How well the curves fitted their samples, per kind; only reported.
        source: Where the curves come from, in words.

    Attributes:
        version: Goes up whenever predictions change.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    r2: dict[str, float] = field(default_factory=dict)
    source: str = "not calibrated"
    version: int = 0
    _learners: dict[str, _Learner] = field(default_factory=dict)
    _costs: dict[tuple[int, int, int, str | None], RowCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._learners = {
            kind: _Learner(self.curves.get(kind, DEFAULT_CURVES[kind]), kind in self.curves) for kind in KINDS
        }

    # ------------------------------------------------------------------ predictions

    @property
    def is_informed(self) -> bool:
        """False while even a denoising step is only a guess."""
        return self._learners["denoise"].is_informed

    def knows(self, row: Row) -> bool:
        """True when nothing that is left of the row is only a guess."""
        kinds = [None if row.is_encoded else "encode", "denoise", (row.cost or self.cost_of(row)).decode_kind]
        return all(self._learners[kind].is_informed for kind in kinds if kind is not None)

    def ms(self, kind: str, tokens: float, pairs: float, sequences: float) -> float:
        """Milliseconds of one piece of work."""
        learner = self._learners[kind]
        return learner.factor * learner.curve.ms(tokens, pairs, sequences)

    def rows_ms(self, kind: str, rows: Iterable[Row]) -> float:
        """Milliseconds of one piece of work on all of `rows` together."""
        return self.ms(kind, *sum_of_work(kind, rows))

    def cost_of(self, row: Row) -> RowCost:
        """What `row` costs alone. Kept up to date: later corrections reach it."""
        is_latent = row.request.params.output_type == "latent"
        kind = None if is_latent else kind_of(Stage.DECODE, row)
        num_text_tokens = -(-text_tokens(row) // TEXT_UNIT) * TEXT_UNIT
        key = (row.num_image_tokens, row.num_branches, num_text_tokens, kind)
        cost = self._costs.get(key)
        if cost is None:
            if len(self._costs) >= MAX_COSTS:
                del self._costs[next(iter(self._costs))]
            cost = RowCost(*_work("denoise", row), num_text_tokens, row.num_image_tokens, kind)
            self._costs[key] = cost
            self._price(cost)
        return cost

    def remaining_ms(self, row: Row) -> float:
        """Milliseconds until the row's picture is there, if it had the device for itself."""
        cost = row.cost or self.cost_of(row)
        total = (row.num_decode_steps - row.decode_step) * cost.decode_ms
        if row.stage is Stage.DECODE:
            return total
        if not row.is_encoded:
            total += cost.encode_ms
        return total + (row.num_steps - row.step) * cost.step_ms

    def standalone_ms(self, state: RequestState) -> float:
        """Milliseconds from start to end of a request that has the device for itself, its rows running together."""
        rows, params = state.rows, state.params
        new = [row for row in rows if not row.is_encoded]
        total = self.rows_ms("encode", new) if new else 0.0
        total += rows[0].num_steps * self.rows_ms("denoise", rows)
        if params.output_type != "latent":
            total += rows[0].num_decode_steps * self.rows_ms(kind_of(Stage.DECODE, rows[0]), rows)
        return total

    # ------------------------------------------------------------------ learning

    def observe(self, kind: str, rows: Sequence[Row], ms: float) -> None:
        """Take one measured duration into account; slow outliers do not matter."""
        if ms > 0 and self._learners[kind].observe(Sample(*sum_of_work(kind, rows), ms)):
            self.version += 1
            for cost in self._costs.values():
                self._price(cost)

    def prediction_error(self) -> dict[str, float]:
        """Median relative error of the latest predictions, per kind that has run."""
        return {kind: learner.error for kind, learner in self._learners.items() if learner.errors}

    def _price(self, cost: RowCost) -> None:
        cost.encode_ms = self.ms("encode", cost.num_text_tokens, 0.0, cost.sequences)
        cost.step_ms = self.ms("denoise", cost.tokens, cost.pairs, cost.sequences)
        if cost.decode_kind is not None:
            cost.decode_ms = self.ms(cost.decode_kind, cost.num_image_tokens, cost.num_image_tokens**2, 1.0)

    # ------------------------------------------------------------------ on disk

    def save(self, path: str | Path) -> None:
        """Write the curves that are more than a guess as JSON.

        Raises:
            OSError: when the file cannot be written.
        """
        curves = {kind: asdict(each.scaled_curve) for kind, each in self._learners.items() if each.is_informed}
        content = {"source": self.source, "curves": curves, "r2": self.r2}
        Path(path).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StepCostModel:
        """Read what `save` wrote.

        Raises:
            ConfigError: when the file is not there or is something else.
        """
        try:
            content = json.loads(Path(path).read_text())
            curves = {kind: Curve(**values) for kind, values in content["curves"].items()}
            model = cls(curves, dict(content.get("r2", {})), str(content.get("source", path)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"calibration={str(path)!r} is no file of scripts/calibrate_cost_model.py") from error
        unknown = sorted(curves.keys() - set(KINDS))
        if unknown:
            raise ConfigError(f"calibration={str(path)!r} has {unknown}; known are {list(KINDS)}")
        return model


@dataclass(slots=True)
class _Learner:
    """One kind of work: its curve, the factor that corrects it, and what both are learned from."""

    curve: Curve
    is_fixed: bool
    factor: float = 1.0
    num_samples: int = 0
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RATIOS))
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=4 * NUM_RATIOS))
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=LAST_FIT))

    @property
    def is_informed(self) -> bool:
        """True once its milliseconds are more than a guess: calibrated, or measured often enough."""
        return self.is_fixed or len(self.ratios) >= MIN_RATIOS

    @property
    def error(self) -> float:
        """Median relative error of the latest predictions; StatisticsError before the first."""
        return statistics.median(self.errors)

    @property
    def scaled_curve(self) -> Curve:
        """The curve with the factor in each of its parts."""
        return Curve(*(self.factor * value for value in asdict(self.curve).values()))

    def observe(self, sample: Sample) -> bool:
        """True when predictions have changed."""
        expected = _ms(self.curve, sample)
        if expected <= 0:
            return False
        self.errors.append(abs(self.factor * expected / sample.ms - 1.0))
        self.ratios.append(sample.ms / expected)
        self.num_samples += 1
        if not self.is_fixed:
            self.samples.append(sample)
            if FIRST_FIT <= self.num_samples <= LAST_FIT and self.num_samples & (self.num_samples - 1) == 0:
                self._fit_again()
                return True
        factor = statistics.median_low(self.ratios)
        if abs(factor / self.factor - 1.0) <= FACTOR_TOLERANCE:
            return False
        self.factor = factor
        return True

    def _fit_again(self) -> None:
        """Fit the curve to what was measured, drawn a little to what was believed before."""
        before = self.scaled_curve
        prior = [Sample(n, n * n / 2, 2, before.ms(n, n * n / 2, 2)) for n in PRIOR_TOKENS]
        usual = [s for s in self.samples if s.ms < 3 * _ms(before, s)] or list(self.samples)
        weights = [1.0] * len(usual) + [PRIOR_WEIGHT * len(usual) / len(prior)] * len(prior)
        self.curve = fit_curve([*usual, *prior], weights)
        self.factor = 1.0
        self.ratios.clear()
        self.ratios.extend(s.ms / _ms(self.curve, s) for s in usual[-NUM_RATIOS:])


# ---------------------------------------------------------------------- fitting


def fit_curve(samples: Sequence[Sample], weights: Sequence[float] | None = None) -> Curve:
    """The curve without negative parts that has the least squared *relative* error.

    Relative, because a scheduler that is 10 ms off about a 20 ms step errs more than about a 2 s one.
    """
    inputs = np.array([[1.0, s.tokens, s.pairs, s.sequences] for s in samples])
    ms = np.array([s.ms for s in samples])
    scale = np.sqrt(np.ones(len(samples)) if weights is None else np.array(weights)) / ms
    found, least = _fit_above(0.0, inputs, ms, scale)
    best = Curve(*found.tolist())
    for floor in np.unique(np.quantile(ms, FLOOR_QUANTILES, method="nearest")):
        found, loss = _fit_above(floor, inputs, ms, scale)
        is_flat = (ms <= FLOOR_SPREAD * floor).sum() >= MIN_FLOOR_SAMPLES
        if is_flat and loss < MIN_FLOOR_GAIN * least:
            best, least = replace(Curve(*found.tolist()), floor_ms=float(floor)), loss
    return best


def _fit_above(floor: float, inputs: np.ndarray, ms: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, float]:
    """The four parts without negative ones, from the samples that are clearly above `floor`, and the loss over all."""
    above = ms > FLOOR_SPREAD * floor
    best, least = np.zeros(4), np.inf
    for columns in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in (1, 2, 3, 4)):
        found = np.zeros(4)
        found[list(columns)] = _least_squares((inputs * scale[:, None])[above][:, columns], (ms * scale)[above])
        loss = float(np.square((np.maximum(inputs @ found, floor) - ms) * scale).sum())
        if (found >= 0).all() and loss < least * (1 - 1e-9):
            best, least = found, loss
    return best, least


def _least_squares(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    size = np.abs(inputs).max(0, initial=0.0)
    size[size == 0] = 1.0
    return np.asarray(np.linalg.lstsq(inputs / size, targets, rcond=None)[0] / size)


def r_squared(curve: Curve, samples: Sequence[Sample]) -> float:
    """Share of the samples' variance that the curve explains."""
    ms = np.array([s.ms for s in samples])
    left = np.array([_ms(curve, s) for s in samples]) - ms
    spread = float(np.square(ms - ms.mean()).sum())
    return 1.0 - float(np.square(left).sum()) / spread if spread else 1.0


def _ms(curve: Curve, work: Sample) -> float:
    return curve.ms(work.tokens, work.pairs, work.sequences)


# ---------------------------------------------------------------------- the work in a row


def kind_of(stage: Stage, row: Row) -> str:
    """The kind of work that `row` needs in `stage`."""
    if stage is Stage.DECODE and row.request.params.decoder == "pid":
        return "pid"
    return stage.value


def text_tokens(row: Row) -> int:
    """Text tokens of all branches; a guess, not a bound, while a prompt is not encoded yet."""
    total = _text_tokens(row.text, row.prompt)
    return total + _text_tokens(row.negative_text, row.negative_prompt) if row.num_branches == 2 else total


def _text_tokens(text: TextEmbeds | None, prompt: str | None) -> int:
    return text.num_tokens if text is not None else len(prompt or "") // BYTES_PER_TOKEN + TEMPLATE_SUFFIX_TOKENS


def _work(kind: str, row: Row) -> tuple[int, float, int]:
    """Tokens, pairs of tokens and sequences (see `Curve`) of one row."""
    if kind == "denoise":
        tokens = row.num_image_tokens * row.num_branches + text_tokens(row)
        return tokens, tokens * tokens / row.num_branches, row.num_branches
    return row.num_image_tokens, float(row.num_image_tokens**2), 1


def sum_of_work(kind: str, rows: Iterable[Row]) -> tuple[int, float, int]:
    """Tokens, pairs and sequences (see `Curve`) that one piece of work on all of `rows` touches."""
    if kind == "encode":
        prompts = _prompts(rows)
        return sum(prompts.values()), 0.0, len(set(prompts.values()))
    tokens, pairs, sequences = 0, 0.0, 0
    for row in rows:
        more_tokens, more_pairs, more_sequences = _work(kind, row)
        tokens, pairs, sequences = tokens + more_tokens, pairs + more_pairs, sequences + more_sequences
    return tokens, pairs, sequences


def _prompts(rows: Iterable[Row]) -> dict[str | None, int]:
    """The different prompts of rows, which are encoded once each, and their tokens."""
    found = {}
    for row in rows:
        found[row.prompt] = _text_tokens(row.text, row.prompt)
        if row.num_branches == 2:
            found[row.negative_prompt] = _text_tokens(row.negative_text, row.negative_prompt)
    return found
