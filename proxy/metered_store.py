"""Counts what calls to a block store come to: `MeteredStore`, around any `BlockStore`.

Rules:
1. Nothing is added to a call, and nothing is caught: errors go on as they are.
2. Only calls of requests and commits count; who asks for the status does so to look.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from proxy.blocks import BlockKey, BlockLayout, Fingerprint
from proxy.errors import StoreError, StoreTimeout
from proxy.metrics import Metrics
from proxy.store.base import PLAIN, BlockRef, BlockStore, PutOptions, PutOutcome


class MeteredStore:
    """A `BlockStore` that tells the metrics how its calls end."""

    def __init__(self, store: BlockStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        for call in ("contains", "get", "put"):  # so that a first error is an increase
            metrics.store_errors.labels(call)
            metrics.store_timeouts.labels(call)

    def __repr__(self) -> str:
        return f"<MeteredStore {self._store!r}>"

    @property
    def is_available(self) -> bool:
        """See `BlockStore.is_available`."""
        return self._store.is_available

    async def contains(
        self, keys: Sequence[BlockKey], *, deadline_seconds: float
    ) -> list[bool]:
        """See `BlockStore.contains`."""
        with self._counted("contains"):
            return await self._store.contains(keys, deadline_seconds=deadline_seconds)

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
        with self._counted("get"):
            return await self._store.get_into(
                fd,
                layout,
                blocks,
                fingerprint=fingerprint,
                deadline_seconds=deadline_seconds,
            )

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
        started = monotonic()
        with self._counted("put"):
            outcome = await self._store.put_from(
                fd,
                layout,
                blocks,
                fingerprint=fingerprint,
                deadline_seconds=deadline_seconds,
                options=options,
            )
        self._metrics.phase.labels("put").observe(monotonic() - started)
        return outcome

    async def status(self) -> dict[str, Any]:
        """See `BlockStore.status`."""
        return await self._store.status()

    @contextmanager
    def _counted(self, call: str) -> Iterator[None]:
        try:
            yield
        except StoreTimeout:
            self._metrics.store_timeouts.labels(call).inc()
            raise
        except StoreError:
            self._metrics.store_errors.labels(call).inc()
            raise
