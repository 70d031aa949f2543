"""Compare a restore through the store with one from a ready file.

A runner with 32 KB of KV per token holds a prefix of 4,000 tokens, 131 MB. In turns:

- `file`: llama-server restores the slot file that it saved itself, as it lies there;
- `store`: the blocks are fetched out of the store into a slot file, its frame is
  written, and llama-server restores that: what a turn of kvbus does.

Both restore into the same slot of the same process, from the same directory in
memory. After each the engine is asked for one token more: it must reuse the prefix.
The store's slot file is one that is kept for reuse, as in a proxy that runs; the
first restore, which has to allocate it, is reported apart.
"""

import asyncio
import mmap
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.results import Headline, Report, Spread
from proxy.blocks import BlockKey, Fingerprint
from proxy.errors import ConfigError, StoreError
from proxy.llamacpp import state
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.fingerprint import default_block_size
from proxy.llamacpp.slot_files import SlotDirectory
from proxy.prefix.hashing import TokenIds, hash_blocks
from proxy.reuse.restoring import fill
from proxy.store.base import BlockRef
from proxy.store.client import StoreClient
from proxy.store.options import StoreOptions
from proxy.store.supervisor import StoreSupervisor
from tests.e2e.processes import shm_dir
from tests.models import write_tiny_model
from tests.runners import running

DEADLINE_SECONDS = 30.0
STORE_BYTES = 512 << 20
SLOT = 0
NUM_HEADS = 8
FIRST_PLAIN_TOKEN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is restored, and how often."""

    num_layers: int
    num_tokens: int
    rounds: int


FULL = Size(num_layers=32, num_tokens=4000, rounds=25)
QUICK = Size(num_layers=4, num_tokens=1024, rounds=4)
GOAL = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The seconds of one restore through the store."""

    file: float
    """Keys are made and a file is found."""
    fetch: float
    """Blocks and frame are written into it."""
    engine: float
    total: float


class Bench:
    """A runner, a store that holds its prefix, and the file that it saved."""

    def __init__(
        self,
        *,
        client: LlamaServerClient,
        directory: SlotDirectory,
        store: StoreClient,
        token_ids: TokenIds,
    ) -> None:
        self._client = client
        self._directory = directory
        self._store = store
        self._token_ids = token_ids
        self._fingerprint = Fingerprint(secrets.token_bytes(32))
        self._ready_name = directory.new_name("ready")
        # set by `fill`
        self._layout: state.StateLayout | None = None
        self.block_size = 0
        self.file_bytes = 0

    @property
    def layout(self) -> state.StateLayout:
        """What the runner's slot files look like; known after `fill`."""
        assert self._layout is not None
        return self._layout

    @property
    def _keys(self) -> list[BlockKey]:
        return hash_blocks(
            self._token_ids, block_size=self.block_size, fingerprint=self._fingerprint
        )

    async def fill(self) -> None:
        """Prefill the prefix, save it, and put its blocks into the store."""
        await self._evaluate(self._token_ids, num_reused=0)
        saved = await self._client.save_slot(
            SLOT, self._ready_name, timeout_seconds=DEADLINE_SECONDS
        )
        assert saved.num_tokens == len(self._token_ids), saved
        self.file_bytes = saved.num_bytes
        path = self._directory.path / self._ready_name
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
        ):
            parsed = state.parse(view, saved.num_bytes)
            self._layout = parsed.layout
            self.block_size = default_block_size(parsed.layout.kv_bytes_per_token)
            outcome = await self._store.put_from(
                file.fileno(),
                state.block_layout(parsed, self.block_size),
                [BlockRef(key, index) for index, key in enumerate(self._keys)],
                fingerprint=self._fingerprint,
                deadline_seconds=DEADLINE_SECONDS,
            )
        assert outcome.stored_blocks == len(self._keys), outcome

    async def restore_file(self) -> float:
        """Restore from the ready file; returns the seconds."""
        started = time.perf_counter()
        await self._client.restore_slot(
            SLOT, self._ready_name, timeout_seconds=DEADLINE_SECONDS
        )
        return time.perf_counter() - started

    async def restore_store(self) -> Stages:
        """Restore through the store, as a turn does it."""
        started = time.perf_counter()
        keys = self._keys
        num_tokens = len(keys) * self.block_size
        file = await self._directory.acquire(state.file_bytes(self.layout, num_tokens))
        ready = time.perf_counter()
        arrived = await fill(
            file,
            state.frame_parts(self.layout, self._token_ids[:num_tokens]),
            self._store.get_into(
                file.fd,
                state.block_layout_for(
                    self.layout, num_tokens, block_size=self.block_size
                ),
                [BlockRef(key, index) for index, key in enumerate(keys)],
                fingerprint=self._fingerprint,
                deadline_seconds=DEADLINE_SECONDS,
            ),
        )
        assert all(arrived)
        fetched = time.perf_counter()
        await self._client.restore_slot(
            SLOT, file.name, timeout_seconds=DEADLINE_SECONDS
        )
        loaded = time.perf_counter()
        await self._directory.release(file)
        return Stages(
            file=ready - started,
            fetch=fetched - ready,
            engine=loaded - fetched,
            total=loaded - started,
        )

    async def check(self, num_reused: int) -> None:
        """Have the engine go on from what was restored, then empty the slot."""
        more = np.concatenate([self._token_ids, self._token_ids[:1]])
        await self._evaluate(more, num_reused=num_reused)
        await self._client.erase_slot(SLOT)

    async def _evaluate(self, token_ids: TokenIds, *, num_reused: int) -> None:
        body = {
            "prompt": np.ascontiguousarray(token_ids),
            "n_predict": 0,
            "id_slot": SLOT,
            "cache_prompt": True,
            "stream": True,
        }
        async with self._client.stream_completion("/completion", body) as events:
            async for event in events:
                if event.get("stop"):
                    assert event["timings"]["cache_n"] == num_reused, event["timings"]
                    return


