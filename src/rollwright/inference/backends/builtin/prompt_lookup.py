"""Prompt lookup: drafts the next tokens of a row from its own earlier text, and decides by measurement when checking them pays.

If the last tokens of a row occur earlier in its context, the tokens that followed there are a draft of what comes next
(https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's ``ngram`` method). Agents repeat tool results, so drafts are often right. A
wide step computes a row's newest token together with its draft (``verification``), and the sampler draws each token as it would without
drafts: a drafted token is kept if and only if it is the one that was drawn. Drafts therefore never change a distribution.

Whether a wide step pays depends on the processor, the model, the number of rows and the text. ``PromptLookup`` knows how long steps of each
width took, and which share of drafted tokens was drawn after matches of each length. It chooses the drafts that maximise the expected number
of tokens per second, and uses none if plain steps are faster.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from rollwright.inference.backends.builtin.batch import RowTable, Sequence
from rollwright.inference.backends.builtin.kv_cache import ROW_BLOCK, in_blocks
from rollwright.inference.backends.builtin.token_matches import TokenMatches
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

#: Lengths of matches at which a new class begins, and the chance that a drafted token is drawn, assumed until it is known.
_CLASSES, _PRIOR = (2, 3, 4, 6, 9, 16), (0.2, 0.4, 0.5, 0.6, 0.7, 0.8)
_PRIOR_WEIGHT = 4.0  # in drafted tokens
_FORGETTING = 0.99  # per step, so that chances follow the text

_GAIN = 1.1  # expected tokens per second of a wide step, in those of a plain one, from which on it is chosen
_RETRY = 256  # after this many refusals of drafts, one wide step is measured again
_EXTRA = 0.3  # seconds of a further token in those of a token in a plain step, assumed until they are measured
_LOOKS, _SHORTEST_REST, _LONGEST_REST = 32, 32, 256  # steps without a useful draft, and steps without lookups after them
_REPORTED = 200  # wide steps after which the log says what they gain


@dataclass(slots=True)
class Draft:
    """Drafted tokens of one row.

    Attributes:
        row: the row.
        tokens: the drafted tokens.
        kind: class of the match's length.
        used: number of these tokens that are computed in this step.
        drawn: number of leading drafted tokens that were drawn, once the step has run.
        is_cut: True if the row ended before the next drafted token could be drawn.
    """

    row: int
    tokens: list[int]
    kind: int
    used: int = 0
    drawn: int = 0
    is_cut: bool = False


class StepSeconds:
    """Seconds that steps of each width took: plain steps by rows, and wide steps by computed tokens."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._wide: dict[int, float] = {}

    def add(self, width: int, seconds: float, is_wide: bool) -> None:
        """Add a measurement. Outliers count little, and the first measurement, which may contain one-time work, can only fall."""
        known, width = self._wide if is_wide else self._plain, in_blocks(width, ROW_BLOCK)
        before = known.get(width)
        known[width] = seconds if before is None else before + (min(seconds, 1.5 * before) - before) / 5

    def of_plain(self, rows: int) -> float | None:
        """Return the seconds of a plain step, or None if none of this width was measured."""
        return self._plain.get(in_blocks(rows, ROW_BLOCK))

    def of_wide(self, rows: int, widths: np.ndarray) -> np.ndarray:
        """Estimate the seconds of wide steps with ``rows`` rows, by interpolation.

        Beyond the widest measured one, a token is assumed to cost a share of what it costs in a plain step.
        """
        begin = in_blocks(rows, ROW_BLOCK)
        points = sorted((width, seconds) for width, seconds in self._wide.items() if width >= begin)
        if not points or points[0][0] > begin:
            points.insert(0, (begin, self._plain[begin]))
        known, seconds = zip(*points, strict=True)
        widths = np.ceil(widths / ROW_BLOCK) * ROW_BLOCK
        return np.interp(widths, known, seconds) + _EXTRA * self._plain[begin] / begin * (widths - known[-1]).clip(min=0)


