"""Embeddings of one model, whatever its runners are.

The engine computes an embedding in any slot that is idle, in spite of `id_slot`, and
empties that slot first. Rules:
1. A chat model of ours has a process of its own for embeddings: the KV of its slots is
   never touched.
2. A given llama-server that does both makes embeddings only while nobody uses any of
   its slots; those that it took for them are emptied before their next use.
3. Many inputs go in batches. The engine works a batch off even when nobody waits for
   it any more, so a batch is small; other requests come between two of them.
4. An input is cut token by token, within the special tokens around it. Which length
   is too long the engine tells: without a complaint nothing is tokenized.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeVar

from proxy.errors import RequestError, UpstreamError
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.embeddings import (
    EmbeddingOptions,
    EngineEmbeddings,
    Input,
    InputTooLongError,
    check_makes_embeddings,
    embed,
)
from proxy.llamacpp.runner import Runner
from proxy.reuse.slots import SlotPool

MAX_BATCH_INPUTS = 64
MAX_BATCH_BYTES = 16384
"""Of the texts of a batch, unless it is one alone; some 4,000 tokens."""

MAX_CUTS = 4
"""How often inputs are cut before the engine's word is final."""

TOKEN_BYTES = 4
"""What a token id counts for where texts are counted in bytes."""

TOO_LONG = "the input length exceeds the context length"
NO_ROOM = "input after truncation exceeds maximum context length"


_Answer = TypeVar("_Answer")


