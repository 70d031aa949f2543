"""How a proxy asks a block store: `StoreClient`, a `BlockStore` on the event loop.

Rules:
1. No call outlives its deadline, and none waits for a store that is known to be away
   (`is_available` False): it fails at once.
2. While calls are in flight the store is asked every 20 ms whether it lives; 80 ms
   without any answer fail all of them at once and open the circuit. So a dead, hung
   or slow store costs one request about 100 ms, once.
3. The circuit closes again by probes in the background, never by a request: after
   two answers in a row that came quickly.
4. An answer to a call that was given up is ignored.
5. Time is counted in beats that this event loop really had: a loop that was itself
   stuck does not take its own pause for the store's.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.blocks import BlockKey, BlockLayout, Fingerprint
from proxy.errors import StoreError, StoreTimeout
from proxy.store.base import PLAIN, BlockRef, PutOptions, PutOutcome
from proxy.store.client_facts import ClientCounters, ClientTiming, StoreHello
from proxy.store.connection import StoreConnection
from proxy.store.wire import (
    WIRE_VERSION,
    keys_to_wire,
    parse_bools,
    parse_put_outcome,
    put_options_to_wire,
    transfer_to_wire,
)

logger = logging.getLogger(__name__)

PROMPT_ANSWERS = 2
"""So many quick answers in a row close the circuit."""


class StoreClient:
    """One proxy's connection to a store process, which it makes again by itself."""

    def __init__(
        self, socket_path: Path, *, timing: ClientTiming | None = None
    ) -> None:
        self._path = socket_path
        self.timing = timing or ClientTiming()
        self._ids = itertools.count(1)
        # mutable state
        self.counters = ClientCounters()
        self.hello: StoreHello | None = None
        self._connection: StoreConnection | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._is_circuit_open = False
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._ping: tuple[int, float] | None = None
        self._prompt_answers = 0

    def __repr__(self) -> str:
        return (
            f"<StoreClient {self._path} available={self.is_available} "
            f"in_flight={len(self._calls)}>"
        )

    # ---- life

    async def connect(self) -> None:
        """Connect, and from now on reconnect whenever the connection ends.

        Raises StoreError when no store answers; calling it again is then allowed.
        """
        if self._keeper is not None:
            return
        await self._open()
        self._keeper = asyncio.create_task(self._keep(), name="store client")

    async def close(self) -> int | None:
        """Say goodbye; return how many other clients the store has, if it said so."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        others: int | None = None
        if self._connection is not None and self._connection.is_open:
            with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
                answer = await self._exchange({"op": "bye"}, deadline_seconds=1.0)
                others = int(answer["clients"])
        self._drop("the client was closed")
        return others

    @property
    def is_available(self) -> bool:
        """Whether a call is worth trying now."""
        connection = self._connection
        return (
            connection is not None and connection.is_open and not self._is_circuit_open
        )

    @property
    def is_connected(self) -> bool:
        """Whether a store process holds the other end, be it frozen."""
        return self._connection is not None and self._connection.is_open

    @property
    def silent_seconds(self) -> float:
        """For how long a connected store has left a question unanswered."""
        return 0.0 if self._ping is None else time.monotonic() - self._ping[1]

    # ---- calls

    async def contains(
        self, keys: Sequence[BlockKey], *, deadline_seconds: float
    ) -> list[bool]:
        """See `BlockStore.contains`."""
        if not keys:
            return []
        message = {"op": "contains", "keys": keys_to_wire(keys)}
        answer = await self._call(message, deadline_seconds=deadline_seconds)
        return parse_bools(answer.get("found"), len(keys))

    async def get_into(
        self,
        fd: int,
        layout: BlockLayout,
        blocks: Sequence[BlockRef],
        *,
        fingerprint: Fingerprint,
        deadline_seconds: float,
    ) -> list[bool]:
        """See `BlockStore.get_into`."""
        if not blocks:
            return []
        message = transfer_to_wire(
            layout, blocks, fingerprint=fingerprint, deadline_seconds=deadline_seconds
        )
        answer = await self._call(
            {"op": "get", **message}, fd=fd, deadline_seconds=deadline_seconds
        )
        return parse_bools(answer.get("filled"), len(blocks))

    async def put_from(
        self,
        fd: int,
        layout: BlockLayout,
        blocks: Sequence[BlockRef],
        *,
        fingerprint: Fingerprint,
        deadline_seconds: float,
        options: PutOptions = PLAIN,
    ) -> PutOutcome:
        """See `BlockStore.put_from`."""
        if not blocks:
            return PutOutcome(0, 0, 0, 0)
        message = transfer_to_wire(
            layout, blocks, fingerprint=fingerprint, deadline_seconds=deadline_seconds
        )
        answer = await self._call(
            {"op": "put", **message, **put_options_to_wire(options)},
            fd=fd,
            deadline_seconds=deadline_seconds,
        )
        return parse_put_outcome(answer)

    async def remove(self, keys: Sequence[BlockKey], *, deadline_seconds: float) -> int:
        """Remove blocks; return how many were there. Raises StoreError."""
        if not keys:
            return 0
        message = {"op": "remove", "keys": keys_to_wire(keys)}
        answer = await self._call(message, deadline_seconds=deadline_seconds)
        return int(answer.get("removed", 0))

    async def status(self) -> dict[str, Any]:
        """See `BlockStore.status`."""
        answer = await self._call({"op": "status"}, deadline_seconds=2.0)
        status = answer.get("status")
        if not isinstance(status, dict):
            raise StoreError("the store's status is not an object")
        return status

    async def _call(
        self,
        message: Mapping[str, Any],
        *,
        deadline_seconds: float,
        fd: int | None = None,
    ) -> dict[str, Any]:
        try:
            if not self.is_available:
                raise StoreError("the block store is away")
            return await self._exchange(
                message, deadline_seconds=deadline_seconds, fd=fd
            )
        except StoreTimeout:
            self.counters.timeouts += 1
            raise
        except StoreError:
            self.counters.errors += 1
            raise

    async def _exchange(
        self,
        message: Mapping[str, Any],
        *,
        deadline_seconds: float,
        fd: int | None = None,
    ) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        if self._connection is None or not self._connection.is_open:
            raise StoreError("the block store is away")
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._connection.send({"id": call_id, **message}, fd)
            self._wake.set()
            async with asyncio.timeout(deadline_seconds):
                answer: dict[str, Any] = await future
        except TimeoutError as exc:
            raise StoreTimeout(
                f"no answer to {message['op']} within {deadline_seconds:g} s"
            ) from exc
        except OSError as exc:  # the descriptor could not be duplicated
            raise StoreError(f"cannot hand over the slot file: {exc}") from exc
        finally:
            self._calls.pop(call_id, None)
        if "error" in answer:
            raise StoreError(f"the store refused {message['op']}: {answer['error']}")
        return answer

    # ---- connection

    async def _open(self) -> None:
        """Connect and say hello. Raises StoreError."""
        timing = self.timing
        try:
            async with asyncio.timeout(timing.hello_seconds):
                self._connection = await StoreConnection.open(
                    self._path, on_message=self._hear, on_end=self._drop
                )
        except (OSError, TimeoutError) as exc:
            raise StoreError(f"no block store at {self._path}: {exc}") from exc
        try:
            answer = await self._exchange(
                {"op": "hello", "pid": os.getpid(), "version": WIRE_VERSION},
                deadline_seconds=timing.hello_seconds,
            )
            self.hello = StoreHello.parse(answer)
        except StoreError:
            self._drop("the store did not say hello")
            raise
        self.counters.connections += 1
        self._is_circuit_open = False
        self._ping = None

    def _drop(self, reason: str) -> None:
        """Forget the connection; every call that waits on it fails."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._ping = None
        self._fail_calls(f"the block store went away: {reason}")
        self._wake.set()

    def _fail_calls(self, reason: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(StoreError(reason))
        self._calls.clear()

    def _hear(self, message: dict[str, Any]) -> None:
        if self._ping is not None and message.get("id") == self._ping[0]:
            self._hear_pong(self._ping[1])
            return
        future = self._calls.get(message.get("id", 0))
        if future is not None and not future.done():
            future.set_result(message)

    async def _keep(self) -> None:
        """Watch the connection, and make a new one when it ends."""
        backoff = self.timing.first_backoff_seconds
        while True:
            connection = self._connection
            if connection is not None and connection.is_open:
                await self._watch(connection)
                backoff = self.timing.first_backoff_seconds
                continue
            try:
                await self._open()
                logger.info("block store at %s is back", self._path)
            except StoreError as exc:
                logger.debug("%s", exc)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, self.timing.last_backoff_seconds)

    async def _watch(self, connection: StoreConnection) -> None:
        """Count beats without a sign of life until `connection` ends."""
        timing = self.timing
        missed = 0
        while connection.is_open:
            if not self._calls and self._ping is None and not self._is_circuit_open:
                missed = 0
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timing.idle_seconds):
                        await self._wake.wait()
            heard = connection.num_reads
            if not self._calls and self._ping is None:
                self._send_ping(connection)  # idle, or the circuit is open
            await asyncio.sleep(
                timing.probe_seconds if self._is_circuit_open else timing.beat_seconds
            )
            if connection.num_reads != heard:
                missed = 0
            else:
                missed += 1
            if missed >= timing.missed_beats and not self._is_circuit_open:
                self._open_circuit()
            if self._calls and self._ping is None:
                self._send_ping(connection)

    def _send_ping(self, connection: StoreConnection) -> None:
        ping_id = next(self._ids)
        self._ping = (ping_id, time.monotonic())
        connection.send({"id": ping_id, "op": "ping"})

    def _open_circuit(self) -> None:
        self._is_circuit_open = True
        self._prompt_answers = 0
        self.counters.circuit_openings += 1
        logger.warning(
            "block store at %s does not answer: going on without it", self._path
        )
        self._fail_calls("the block store does not answer")

    def _hear_pong(self, sent: float) -> None:
        self._ping = None
        if not self._is_circuit_open:
            return
        if time.monotonic() - sent > self.timing.prompt_seconds:
            self._prompt_answers = 0
            return
        self._prompt_answers += 1
        if self._prompt_answers >= PROMPT_ANSWERS:
            self._is_circuit_open = False
            logger.info("block store at %s answers again", self._path)
