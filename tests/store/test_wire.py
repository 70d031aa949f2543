"""The frames between proxy and store, whole, cut and damaged; pure."""

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.blocks import BlockKey, BlockLayout, Fingerprint, RowRun
from proxy.store.base import BlockRef, PutOptions
from proxy.store.wire import (
    MAX_FRAME_BYTES,
    FrameReader,
    WireError,
    keys_to_wire,
    pack_frame,
    parse_bools,
    parse_keys,
    parse_put_options,
    parse_put_outcome,
    parse_transfer,
    put_options_to_wire,
    transfer_to_wire,
)

runs = st.builds(
    RowRun,
    offset=st.integers(0, 1 << 40),
    stride=st.integers(0, 1 << 40),
    count=st.integers(1, 1 << 16),
    piece_bytes=st.integers(1, 1 << 30),
)
layouts = st.builds(
    BlockLayout,
    runs=st.lists(runs, min_size=1, max_size=5).map(tuple),
    num_blocks=st.integers(1, 1000),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(layout=layouts, seed=st.integers(0, 255), count=st.integers(0, 20))
def test_transfers_arrive_as_they_were_sent(
    layout: BlockLayout, seed: int, count: int
) -> None:
    """Layout, keys, places, fingerprint and deadline survive the wire."""
    count = min(count, layout.num_blocks)
    blocks = tuple(BlockRef(BlockKey(bytes([seed, i]) * 16), i) for i in range(count))
    fingerprint = Fingerprint(bytes([seed]) * 32)
    sent = transfer_to_wire(
        layout, blocks, fingerprint=fingerprint, deadline_seconds=0.25
    )
    (message,) = FrameReader().feed(pack_frame(sent))
    found = parse_transfer(message)
    assert (found.layout, found.blocks) == (layout, blocks)
    assert (found.fingerprint, found.deadline_seconds) == (fingerprint, 0.25)


@given(
    values=st.lists(st.integers(0, 1000), max_size=6),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_frames_may_arrive_in_any_pieces(values: list[int], cuts: list[int]) -> None:
    """Messages come out whole and in order, however the stream is cut."""
    stream = b"".join(pack_frame({"id": value}) for value in values)
    reader, found = FrameReader(), []
    for cut in [*cuts, len(stream)]:
        found += list(reader.feed(stream[:cut]))
        stream = stream[cut:]
    assert [message["id"] for message in found] == values


@settings(max_examples=300)
@given(
    message=st.fixed_dictionaries(
        {},
        optional={
            "layout": json_values
            | st.fixed_dictionaries({"runs": json_values, "num_blocks": json_values}),
            "keys": json_values | st.just(["ab" * 32]),
            "indexes": json_values | st.just([0]),
            "fingerprint": json_values | st.just("cd" * 32),
            "deadline_seconds": json_values,
        },
    )
)
def test_a_damaged_transfer_raises_only_wire_errors(message: dict[str, object]) -> None:
    """Whatever JSON arrives, the parser never fails in another way."""
    with contextlib.suppress(WireError):
        parse_transfer(message)


@given(data=st.binary(max_size=200))
def test_noise_raises_only_wire_errors(data: bytes) -> None:
    """Bytes that are no frames are told as such, or waited on."""
    with contextlib.suppress(WireError):
        assert all(isinstance(m, dict) for m in FrameReader().feed(data))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("indexes", [4], "outside"),
        ("indexes", [-1], "outside"),
        ("indexes", [True], "outside"),
        ("indexes", [0, 1], "one index"),
        ("keys", ["ab"], "32 bytes"),
        ("keys", ["zz" * 32], "hex"),
        ("fingerprint", "ab", "32 bytes"),
        ("deadline_seconds", None, "deadline"),
        ("deadline_seconds", 0, "deadline"),
        ("deadline_seconds", 1e9, "deadline"),
        ("layout", {"num_blocks": 4, "runs": [[0, 0, 1 << 30, 1]]}, "pieces"),
        ("layout", {"num_blocks": 1, "runs": []}, "run"),
        ("layout", {"num_blocks": 1, "runs": [[0, 0, 0, 0]]}, "byte"),
        ("layout", {"num_blocks": 1, "runs": [[0, -1, 1, 1]]}, "four sizes"),
        ("layout", {"num_blocks": 1, "runs": [[1 << 60, 1, 1, 1]]}, "four sizes"),
    ],
)
def test_wrong_values_are_named(field: str, value: object, text: str) -> None:
    """Each wrong field is refused with a line that says which."""
    message = transfer_to_wire(
        BlockLayout((RowRun(0, 64, 2, 8),), num_blocks=4),
        [BlockRef(BlockKey(b"k" * 32), 0)],
        fingerprint=Fingerprint(b"f" * 32),
        deadline_seconds=1,
    )
    parse_transfer(message)
    with pytest.raises(WireError, match=text):
        parse_transfer({**message, field: value})


@pytest.mark.parametrize("replica_num", [1, 2, 8])
@pytest.mark.parametrize("soft_pin", [False, True])
def test_options_of_a_put_arrive(replica_num: int, soft_pin: bool) -> None:
    """What one side says the other side reads."""
    options = PutOptions(replica_num=replica_num, soft_pin=soft_pin)
    assert parse_put_options(put_options_to_wire(options)) == options


@pytest.mark.parametrize(
    "change",
    [
        {"replica_num": 0},
        {"replica_num": 9},
        {"replica_num": True},
        {"replica_num": "1"},
        {"soft_pin": 1},
        {"soft_pin": None},
    ],
)
def test_wrong_options_of_a_put_are_refused(change: dict[str, object]) -> None:
    """A number of copies within bounds, and a boolean: nothing else."""
    with pytest.raises(WireError, match="cop"):
        parse_put_options({**put_options_to_wire(PutOptions()), **change})


def test_two_blocks_cannot_have_one_place() -> None:
    """One index twice is refused: the later would overwrite the earlier."""
    message = transfer_to_wire(
        BlockLayout((RowRun(0, 64, 2, 8),), num_blocks=4),
        [BlockRef(BlockKey(b"k" * 32), 1), BlockRef(BlockKey(b"l" * 32), 1)],
        fingerprint=Fingerprint(b"f" * 32),
        deadline_seconds=1,
    )
    with pytest.raises(WireError, match="one place"):
        parse_transfer(message)


def test_answers_are_checked() -> None:
    """Keys, booleans and counts of an answer are what they should be, or refused."""
    keys = [BlockKey(bytes([i]) * 32) for i in range(3)]
    assert parse_keys(keys_to_wire(keys)) == keys
    assert parse_bools([True, False], 2) == [True, False]
    for value in ([True], [1, 0], None):
        with pytest.raises(WireError):
            parse_bools(value, 2)
    with pytest.raises(WireError):
        parse_put_outcome({"stored_blocks": 1})
    with pytest.raises(WireError):
        parse_keys("ab")


def test_too_long_frames_are_refused_on_both_sides() -> None:
    """A frame beyond the limit is neither sent nor waited for."""
    with pytest.raises(WireError, match="too long"):
        pack_frame({"text": "x" * MAX_FRAME_BYTES})
    with pytest.raises(WireError, match="frame of"):
        list(FrameReader().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))