class Runners(Protocol):
    """The runners of a model, as far as embeddings need them."""

    @property
    def pool(self) -> SlotPool:
        """Their slots."""
        ...

    @property
    def makes_embeddings_only(self) -> bool:
        """Whether no turn ever uses the slots."""
        ...

    def in_use(
        self, keep_alive_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Keep them loaded while the block runs, and after it for a while."""
        ...

    async def wait_ready(self) -> None:
        """Wait until one is ready. Raises UpstreamError when none will be."""
        ...

    async def ask(self, question: Callable[[Runner], Awaitable[_Answer]]) -> _Answer:
        """Ask any of them, the next one if one dies. Raises UpstreamError."""
        ...


class Embedder:
    """Makes embeddings with the runners of a model."""

    def __init__(self, runners: Runners) -> None:
        self._runners = runners
        # the mutable state
        self._batches: set[asyncio.Task[EngineEmbeddings]] = set()

    def in_use(
        self, keep_alive_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Keep its runners loaded while the block runs, and after it for a while."""
        return self._runners.in_use(keep_alive_seconds)

    async def wait_ready(self) -> None:
        """Wait until a runner is ready. Raises UpstreamError when none will be."""
        await self._runners.wait_ready()

    async def embed(
        self, inputs: Sequence[Input], options: EmbeddingOptions
    ) -> EngineEmbeddings:
        """Make one embedding for each input, in their order.

        Raises RequestError (400) for an input that is too long, UpstreamError.
        """
        made: list[EngineEmbeddings] = []
        for batch in batches(inputs):
            question = partial(self._embed_in, inputs=batch, options=options)
            made.append(await self._runners.ask(question))
        return EngineEmbeddings(
            tuple(vector for part in made for vector in part.vectors),
            sum(part.num_tokens for part in made),
        )

    async def _embed_in(
        self, runner: Runner, inputs: Sequence[Input], options: EmbeddingOptions
    ) -> EngineEmbeddings:
        if self._runners.makes_embeddings_only:
            return await embed_fitting(runner.client, inputs, options)
        await check_makes_embeddings(runner.client)
        # not cancelled: the engine goes on as well, and takes slots for it
        batch = asyncio.create_task(self._embed_alone(runner, inputs, options))
        self._batches.add(batch)
        batch.add_done_callback(self._note_end)
        return await asyncio.shield(batch)

    def _note_end(self, batch: asyncio.Task[EngineEmbeddings]) -> None:
        """Forget a batch, and what became of it if nobody waits any more."""
        self._batches.discard(batch)
        if not batch.cancelled():
            batch.exception()

    async def _embed_alone(
        self, runner: Runner, inputs: Sequence[Input], options: EmbeddingOptions
    ) -> EngineEmbeddings:
        """Make embeddings while no turn uses the runner's slots."""
        async with self._runners.pool.lease_all(runner) as slots:
            before = await _tasks(runner.client)
            try:
                return await embed_fitting(runner.client, inputs, options)
            finally:
                after = await _tasks(runner.client)
                for slot in slots:
                    number = slot.slot_id
                    is_known = number in before and number in after
                    if not is_known or before[number] != after[number]:
                        slot.forget()  # an input is of no namespace


async def embed_fitting(
    client: LlamaServerClient, inputs: Sequence[Input], options: EmbeddingOptions
) -> EngineEmbeddings:
    """Make embeddings of inputs that are cut as far as the runner wants it.

    Raises RequestError (400), UpstreamError.
    """
    bound = options.max_tokens
    for _ in range(MAX_CUTS):
        if bound is not None:
            inputs = [
                await fit(client, item, bound, truncates=options.truncates)
                for item in inputs
            ]
        try:
            return await embed(client, inputs, is_raw=options.is_raw)
        except InputTooLongError as exc:
            if not options.truncates:
                raise RequestError(400, TOO_LONG) from exc
            told = exc.max_tokens
            bound = told if bound is None else min(told, bound - 1)
    raise RequestError(400, TOO_LONG)


async def fit(
    client: LlamaServerClient, item: Input, bound: int, *, truncates: bool
) -> Input:
    """Return an input as it is, or what of its tokens fits. Raises RequestError."""
    if isinstance(item, str):
        full: Sequence[int] = (await client.tokenize(item, add_special=True)).tolist()
    else:
        full = item
    if len(full) <= bound:
        return item
    if not truncates:
        raise RequestError(400, TOO_LONG)
    if isinstance(item, str):
        plain = (await client.tokenize(item, add_special=False)).tolist()
        return cut(full, plain, bound)
    return cut(full, full, bound)


def cut(full: Sequence[int], plain: Sequence[int], bound: int) -> list[int]:
    """Cut the end of a text's tokens off, but not of the special ones around it.

    `plain` is the same without those. Raises RequestError (400) if nothing is left.

    >>> cut([101, 7, 8, 9, 102], [7, 8, 9], 4)
    [101, 7, 8, 102]
    """
    num_added = len(full) - len(plain)
    num_before = next(
        (
            start
            for start in range(num_added + 1)
            if full[start : start + len(plain)] == plain
        ),
        num_added,
    )
    num_after = num_added - num_before
    if bound <= num_added:
        raise RequestError(400, NO_ROOM)
    return [*full[: bound - num_after], *full[len(full) - num_after :]]


def batches(inputs: Sequence[Input]) -> Iterator[Sequence[Input]]:
    """Cut inputs into batches that the engine works off in a moment.

    >>> [len(batch) for batch in batches(["a" * 10_000] * 3 + ["b"] * 70)]
    [1, 1, 64, 7]
    """
    start = num_bytes = 0
    for stop, item in enumerate(inputs):
        size = len(item.encode()) if isinstance(item, str) else TOKEN_BYTES * len(item)
        num_bytes += size
        is_full = stop - start == MAX_BATCH_INPUTS or num_bytes > MAX_BATCH_BYTES
        if is_full and stop > start:
            yield inputs[start:stop]
            start, num_bytes = stop, size
    if start < len(inputs):
        yield inputs[start:]


async def _tasks(client: LlamaServerClient) -> dict[int, object]:
    """Return the last task of each slot; nothing of servers that do not tell."""
    try:
        return {int(slot["id"]): slot.get("id_task") for slot in await client.slots()}
    except UpstreamError:
        return {}
