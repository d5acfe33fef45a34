"""How much slower, and how sure: the ratio of paired measurements and an interval for it.

The estimate is that of Hodges and Lehmann, the median of all averages of two pairs, of the
logarithms of the ratios; the interval is the one that belongs to Wilcoxon's signed-rank test,
exact for every number of pairs. Neither asks the noise to be normal, which that of a shared machine
never is, one run of ten that met a busy neighbour moves them little, and nothing is random in
them. (Rejected: Student's interval, where one such run hides everything; a bootstrap, whose
intervals are too narrow for twenty pairs.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    estimate: float
    low: float
    high: float
    confidence: float  # that the true value is in it

    @property
    def noise(self) -> bool:
        """Whether no difference is shown: the ratio may well be 1."""
        return self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"{self.estimate:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(values: Sequence[float], against: Sequence[float], confidence: float = 0.95) -> Interval:
    """How many times as large the values are as those they are paired with."""
    if len(values) != len(against) or not values:
        raise ValueError(f"{len(values)} and {len(against)} values are no pairs")
    logs = [math.log(a / b) for a, b in zip(values, against, strict=True)]
    averages = sorted((a + b) / 2 for at, a in enumerate(logs) for b in logs[: at + 1])
    cut, outside = tail(len(logs), (1 - confidence) / 2)
    return Interval(
        math.exp(statistics.median(averages)),
        math.exp(averages[cut]),
        math.exp(averages[-1 - cut]),
        1 - 2 * outside,
    )


def tail(pairs: int, probability: float) -> tuple[int, float]:
    """The largest sum of ranks in the lower tail of the signed-rank test, and the tail's weight.

    0 when the pairs are too few for such a tail; the weight is larger than asked for then.
    """
    ways = [1]  # by sum: how many subsets of the ranks have it
    for rank in range(1, pairs + 1):
        longer = ways + [0] * rank
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    cut, weight = 0, ways[0]
    while (weight + ways[cut + 1]) / 2**pairs <= probability:
        cut += 1
        weight += ways[cut]
    return cut, weight / 2**pairs
