"""The arithmetic of bench/rivals.py and bench/programs.py: intervals, CRIU's records, apt's."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
try:
    import criu
    import interval
    import programs
    import rivals
    from report import Recorder
finally:
    sys.path.pop(0)

# the stats-dump of a real dump: frozen for 52.899 ms, 9,292 pages written
DUMP = bytes.fromhex(
    "4059105506330957270000000a2508d70410a39d0318f2dd012098a20128ae49300038cc48"
    "4000480050105810600068007000"
)


def test_statistics_of_criu() -> None:
    found = criu.stats(DUMP)
    assert found["freezing"] == 599
    assert found["frozen"] == 52899
    assert found["memory written"] == 20760
    assert found["pages written"] == 9292


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (b"", "no statistics"),
        (DUMP[4:], "no statistics"),
        (DUMP[:-1], "39 bytes and has 38"),
        (DUMP[:8] + (2).to_bytes(4, "little") + b"\x0a\x05", "within a field"),
        (DUMP[:8] + (2).to_bytes(4, "little") + b"\x08\xff", "within a number"),
        (DUMP[:8] + (2).to_bytes(4, "little") + b"\x0d\x01", "wire type 5"),
    ],
)
def test_damaged_statistics(image: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        criu.stats(image)


def test_the_first_error_of_a_log() -> None:
    log = (
        "Warn  (criu/kerndat.c:1): nothing\n"
        "Error (criu/cr-dump.c:7): The cause\n"
        "Error (criu/cr-dump.c:9): Dumping FAILED.\n"
    )
    assert criu.complaint(log) == "The cause"
    assert criu.complaint("fine") == "no error in its log"


def test_the_archive_of_a_release() -> None:
    listed = "sec://a/|one-security|main\nnet://b|c/|one|contrib\nnet://b|c/|one|main\n"
    assert criu.archive(listed, "one") == "net://b|c/"
    assert criu.archive(listed, "two") is None


def test_no_program_no_loader(tmp_path: Path) -> None:
    with pytest.raises(criu.Unavailable, match="no loader"):
        criu.command(tmp_path)


def test_ratios_are_those_of_one_round() -> None:
    us = {"checkpoint call": 4.0, "checkpoint stop": 2.0, "rollback": 1.0}
    them = {"CRIU dump": 60.0, "CRIU dump's pause": 50.0, "CRIU stop": 5.0, "CRIU restore": 40.0}
    found = rivals.ratios(us, them)
    assert found["CRIU dump : checkpoint call"] == 15
    assert found["CRIU dump : checkpoint stop"] == 30
    assert found["CRIU dump's pause : checkpoint stop"] == 25
    assert found["CRIU restore : rollback"] == 40
    assert found["CRIU stop and restore : rollback"] == 45


def test_without_criu_the_report_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(cache: Path) -> Path:
        raise criu.Unavailable("apt-get: no network")

    monkeypatch.setattr(criu, "fetch", nothing)
    recorder = Recorder("rivals", what="")
    assert rivals.start(recorder, tmp_path) is None
    (failure,) = recorder.report().failures
    assert failure.name == "CRIU"
    assert "no network" in failure.error


@pytest.mark.parametrize(("pairs", "cut"), [(6, 0), (10, 8), (20, 52), (25, 89)])
def test_the_tail_is_that_of_the_tables(pairs: int, cut: int) -> None:
    found, weight = interval.tail(pairs, 0.025)
    assert found == cut
    assert weight <= 0.025


def test_few_pairs_have_less_confidence() -> None:
    found = interval.ratio([2.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert (found.low, found.high) == pytest.approx((2, 4))
    assert found.confidence == 0.75


def test_an_interval_holds_the_truth_and_shows_a_difference() -> None:
    source = random.Random(11)
    against = [source.lognormvariate(0, 0.02) for _ in range(20)]
    same = interval.ratio([source.lognormvariate(0, 0.02) for _ in range(20)], against)
    assert same.noise
    slower = interval.ratio([1.1 * source.lognormvariate(0, 0.02) for _ in range(20)], against)
    assert not slower.noise
    assert slower.low < 1.1 < slower.high
    assert 0.95 <= slower.confidence < 0.96


def test_one_busy_neighbour_moves_little() -> None:
    values = [1.0 + n / 1000 for n in range(20)]
    calm = interval.ratio(values, [1.0] * 20)
    busy = interval.ratio([50.0, *values[1:]], [1.0] * 20)
    assert busy.estimate == pytest.approx(calm.estimate, abs=0.002)


@pytest.mark.parametrize("pairs", [([], []), ([1.0], [1.0, 2.0])])
def test_no_pairs(pairs: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="no pairs"):
        interval.ratio(*pairs)


@pytest.mark.parametrize(
    ("inside", "slower", "verdict"),
    [(1.0, 0.0, "within noise"), (1.05, 5.0, "slower"), (0.9, 0.0, "faster")],
)
def test_the_verdict(inside: float, slower: float, verdict: str) -> None:
    recorder = Recorder("programs", what="")
    wobble = [0.99, 1.01] * 10
    programs.judge(recorder, "loop", [inside * w for w in wobble], list(reversed(wobble)))
    made = recorder.report()
    (figure,) = [one for one in made.figures if one.name == "loop, slower, shown"]
    assert figure.median == pytest.approx(slower, abs=0.5)
    assert figure.missed == (verdict == "slower")
    assert verdict in made.notes[0]


def test_an_answer_of_a_program() -> None:
    assert programs.parse("= 0.25 437 passed\n") == (0.25, "437 passed")
    with pytest.raises(ValueError, match="not an answer"):
        programs.parse("Traceback (most recent call last):\n")


def test_every_side_is_first_as_often() -> None:
    class Nothing:
        def forget(self) -> None: ...

        def ready(self) -> None: ...

        def run(self, name: str, amount: int) -> tuple[float, str]:
            return amount, name

    sides: dict[str, programs.Side] = dict.fromkeys("abc", Nothing())
    firsts = [order[0][0] for order in programs.alternate(sides, 6)]
    assert firsts == list("abcabc")
