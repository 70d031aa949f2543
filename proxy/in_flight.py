"""How many requests are being answered: shutdown waits for them, for a while."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InFlight:
    """Counts requests from the first middleware to the end of their answer."""

    def __init__(self) -> None:
        # the mutable state
        self._number = 0
        self._none = asyncio.Event()
        self._none.set()

    def middleware(self) -> Middleware:
        """Return the middleware that counts."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._number += 1
            self._none.clear()
            try:
                return await handler(request)
            finally:
                self._number -= 1
                if not self._number:
                    self._none.set()

        return count

    async def wait_none(self, *, timeout_seconds: float) -> None:
        """Wait until no request is being answered, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._none.wait()
