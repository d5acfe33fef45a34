"""The two views of a program, records.py and interpreter.c, agree; programs place themselves."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltabox.deltacr
from deltabox.deltacr import records
from deltabox.deltacr.records import MAY_FAIL, Op, Program

SOURCE = Path(deltabox.deltacr.__file__).with_name("interpreter.c")


def test_layout_matches_the_interpreter(tmp_path: Path) -> None:
    facts = {
        "sizeof(struct record)": records.RECORD_SIZE,
        "sizeof(struct header)": records.HEADER_SIZE,
        "__builtin_offsetof(struct header, budget)": records.BUDGET_OFFSET,
        "__builtin_offsetof(struct header, variables)": records.VARIABLES_OFFSET,
        "OURS": records.OURS,
        "STACKS": records.STACKS,
        "STACKS_SIZE": records.STACKS_SIZE,
        "SCRATCH": records.SCRATCH,
        "MAY_FAIL": records.MAY_FAIL,
        "LATE": records.LATE,
        **{f"OP_{op.name}": op.value for op in Op},
    }
    check = tmp_path / "check.c"
    lines = [f'#include "{SOURCE}"']
    lines += [f'_Static_assert({name} == {value}UL, "{name}");' for name, value in facts.items()]
    check.write_text("\n".join(lines) + "\n")
    result = subprocess.run(
        ["cc", "-std=gnu11", "-ffreestanding", "-fsyntax-only", "-mgeneral-regs-only", str(check)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_the_last_operation_is_known_to_both() -> None:
    declared = SOURCE.read_text().split("enum op {")[1].split("}")[0]
    names = [name.strip().removeprefix("OP_") for name in declared.split(",") if name.strip()]
    assert names == [op.name for op in sorted(Op)]


def test_a_program_holds_no_address_of_its_own() -> None:
    program = Program("one")
    text = program.text("hello")
    child = program.sequence("child")
    program.root.call(1, program.inputs["one"], text, 5, may_fail=True, what="write")
    program.root.clone(program.clone_args(flags=0, stack=program.stack(), pid=7), child)
    child.call(60, 0)
    sealed = program.seal()
    low, size, first = sealed.place(1)
    high, _, other = sealed.place(9)
    assert high - low == 8 * records.SLOT
    assert len(sealed.content) <= size
    differing = {at for at, _ in set(first) ^ set(other)}
    slots = {records.VARIABLES_OFFSET + 8 * v for v in sealed.slot_variables}
    assert differing <= slots
    assert {at for at, _ in first} == slots
    assert sealed.records == 2
    assert sealed.content[sealed.entry :][2] & MAY_FAIL == 0


@given(st.lists(st.binary(max_size=40).filter(lambda b: b"\0" not in b), max_size=20))
def test_vectors_point_at_their_strings(strings: list[bytes]) -> None:
    """Executing the prologue by hand gives a NULL-terminated array of the strings."""
    program = Program()
    vector = program.vector(strings)
    sealed = program.seal()
    memory = bytearray(sealed.content)
    position = sealed.entry
    while True:
        record = struct.unpack_from("<HHHhIHH6Q", memory, position)
        if record[0] != Op.STORE:
            break
        assert record[5] == 3  # both arguments are offsets into the control memory
        struct.pack_into("<Q", memory, record[7], record[8])
        position += records.RECORD_SIZE
    found = []
    at = vector.offset
    while pointer := struct.unpack_from("<Q", memory, at)[0]:
        found.append(bytes(memory[pointer : memory.index(0, pointer)]))
        at += 8
    assert found == strings


def test_too_many_variables_is_an_error() -> None:
    program = Program()
    with pytest.raises(ValueError, match="variables"):
        for _ in range(records.VARIABLES + 1):
            program.variable()
