"""Values and spaces as data: whatever goes in comes out, and nothing else gets through."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import hypothesis.extra.numpy as arrays
import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabox.integrations._msgpack import from_line, pack, to_line, unpack
from deltabox.integrations._spaces import built, described, parts
from deltabox.integrations._values import NotData, lift, lower

EXAMPLES = settings(deadline=None, max_examples=60)

DTYPES = (
    arrays.boolean_dtypes()
    | arrays.integer_dtypes(endianness="?")
    | arrays.unsigned_integer_dtypes(endianness="?")
    | arrays.floating_dtypes(endianness="?")
    | arrays.complex_number_dtypes(endianness="?")
    | arrays.datetime64_dtypes(endianness="?")
    | arrays.unicode_string_dtypes(endianness="?", min_len=1)
    | arrays.byte_string_dtypes(min_len=1)
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.flat[0])
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=4)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.binary())
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, with types; a NaN is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, np.generic):
        return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return bool(one == other)


def outwards(value: Any) -> Any:
    """From the program inside to the host, and the line that goes there."""
    return lift(msgspec.msgpack.decode(from_line(to_line(pack(lower(value))))))


def inwards(value: Any) -> Any:
    return lift(unpack(from_line(to_line(msgspec.msgpack.encode(lower(value))))))


@EXAMPLES
@given(VALUES)
def test_values_go_both_ways(value: Any) -> None:
    assert same(outwards(value), value)
    assert same(inwards(value), value)


@EXAMPLES
@given(st.binary())
def test_a_message_is_one_line(message: bytes) -> None:
    line = to_line(message)
    assert line.index(b"\n") == len(line) - 1
    assert from_line(line) == message


@pytest.mark.parametrize("size", [0, 1, 31, 32, 255, 256, 65535, 65536, 100_000])
def test_all_lengths(size: int) -> None:
    for value in ("x" * size, b"x" * size, [None] * size):
        assert unpack(msgspec.msgpack.encode(value)) == value
        assert msgspec.msgpack.decode(pack(value)) == value


@EXAMPLES
@given(st.integers(-(2**63), 2**64 - 1))
def test_all_numbers(number: int) -> None:
    assert unpack(msgspec.msgpack.encode(number)) == number


def test_what_is_derived_from_a_known_type_is_that_type() -> None:
    class Text(str):
        pass

    assert same(outwards(OrderedDict(b=1, a=Text("x"))), {"b": 1, "a": "x"})
    assert same(outwards(np.arange(6).reshape(2, 3).T), np.arange(6).reshape(2, 3).T.copy())
    assert same(outwards(np.float64(0.1)), np.float64(0.1))
    assert outwards(np.arange(3)).flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        np.array([object()]),
        np.zeros(2, "i4,f8"),
        np.zeros(2, "i4,f8")[0],
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=["object", "function", "objects", "records", "record", "masked"],
)
def test_what_cannot_be_told(value: Any) -> None:
    with pytest.raises(NotData, match="cannot be told as data"):
        lower(value)
    with pytest.raises(NotData, match=r"^\['a'\]\[1\]: "):
        lower({"a": (0, value)})


@pytest.mark.parametrize(
    "data",
    [
        [],
        ["z"],
        [["l"]],
        ["a", "O", [1], b"12345678"],
        ["a", "i4,f8", [1], b"123456789012"],
        ["a", "<i4", [1 << 40], b"1234"],
        ["a", "<i4", [-1], b""],
        ["a", "<i4", [0, 1 << 62, 1 << 62], b""],
        ["a", "<U0", [1 << 40], b""],
        ["a", "nonsense", [1], b"1"],
        ["a", "<i4", 1, b"1234"],
        ["n", "<i4", b"12345"],
        ["n", "O", b"12345678"],
        ["i", "__import__"],
        ["d", ["l"], 1],
        ["g", 1],
        ["c", "x"],
    ],
    ids=repr,
)
def test_what_stands_for_nothing(data: Any) -> None:
    with pytest.raises(NotData):
        lift(data)


@EXAMPLES
@given(st.binary(max_size=60))
def test_no_message_does_harm(message: bytes) -> None:
    try:
        unpack(message)
    except (ValueError, RecursionError):
        pass  # refused, and by nothing else


# -- spaces -----------------------------------------------------------------------------------

SIDES = arrays.array_shapes(max_dims=2, max_side=3)


def boxes() -> st.SearchStrategy[spaces.Box]:
    def box(dtype: str, shape: tuple[int, ...], low: int, size: int) -> spaces.Box:
        bounds = np.full(shape, low, dtype), np.full(shape, low + size, dtype)
        if dtype[0] == "f" and size == 3:
            bounds[1].flat[0] = np.inf
        return spaces.Box(*bounds, dtype=np.dtype(dtype).type)

    names = st.sampled_from(["float32", "float64", "float16", "uint8", "int16", "int64"])
    return st.builds(box, names, SIDES, st.integers(0, 50), st.integers(1, 50))


LEAVES = (
    boxes()
    | st.builds(
        lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
        st.integers(1, 90),
        st.integers(-30, 30),
        st.sampled_from([np.int64, np.int32, np.int8]),
    )
    | st.builds(
        lambda nvec, start: spaces.MultiDiscrete(nvec, start=start + 0 * nvec),
        arrays.arrays(np.int64, SIDES, elements=st.integers(1, 9)),
        st.integers(-5, 5),
    )
    | st.builds(spaces.MultiBinary, st.integers(1, 5) | SIDES.map(list))
    | st.builds(
        lambda least, more, charset: spaces.Text(
            least + more, min_length=least, charset=frozenset(charset)
        ),
        st.integers(0, 3),
        st.integers(1, 3),
        st.text(min_size=1, max_size=5),
    )
)
GRAPHS = st.builds(
    spaces.Graph,
    boxes() | st.builds(spaces.Discrete, st.integers(1, 5)),
    st.none() | boxes() | st.builds(spaces.Discrete, st.integers(1, 5)),
)
SPACES = st.recursive(
    LEAVES | GRAPHS,
    lambda inner: (
        st.lists(inner, max_size=3).map(spaces.Tuple)
        | st.lists(inner, min_size=1, max_size=3).map(spaces.OneOf)
        | st.dictionaries(st.text(), inner, max_size=3).map(
            lambda held: spaces.Dict(OrderedDict(held))
        )
        | st.builds(spaces.Sequence, inner)
    ),
    max_leaves=4,
)


def told(space: spaces.Space[Any]) -> spaces.Space[Any]:
    return built(outwards(described(space)))


@EXAMPLES
@given(SPACES, st.integers(0, 2**31))
def test_spaces_are_built_again(space: spaces.Space[Any], seed: int) -> None:
    again = told(space)
    assert again == space
    assert [type(part) for part in parts(again)] == [type(part) for part in parts(space)]
    space.seed(seed)
    again.seed(seed)
    sample = space.sample()
    assert again.contains(sample)
    assert pack(lower(again.sample())) == pack(lower(sample))
    assert again.contains(outwards(sample))


def test_the_order_of_a_dict_stays() -> None:
    space = spaces.Dict(OrderedDict(b=spaces.Discrete(2), a=spaces.Discrete(3)))
    again = told(space)
    assert isinstance(again, spaces.Dict)
    assert list(again.spaces) == ["b", "a"]


def test_stacked_sequences() -> None:
    space = spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True)
    assert told(space) == space


@pytest.mark.parametrize(
    "data",
    [
        {},
        None,
        {"kind": "Nothing"},
        {"kind": "Discrete", "n": -1},
        {"kind": "Box", "low": 0, "high": "x", "dtype": "f4"},
        {"kind": "Tuple", "spaces": [{"kind": "Box"}]},
    ],
    ids=repr,
)
def test_what_stands_for_no_space(data: Any) -> None:
    with pytest.raises(NotData, match="stands for no space"):
        built(data)
