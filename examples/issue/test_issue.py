"""Runs inside the sandbox: what the issue asks for, slices as the built-in range's.

One test for each kind of slice, so that a repair of some of them can be told from one of none.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterable
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction

from more_itertools import numeric_range

RANGES = ((0, 10, 2), (0, 9, 2), (10, 0, -3), (5, 6, 1), (-4, 5, 3))
INSIDE = range(-3, 4)
OUTSIDE = (-99, -6, 5, 6, 99)


class Slices(unittest.TestCase):
    def same(self, slices: Iterable[slice], ranges: Iterable[tuple[int, int, int]]) -> None:
        for arguments in ranges:
            for one in slices:
                ours = list(numeric_range(*arguments)[one])
                self.assertEqual(ours, list(range(*arguments)[one]), (arguments, one))

    def growing(self, *slices: slice) -> None:
        self.same(slices, [r for r in RANGES if r[2] > 0])

    def test_of_the_issue(self) -> None:
        self.assertEqual(list(numeric_range(0, 10, 2)[::-1]), [8, 6, 4, 2, 0])

    def test_whole(self) -> None:
        self.growing(slice(None, None, -1))

    def test_whole_with_larger_steps(self) -> None:
        self.growing(slice(None, None, -2), slice(None, None, -3))

    def test_whole_of_a_falling_range(self) -> None:
        self.same([slice(None, None, -n) for n in (1, 2)], [r for r in RANGES if r[2] < 0])

    def test_with_a_start(self) -> None:
        self.growing(*(slice(start, None, -1) for start in INSIDE))

    def test_with_a_stop(self) -> None:
        self.growing(*(slice(None, stop, -1) for stop in INSIDE))

    def test_with_both(self) -> None:
        self.growing(*(slice(start, stop, -1) for start in INSIDE for stop in INSIDE))

    def test_with_a_start_out_of_bounds(self) -> None:
        self.growing(*(slice(start, None, -1) for start in OUTSIDE))

    def test_with_a_stop_out_of_bounds(self) -> None:
        self.growing(*(slice(None, stop, -1) for stop in OUTSIDE))

    def test_everything_of_falling_ranges(self) -> None:
        bounds = (None, *INSIDE, *OUTSIDE)
        slices = [slice(a, b, n) for a in bounds for b in bounds for n in (None, 1, -1, -2)]
        self.same(slices, [r for r in RANGES if r[2] < 0])

    def test_forward_as_before(self) -> None:
        bounds = (None, *INSIDE, *OUTSIDE)
        self.growing(*(slice(a, b, n) for a in bounds for b in bounds for n in (None, 1, 2)))

    def test_empty_ranges(self) -> None:
        for n in (1, -1, -2):
            self.assertEqual(list(numeric_range(3, 3, 1)[::n]), [])

    def test_other_numbers(self) -> None:
        halves = numeric_range(Fraction(0), Fraction(2), Fraction(1, 2))
        self.assertEqual(list(halves[::-1]), list(reversed(halves)))
        tenths = numeric_range(Decimal("1.0"), Decimal("1.5"), Decimal("0.1"))
        self.assertEqual(list(tenths[3::-2]), [Decimal("1.3"), Decimal("1.1")])

    def test_dates(self) -> None:
        days = numeric_range(date(2024, 2, 27), date(2024, 3, 2), timedelta(days=1))
        self.assertEqual(list(days[::-1]), list(reversed(days)))
        self.assertEqual(list(days[2:0:-1]), [date(2024, 2, 29), date(2024, 2, 28)])

    def test_a_step_of_zero(self) -> None:
        with self.assertRaises(ValueError):
            numeric_range(0, 10, 2)[::0]
