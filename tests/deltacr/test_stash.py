"""Where pages are kept: ranges never overlap, and what stays in place is found again."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from deltabox.deltacr.model import PAGE, Capture, Mapping, Process
from deltabox.deltacr.objects import sysv
from deltabox.deltacr.stash import Stash, _without, plan

_edges = st.lists(st.integers(0, 200), unique=True, max_size=20).map(sorted)


def _ranges(edges: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@given(_edges, _edges)
def test_difference_of_ranges(left: list[int], right: list[int]) -> None:
    ours, others = _ranges(left), _ranges(right)
    expected = {n for low, high in ours for n in range(low, high)} - {
        n for low, high in others for n in range(low, high)
    }
    found = _without(ours, others)
    assert {n for low, high in found for n in range(low, high)} == expected
    assert all(low < high for low, high in found)


@st.composite
def _processes(draw: st.DrawFn) -> list[Process]:
    out = []
    for pid in range(2, 2 + draw(st.integers(1, 4))):
        at = draw(st.sampled_from([0x400, 0x55_0000_0000, 0x7F00_0000_0])) * PAGE
        mappings = []
        for _ in range(draw(st.integers(0, 8))):
            at += draw(st.sampled_from([0, 1, 100, 1 << 20])) * PAGE
            size = draw(st.one_of(st.integers(1, 64), st.just(1024))) * PAGE
            prot = draw(st.sampled_from([1, 3]))
            kind: Literal["anonymous", "file"] = draw(st.sampled_from(["anonymous", "file"]))
            mappings.append(
                Mapping(
                    at,
                    at + size,
                    prot,
                    False,
                    0,
                    kind,
                    "/f" if kind == "file" else "",
                    False,
                    frozenset(),
                    pages=((at, at + PAGE),),
                    of_base=kind == "file" and draw(st.booleans()),
                )
            )
            at += size
        out.append(Process(pid, pid, 1, pid, pid, 17, b"x", mappings=tuple(mappings)))
    return out


def _capture(processes: list[Process]) -> Capture:
    return Capture(tuple(processes), (), (), (), (), 1, b"h", b"d", None, sysv.NOTHING)


def _no_overlap(stash: Stash) -> None:
    places = sorted((h.address, h.address + h.size) for h in stash.held.values())
    for (_, end), (start, _) in pairwise(places):
        assert end <= start


@given(_processes(), _processes())
def test_plans_do_not_overlap_and_keep_places(first: list[Process], second: list[Process]) -> None:
    before = plan(_capture(first).processes, None)
    _no_overlap(before)
    after = plan(_capture(second).processes, before)
    _no_overlap(after)
    same = plan(_capture(first).processes, before)
    assert {k: h.address for k, h in same.held.items()} == {
        k: h.address for k, h in before.held.items()
    }
    for held in (*before.held.values(), *after.held.values()):
        assert held.shift % (2 << 20) == 0
        if held.size >= 2 << 20:
            assert held.shift % (1 << 30) == 0
