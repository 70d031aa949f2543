"""What proxy and store process say to each other over the unix socket.

A frame is a little-endian u32 length and that many bytes of one JSON object. A
request carries `id` and `op`; its answer carries the same `id`, and either `error`
(one line) or the values of the operation. Answers come in any order.

    hello   {pid, version}                        -> what the store is
    ping                                          -> {} at once, whatever goes on
    contains{keys}                                -> {found: [bool]}
    get/put {fingerprint, layout, keys, indexes,  -> {filled: [bool]} / the counts of
             deadline_seconds} + 1 descriptor;       a PutOutcome
             put: {replica_num, soft_pin} as well
    remove  {keys}                                -> {removed}
    status                                        -> {status: {...}}
    bye                                           -> {clients: how many others}

Rules:
1. No KV and no token passes here: a slot file travels as a descriptor (SCM_RIGHTS)
   with the first byte of its frame, and keys are hashes, written in hex.
2. Whatever does not parse raises `WireError`; its connection is then of no use.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.blocks import (
    BLOCK_KEY_BYTES,
    BlockKey,
    BlockLayout,
    Fingerprint,
    RowRun,
)
from proxy.errors import StoreError
from proxy.store.base import BlockRef, PutOptions, PutOutcome

WIRE_VERSION = 2
MAX_FRAME_BYTES = 8 << 20
"""About 100,000 keys; a longer frame is garbage."""
MAX_RUNS = 16384
"""Element-major V has one run a layer; no model has as many."""
MAX_PIECES = 1 << 20
"""Of one block."""
MAX_DEADLINE_SECONDS = 3600.0
MAX_OFFSET = 1 << 48
"""No file is larger, and sums of such numbers fit into 64 bits."""

_LENGTH = struct.Struct("<I")


class WireError(StoreError):
    """The other side sent something that is not of this protocol."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """The arguments of a get or a put, without the slot file."""

    layout: BlockLayout
    blocks: tuple[BlockRef, ...]
    fingerprint: Fingerprint
    deadline_seconds: float


def pack_frame(message: Mapping[str, Any]) -> bytes:
    """Return `message` as one frame. Raises WireError when it is too long."""
    body = orjson.dumps(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a request of {len(body)} bytes is too long: make it smaller")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that `data` completes. Raises WireError."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = orjson.loads(body)
            except orjson.JSONDecodeError as exc:
                raise WireError("frame is not JSON") from exc
            if not isinstance(message, dict):
                raise WireError("frame is not a JSON object")
            yield message


def keys_to_wire(keys: Sequence[BlockKey]) -> list[str]:
    """Return keys in hex."""
    return [key.hex() for key in keys]


def parse_keys(value: object) -> list[BlockKey]:
    """Read what `keys_to_wire` made. Raises WireError."""
    if not isinstance(value, list):
        raise WireError("keys are not a list")
    try:
        keys = [bytes.fromhex(text) for text in value]
    except (TypeError, ValueError) as exc:
        raise WireError("a key is not hex") from exc
    if any(len(key) != BLOCK_KEY_BYTES for key in keys):
        raise WireError(f"a key has {BLOCK_KEY_BYTES} bytes")
    return [BlockKey(key) for key in keys]


def transfer_to_wire(
    layout: BlockLayout,
    blocks: Sequence[BlockRef],
    *,
    fingerprint: Fingerprint,
    deadline_seconds: float,
) -> dict[str, Any]:
    """Return the arguments of a get or a put as JSON-ready values."""
    return {
        "fingerprint": fingerprint.hex(),
        "layout": {
            "num_blocks": layout.num_blocks,
            "runs": [
                [run.offset, run.stride, run.count, run.piece_bytes]
                for run in layout.runs
            ],
        },
        "keys": [block.key.hex() for block in blocks],
        "indexes": [block.index for block in blocks],
        "deadline_seconds": deadline_seconds,
    }


def parse_transfer(message: Mapping[str, Any]) -> TransferRequest:
    """Read what `transfer_to_wire` made, checked against itself. Raises WireError."""
    keys = parse_keys(message.get("keys"))
    layout = _parse_layout(message.get("layout"))
    indexes = message.get("indexes")
    if not isinstance(indexes, list) or len(indexes) != len(keys):
        raise WireError("not one index for each key")
    if any(type(i) is not int or not 0 <= i < layout.num_blocks for i in indexes):
        raise WireError("a block index lies outside of the layout")
    if len(set(indexes)) != len(indexes):
        raise WireError("two blocks claim one place")
    try:
        fingerprint = bytes.fromhex(message["fingerprint"])
        deadline_seconds = float(message["deadline_seconds"])
    except (KeyError, TypeError, ValueError) as exc:
        raise WireError("fingerprint or deadline missing") from exc
    if not 0 < deadline_seconds <= MAX_DEADLINE_SECONDS:
        raise WireError("a deadline lies within the next hour")
    if len(fingerprint) != BLOCK_KEY_BYTES:
        raise WireError(f"a fingerprint has {BLOCK_KEY_BYTES} bytes")
    return TransferRequest(
        layout=layout,
        blocks=tuple(map(BlockRef, keys, indexes)),
        fingerprint=Fingerprint(fingerprint),
        deadline_seconds=deadline_seconds,
    )


def put_options_to_wire(options: PutOptions) -> dict[str, Any]:
    """Return what a put says beyond the arguments of a transfer."""
    return {"replica_num": options.replica_num, "soft_pin": options.soft_pin}


def parse_put_options(message: Mapping[str, Any]) -> PutOptions:
    """Read what `put_options_to_wire` made. Raises WireError."""
    replica_num, soft_pin = message.get("replica_num"), message.get("soft_pin")
    if type(replica_num) is not int or type(soft_pin) is not bool:
        raise WireError("a put has a number of copies and says whether to pin them")
    try:
        return PutOptions(replica_num=replica_num, soft_pin=soft_pin)
    except ValueError as exc:
        raise WireError(str(exc)) from exc


def _parse_layout(value: object) -> BlockLayout:
    if not isinstance(value, dict):
        raise WireError("layout missing")
    runs, num_blocks = value.get("runs"), value.get("num_blocks")
    if not isinstance(runs, list) or not 0 < len(runs) <= MAX_RUNS:
        raise WireError("a layout has at least one run")
    if type(num_blocks) is not int or not 0 <= num_blocks < MAX_OFFSET:
        raise WireError("a layout has a number of blocks")
    parsed: list[RowRun] = []
    for run in runs:
        if (
            not isinstance(run, list)
            or len(run) != 4
            or any(type(n) is not int or not 0 <= n < MAX_OFFSET for n in run)
        ):
            raise WireError("a run has four sizes")
        try:
            parsed.append(RowRun(*run))
        except ValueError as exc:
            raise WireError(str(exc)) from exc
    if sum(run.count for run in parsed) > MAX_PIECES:
        raise WireError("a block of so many pieces is none")
    return BlockLayout(runs=tuple(parsed), num_blocks=num_blocks)


def parse_bools(value: object, count: int) -> list[bool]:
    """Read one boolean for each of `count` keys. Raises WireError."""
    if (
        not isinstance(value, list)
        or len(value) != count
        or any(type(item) is not bool for item in value)
    ):
        raise WireError("not one boolean for each key")
    return value


def parse_put_outcome(message: Mapping[str, Any]) -> PutOutcome:
    """Read the counts of a put. Raises WireError."""
    try:
        return PutOutcome(
            stored_blocks=int(message["stored_blocks"]),
            present_blocks=int(message["present_blocks"]),
            failed_blocks=int(message["failed_blocks"]),
            stored_bytes=int(message["stored_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise WireError("an answer to a put lacks its counts") from exc
