"""How long a client that is gone, or does not read, keeps its connection.

Rules:
1. A connection whose client takes none of what is sent to it, though it lives, ends
   after the stall time: its slot would never be free again.
2. So does one whose client's machine is gone: while nothing is sent to it, it is
   asked for a sign of life, and the same time without any is its end.
3. A client that waits, for its slot or for a long prefill, has all the time that it
   wants, for its machine answers.

All of it is the kernel's work: a connection that it ends is to us a client that left.
"""

import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_IDLE_SECONDS = 60
_PROBE_SECONDS = 15
_LONGEST_SECONDS = 20 * 24 * 3600
"""The option holds milliseconds in 31 bits."""


def options_for(stall_seconds: float) -> tuple[tuple[int, int], ...]:
    """List (option, value) for sockets of TCP, as far as this system has them.

    No stall time (0 or infinity) leaves all to the system.
    """
    if not 0 < stall_seconds < math.inf:
        return ()
    milliseconds = math.ceil(min(stall_seconds, _LONGEST_SECONDS) * 1e3)
    wanted = {
        "TCP_USER_TIMEOUT": milliseconds,
        "TCP_KEEPIDLE": _IDLE_SECONDS,
        "TCP_KEEPINTVL": _PROBE_SECONDS,
    }
    return tuple(
        (getattr(socket, name), value)
        for name, value in wanted.items()
        if hasattr(socket, name)
    )


def bound_stalls(stall_seconds: float) -> Middleware:
    """Return the middleware that bounds the connection of each request."""
    options = options_for(stall_seconds)

    @web.middleware
    async def bound(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.get_extra_info("socket")
        if connection is not None:
            with suppress(OSError):  # it is gone already, or is not TCP
                for option, value in options:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return await handler(request)

    return bound
