"""Reads numbers and stretches of a sequence-state file, never past its end.

Rules:
1. What is taken is a view, never a copy.
2. A count is compared with the bytes that are left before anything of its size is made.
"""

import numpy as np
from numpy.typing import NDArray

from proxy.errors import StateFormatError
from proxy.llamacpp.state_format import WORD


class Reader:
    """A bounded walk over a file: no read goes past the end."""

    def __init__(self, raw: NDArray[np.uint8], position: int, stop: int) -> None:
        self._raw = raw
        self.position = position
        self.stop = stop

    @property
    def left(self) -> int:
        """Bytes to the end."""
        return self.stop - self.position

    def take(self, num_bytes: int, what: str) -> NDArray[np.uint8]:
        """Look at the next bytes, and go behind them."""
        if num_bytes > self.left:
            raise StateFormatError(
                f"ends early: {what} needs {num_bytes} bytes, {self.left} are left"
            )
        start = self.position
        self.position = start + num_bytes
        return self._raw[start : self.position]

    def words(self, count: int, what: str) -> NDArray[np.int32]:
        """Look at the next 32-bit words."""
        return self.take(count * 4, what).view(WORD)

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit number."""
        return int.from_bytes(self.take(4, what).tobytes(), "little")

    def i32(self, what: str) -> int:
        """Read a signed 32-bit number."""
        return int.from_bytes(self.take(4, what).tobytes(), "little", signed=True)

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit number."""
        return int.from_bytes(self.take(8, what).tobytes(), "little")
