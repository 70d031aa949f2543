"""Measures how fast blocks move between store and slot file, beside plain memcpy.

    python -m benchmarks.store_transfer --json results.json
    python -m benchmarks.store_transfer --layout elements --block-size 64

A prefix of a 7B model (28 layers, K and V of 1,024-byte rows, blocks of 32 tokens: 56
pieces of 32 KiB; or V element by element, as with flash attention off: 28 pieces of
32 KiB and 14,336 of 64 bytes) is put out of a mapped save file and got into a mapped
slot file that is faulted in already: the whole way, client -> store process -> slot
file, checksums included. Columns, in GB/s (10^9 bytes), each round all of them in turn,
since machines are noisy; ratios are taken within a round:

    memcpy        one thread, contiguous, into the same slot file
    staged        memcpy into a staging buffer, then a numpy scatter into the slot file
    get xN, put   through a store process that copies with N threads
    inside: ...   within a process that owns the segments, one thread: the library's
                  own multi-buffer get (nothing verified), and ours
"""

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxy.blocks import BlockKey, BlockLayout, Fingerprint, RowRun
from proxy.store.backend import CopyThreads, Transfer
from proxy.store.base import BlockRef
from proxy.store.client_facts import ClientTiming
from proxy.store.envelope import HEADER_BYTES, Bytes
from proxy.store.mooncake import MAX_BLOCKS, MAX_PIECES, name_of
from proxy.store.mooncake_watch import MooncakeWatch
from proxy.store.options import StoreOptions
from proxy.store.slotview import SlotView, part_bytes_for
from proxy.store.supervisor import StoreSupervisor

LAYERS, ROW_BYTES, ELEMENT_BYTES = 28, 1024, 2
PART_BYTES = part_bytes_for(1)
FINGERPRINT = Fingerprint(b"b" * 32)
Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Prefix:
    """What is moved: so many bytes of K and V of a 7B model, and how they lie."""

    num_bytes: int
    block_size: int
    is_by_element: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return 2 * LAYERS * ROW_BYTES * self.block_size

    @property
    def num_blocks(self) -> int:
        """How many blocks have so many bytes."""
        return -(-self.num_bytes // self.block_bytes)

    def layout(self) -> BlockLayout:
        """Return where the blocks lie in a slot file."""
        num_tokens = self.num_blocks * self.block_size
        layer = num_tokens * ROW_BYTES + 12
        rows = self.block_size * ROW_BYTES
        v_start = 4096 + LAYERS * layer + 16
        v_runs = [RowRun(v_start, layer, LAYERS, rows)]
        if self.is_by_element:
            v_runs = [
                RowRun(
                    v_start + number * layer,
                    num_tokens * ELEMENT_BYTES,
                    ROW_BYTES // ELEMENT_BYTES,
                    self.block_size * ELEMENT_BYTES,
                )
                for number in range(LAYERS)
            ]
        return BlockLayout(
            (RowRun(4096, layer, LAYERS, rows), *v_runs), self.num_blocks
        )


def make_refs(num_blocks: int, name: str) -> list[BlockRef]:
    """Return keys that no other round uses."""
    return [
        BlockRef(BlockKey(f"{name}{i}".encode().ljust(32, b".")), i)
        for i in range(num_blocks)
    ]


def make_file(size: int) -> tuple[int, Bytes]:
    """Return a memfd and its mapping, faulted in and full of noise."""
    fd = os.memfd_create("slot")
    os.ftruncate(fd, size)
    memory: Bytes = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    noise = np.random.default_rng(1).integers(0, 256, 1 << 24, dtype=np.uint8)
    for start in range(0, size, noise.size):
        part = memory[start : start + noise.size]
        part[:] = noise[: part.size]
    return fd, memory


def rate(num_bytes: int, work: Callable[[], object]) -> float:
    """Return GB/s of one run of `work`."""
    started = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - started) / 1e9