@asynccontextmanager
async def _store(scratch: Path) -> AsyncIterator[tuple[StoreClient, str]]:
    """Run the embedded store, or one on disk where that does not start."""
    scratch.mkdir(mode=0o700)
    embedded = StoreOptions(
        runtime_dir=scratch,
        kind="embedded",
        ram_size_bytes=STORE_BYTES,
        linger_seconds=30.0,
    )
    disk = StoreOptions(
        runtime_dir=scratch,
        kind="disk",
        disk_dir=scratch / "blocks",
        disk_size_bytes=STORE_BYTES,
        linger_seconds=30.0,
    )
    supervisor = StoreSupervisor(embedded)
    try:
        await supervisor.start()
    except (ConfigError, StoreError) as exc:
        print(f"the embedded store does not start here ({exc}); a disk store is used")
        supervisor = StoreSupervisor(disk)
        await supervisor.start()
    try:
        yield supervisor.client, str((await supervisor.client.status())["kind"])
    finally:
        await supervisor.stop()


async def _measure(size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and what was measured."""
    with tempfile.TemporaryDirectory(prefix="kvbus-", dir=shm_dir()) as name:
        scratch = Path(name)
        model = write_tiny_model(
            scratch / "wide.gguf",
            seed=1,
            n_layer=size.num_layers,
            n_embd=NUM_HEADS * 32,
            n_head_kv=NUM_HEADS,
        )
        slots = scratch / "slots"
        flags = ("--slot-save-path", str(slots))
        with running(
            model, *flags, ctx_size=size.num_tokens + 256, parallel=1
        ) as runner:
            client = LlamaServerClient(url="http://runner", socket_path=runner.socket)
            chance = np.random.default_rng(1)
            async with _store(scratch / "store") as (store, kind):
                bench = Bench(
                    client=client,
                    directory=SlotDirectory(slots),
                    store=store,
                    token_ids=chance.integers(
                        FIRST_PLAIN_TOKEN, 250, size.num_tokens, dtype=np.int32
                    ),
                )
                await bench.fill()
                measured = await _take_turns(bench, size)
            await client.close()
    settings = {
        "store": kind,
        "num_tokens": size.num_tokens,
        "kv_bytes_per_token": bench.layout.kv_bytes_per_token,
        "block_size": bench.block_size,
        "file_bytes": bench.file_bytes,
        "rounds": size.rounds,
    }
    return settings, measured


async def _take_turns(bench: Bench, size: Size) -> dict[str, Any]:
    """Restore in both ways, again and again; who goes first changes."""
    await bench.restore_file()
    await bench.check(size.num_tokens)
    first = await bench.restore_store()
    await bench.check(size.num_tokens)
    files: list[float] = []
    stores: list[Stages] = []
    for number in range(size.rounds):
        for is_store in (False, True) if number % 2 else (True, False):
            if is_store:
                stores.append(await bench.restore_store())
            else:
                files.append(await bench.restore_file())
            await bench.check(size.num_tokens)
    ratios = [b.total / a for a, b in zip(files, stores, strict=True)]
    return {
        "file_seconds": asdict(Spread.of(files)),
        "store_seconds": _spreads(stores),
        "first_store_seconds": asdict(first),
        "store_over_file": asdict(Spread.of(ratios)),
    }


def _spreads(stores: Sequence[Stages]) -> dict[str, Any]:
    names = ("file", "fetch", "engine", "total")
    return {
        name: asdict(Spread.of([getattr(one, name) for one in stores]))
        for name in names
    }


def run(is_quick: bool) -> Report:
    """Measure and compare."""
    settings, found = asyncio.run(_measure(QUICK if is_quick else FULL))
    print(_detail(settings, found))
    megabytes = settings["file_bytes"] / 1e6
    what = f"restore of {megabytes:.0f} MB: {settings['store']} store over ready file"
    ratio = found["store_over_file"]["median"]
    return Report(
        benchmark="restore_path",
        settings=settings,
        results=found,
        summary=[
            # a small state says nothing about the goal, which is for 100 MB and more
            Headline(what=what, value=ratio, unit="x")
            if is_quick
            else results.at_most(what, ratio, "x", goal=GOAL)
        ],
    )


def _detail(settings: dict[str, Any], found: dict[str, Any]) -> str:
    spreads = {"ready file": found["file_seconds"]} | {
        f"{settings['store']} store, {name}": spread
        for name, spread in found["store_seconds"].items()
    }
    rows = [
        (
            name,
            *(f"{1e3 * one[key]:.1f}" for key in ("p25", "median", "p75")),
            f"{1e3 * found['first_store_seconds'][name.rpartition(' ')[2]]:.1f}"
            if name != "ready file"
            else "",
        )
        for name, one in spreads.items()
    ]
    title = f"{settings['num_tokens']} tokens, {settings['file_bytes'] / 1e6:.0f} MB"
    return results.table((f"{title}, ms", "p25", "median", "p75", "first"), rows)


if __name__ == "__main__":
    sys.exit(results.main("restore_path", run))