@dataclass
class PromptLookup:
    """Drafts tokens for the rows of a step, and learns which drafts pay.

    Args:
        most: maximum number of tokens drafted for a row.
        most_tokens: maximum number of tokens computed in a wide step, unless there are more rows.
        pads_rows: True if the model computes all rows with as many tokens as the row with the longest draft.

    Attributes:
        seconds: what steps took.
        proposed, accepted: number of drafted tokens that were computed, and that were drawn.
        steps: number of wide steps.
    """

    most: int
    most_tokens: int
    pads_rows: bool = False
    seconds: StepSeconds = field(default_factory=StepSeconds)
    proposed: int = 0
    accepted: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        prior = np.array(_PRIOR)
        self._drawn, self._missed = _PRIOR_WEIGHT * prior, _PRIOR_WEIGHT * (1 - prior)
        self._looks = self._rest = self._refused = 0
        self._next_rest = _SHORTEST_REST
        self._spent = self._saved = 0.0  # seconds of wide steps, and what their tokens would have taken in plain steps
        self._is_reported = False

    def drafts(self, running: list[Sequence], table: RowTable, length: int) -> list[Draft]:
        """Look up drafts of the rows, and choose how many of their tokens are computed now (``Draft.used``).

        Args:
            running: sequences by row.
            table: state of the rows.
            length: number of columns of the cache.
        """
        if self._rest:
            self._rest -= 1
            return []
        count = len(running)
        room = np.minimum(table.settings["max_new_tokens"][:count] - table.generated[:count], length - table.cached[:count]) - 1
        found = list[Draft]()
        for row, most in enumerate(room.clip(max=self.most).tolist()):
            sequence = running[row]
            if most <= 0 or sequence.has_own_layout or sequence.request.multi_modal:
                continue
            if (matches := sequence.matches) is None:
                matches = sequence.matches = TokenMatches()
            matches.extend(table.tokens_from(row, sequence, len(matches)))
            tokens, longest = matches.find(most)
            if tokens:
                found.append(Draft(row, tokens, bisect_right(_CLASSES, longest) - 1))
        pays = bool(found) and self.seconds.of_plain(count) is not None and self._choose(found, count)
        self._look_again(pays)
        return found

    def _choose(self, drafts: list[Draft], rows: int) -> bool:
        """Set how many tokens of each draft are computed, so that a step is expected to give the most tokens per second.

        Returns:
            Whether drafts pay. If not, none is used, except now and then to measure again.
        """
        chances = self._drawn / (self._drawn + self._missed)
        longest = max(len(draft.tokens) for draft in drafts)
        expected = chances[[draft.kind for draft in drafts], None] ** np.arange(1, longest + 1)
        expected[np.arange(longest) >= np.array([len(draft.tokens) for draft in drafts])[:, None]] = 0.0
        if self.pads_rows:
            gains, widths = expected.sum(0).cumsum(), rows * np.arange(2, longest + 2)
        else:
            order = np.argsort(-expected, axis=None, kind="stable")
            gains, widths = expected.ravel()[order].cumsum(), rows + np.arange(1, expected.size + 1)
        fits = widths <= self.most_tokens
        if not fits.any():
            return False
        rates = np.where(fits, (rows + gains) / self.seconds.of_wide(rows, widths), 0.0)
        best = int(rates.argmax())
        pays = bool(rates[best] > _GAIN * rows / (self.seconds.of_plain(rows) or 1.0))
        if not pays:
            self._refused += 1
            if self._refused < _RETRY:
                return False
            self._refused = 0
        if self.pads_rows:
            lengths = np.minimum(best + 1, (expected > 0).sum(1))
        else:
            lengths = np.bincount(order[: best + 1] // longest, minlength=len(drafts))
        for draft, used in zip(drafts, lengths.tolist(), strict=True):
            draft.used = min(used, len(draft.tokens))
        return pays

    def _look_again(self, pays: bool) -> None:
        """Rest for a while if no draft paid for some time, because looking takes time, too."""
        if pays:
            self._looks, self._next_rest = 0, _SHORTEST_REST
            return
        self._looks += 1
        if self._looks >= _LOOKS:
            self._looks, self._rest = 0, self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)

    def learn(self, drafts: list[Draft], rows: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            drafts: the drafts of the step's rows; of one that was not used, the first token was compared with the drawn one.
            rows: number of rows.
            seconds: how long the step took.
        """
        used = [draft.used for draft in drafts if draft.used]
        width = rows * (max(used) + 1) if used and self.pads_rows else rows + sum(used)
        self.seconds.add(width, seconds, is_wide=bool(used))
        if not drafts:
            return
        self._drawn *= _FORGETTING
        self._missed *= _FORGETTING
        for draft in drafts:
            self._drawn[draft.kind] += draft.drawn
            self._missed[draft.kind] += draft.drawn < (draft.used or 1) and not draft.is_cut
        if not used:
            return
        drawn = sum(draft.drawn for draft in drafts if draft.used)
        self.steps += 1
        self.proposed += sum(used)
        self.accepted += drawn
        self._spent += seconds
        self._saved += (rows + drawn) / rows * (self.seconds.of_plain(rows) or 0.0)
        if self.steps >= _REPORTED and not self._is_reported:
            self._is_reported = True
            logger.info(
                "Prompt lookup: %.0f %% of %d drafted tokens were drawn; the steps with drafts gave %.2f times the tokens per second "
                "of plain ones.",
                100 * self.accepted / self.proposed,
                self.proposed,
                self._saved / self._spent,
            )

    def stats(self) -> dict[str, float]:
        """Return counts since the start."""
        return {"drafted_tokens": self.proposed, "accepted_tokens": self.accepted, "wide_steps": self.steps}