def store_options(folder: Path, prefix: Prefix, copy_threads: int) -> StoreOptions:
    """Return options of a store with room for twice the prefix."""
    segment = 256 << 20
    need = 4 * prefix.num_blocks * (prefix.block_bytes + 4096)
    return StoreOptions(
        runtime_dir=folder / f"run{copy_threads}",
        ram_size_bytes=(-(-need // segment) + 2) * segment,
        segment_bytes=segment,
        copy_threads=copy_threads,
        linger_seconds=30,
    )


async def measure(
    folder: Path, prefix: Prefix, rounds: int, threads: list[int]
) -> Rates:
    """Return the rates of all rounds, through store processes and beside them."""
    layout, num_blocks = prefix.layout(), prefix.num_blocks
    block_bytes, total = prefix.block_bytes, num_blocks * prefix.block_bytes
    save_fd, save = make_file(layout.end)
    slot_fd, slot = make_file(layout.end)
    view, staging = (
        SlotView(slot, layout, part_bytes=PART_BYTES),
        np.zeros(64 * block_bytes, dtype=np.uint8),
    )
    rates: Rates = {}
    supervisors: dict[int, StoreSupervisor] = {}
    for count in threads:
        supervisors[count] = StoreSupervisor(store_options(folder, prefix, count))
        # This process blocks its own loop; no circuit is to open because of that.
        supervisors[count].client.timing = ClientTiming(missed_beats=1000)
        await supervisors[count].start()

    def staged() -> None:
        for index in range(num_blocks):
            at = index % 64 * block_bytes
            block = staging[at : at + block_bytes]
            block[:] = save[index * block_bytes : (index + 1) * block_bytes]
            view.scatter(index, block)

    def note(name: str, value: float) -> None:
        rates.setdefault(name, []).append(value)

    try:
        for number in range(-1, rounds):  # round -1 warms up: segments, mappings
            refs = make_refs(num_blocks, f"{max(number, 0) % 2}-{number < 0}-")
            measured: dict[str, float] = {
                "memcpy": rate(total, lambda: np.copyto(slot[:total], save[:total])),
                "staged": rate(total, staged),
            }
            for count, supervisor in supervisors.items():
                client = supervisor.client
                keys = [ref.key for ref in refs]
                await client.remove(keys, deadline_seconds=10)
                started = time.perf_counter()
                outcome = await client.put_from(
                    save_fd, layout, refs, fingerprint=FINGERPRINT, deadline_seconds=60
                )
                put_seconds = time.perf_counter() - started
                if outcome.stored_blocks != num_blocks:
                    raise RuntimeError(f"put failed: {outcome}")
                started = time.perf_counter()
                filled = await client.get_into(
                    slot_fd, layout, refs, fingerprint=FINGERPRINT, deadline_seconds=60
                )
                get_seconds = time.perf_counter() - started
                if not all(filled):
                    raise RuntimeError("blocks are missing")
                measured[f"get x{count}"] = total / get_seconds / 1e9
                measured[f"put x{count}"] = total / put_seconds / 1e9
            if number >= 0:
                for name, value in measured.items():
                    note(name, value)
    finally:
        for supervisor in supervisors.values():
            await supervisor.stop()
    return rates


def measure_inside(folder: Path, prefix: Prefix, rounds: int) -> Rates:
    """Return rates within a process that owns the segments, with one thread."""
    layout, num_blocks = prefix.layout(), prefix.num_blocks
    total = num_blocks * prefix.block_bytes
    _, save = make_file(layout.end)
    _, slot = make_file(layout.end)
    view = SlotView(slot, layout, part_bytes=PART_BYTES)
    watch = MooncakeWatch(store_options(folder, prefix, 1), CopyThreads(1))
    watch.open()
    backend, refs = watch.backend, make_refs(num_blocks, "inside")
    give_up_at = time.monotonic() + 600

    def transfer(place: SlotView) -> Transfer:
        return Transfer(
            slot=place,
            blocks=tuple(refs),
            fingerprint=FINGERPRINT,
            give_up_at=give_up_at,
        )

    backend.put(transfer(SlotView(save, layout, part_bytes=PART_BYTES)))
    handle = watch.handle
    if handle is None:
        raise RuntimeError("no Mooncake client")
    header = np.zeros(HEADER_BYTES, dtype=np.uint8)
    batch = min(MAX_BLOCKS, MAX_PIECES // (layout.pieces_per_block + 1))

    places = [
        [(slot.ctypes.data + start, size) for start, size in layout.pieces(ref.index)]
        for ref in refs
    ]
    pointers = [[header.ctypes.data, *(p for p, _ in pieces)] for pieces in places]
    sizes = [[HEADER_BYTES, *(size for _, size in pieces)] for pieces in places]

    def library() -> None:
        for start in range(0, num_blocks, batch):
            stop = start + batch
            handle.get(
                [name_of(ref.key) for ref in refs[start:stop]],
                pointers[start:stop],
                sizes[start:stop],
            )

    works: dict[str, Callable[[], object]] = {
        "inside: memcpy": lambda: np.copyto(slot[:total], save[:total]),
        "inside: get": lambda: backend.get(transfer(view)),
    }
    if batch:  # the library stands only so many pieces
        works["inside: library"] = library
    rates: Rates = {}
    for number in range(-1, rounds):
        for name, work in works.items():
            value = rate(total, work)
            if number >= 0:
                rates.setdefault(name, []).append(value)
    watch.close()
    return rates


def print_table(rates: Rates) -> None:
    """Print medians, spread, and ratios to memcpy within each round."""
    print(
        f"{'':24}{'GB/s':>7}{'min':>7}{'max':>7}{'of memcpy':>11}{'min':>6}{'max':>6}"
    )
    for name, values in rates.items():
        base = rates["inside: memcpy" if name.startswith("inside") else "memcpy"]
        ratios = [value / plain for value, plain in zip(values, base, strict=True)]
        print(
            f"{name:24}{statistics.median(values):7.2f}{min(values):7.2f}"
            f"{max(values):7.2f}{statistics.median(ratios):11.2f}"
            f"{min(ratios):6.2f}{max(ratios):6.2f}"
        )


def main() -> None:
    """Measure and print; with --json also write everything that was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rates of all rounds here")
    parser.add_argument("--mib", type=int, default=1024, help="size of the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2,4", help="copy threads to compare")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=("rows", "elements"), default="rows")
    parser.add_argument("--block-size", type=int, default=32, help="in tokens")
    options = parser.parse_args()
    prefix = Prefix(options.mib << 20, options.block_size, options.layout == "elements")
    if options.inside:
        rates = measure_inside(options.inside, prefix, options.rounds)
        print(json.dumps(rates))
        sys.stdout.flush()
        os._exit(0)  # threads of the library may outlive their master
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        threads = [int(text) for text in options.threads.split(",")]
        rates = asyncio.run(measure(folder, prefix, options.rounds, threads))
        inside = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.store_transfer", "--inside", name),
                *("--mib", str(options.mib), "--rounds", str(options.rounds)),
                *("--layout", options.layout),
                *("--block-size", str(options.block_size)),
            ],
            stdout=subprocess.PIPE,
            check=True,
        )
        rates |= json.loads(inside.stdout.splitlines()[-1])
    print(
        f"{prefix.num_blocks} blocks of {prefix.block_bytes} bytes, V in "
        f"{options.layout}, {options.rounds} rounds, "
        f"{os.cpu_count()} CPUs"
    )
    print_table(rates)
    if options.json:
        result = {
            "blocks": prefix.num_blocks,
            "block_bytes": prefix.block_bytes,
            "block_size": prefix.block_size,
            "layout": options.layout,
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "gigabytes_per_second": rates,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
