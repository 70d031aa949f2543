"""Which options the connections of clients get."""

import math
import socket
from pathlib import Path

import pytest

from proxy.connections import options_for


@pytest.mark.parametrize("seconds", [0.0, math.inf])
def test_without_a_bound_all_is_left_to_the_system(seconds: float) -> None:
    """Neither 0 nor for ever sets anything."""
    assert options_for(seconds) == ()


@pytest.mark.skipif(
    not Path("/proc/sys/net/ipv4").exists(), reason="the options are Linux's"
)
@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(0.0001, 1), (600.0, 600_000), (1e12, 1_728_000_000)]
)
def test_the_stall_time_is_set_in_milliseconds(
    seconds: float, milliseconds: int
) -> None:
    """The system takes every option; a time beyond its range is cut."""
    options = options_for(seconds)
    assert (socket.TCP_USER_TIMEOUT, milliseconds) in options
    with socket.socket() as connection:
        for option, value in options:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
            assert connection.getsockopt(socket.IPPROTO_TCP, option) == value
