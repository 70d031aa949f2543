"""One Mooncake client, guarded: the only module that imports mooncake.

Rules:
1. No call reaches the client before `setup` has succeeded or after `close` began: the
   library answers such calls with a segmentation fault.
2. Batches are cut to what the library stands: `MAX_PIECES` pieces in flight.
3. Its integers are turned into words here: present, absent (`MISS_CODES`), away
   (`AWAY_CODES`: StoreError), and everything else, which is a failed block.
"""

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from proxy.errors import ConfigError, StoreError
from proxy.store.base import PLAIN, PutOptions

logger = logging.getLogger(__name__)

MAX_BLOCKS = 16
MAX_PIECES = 1024
EXIST_KEYS = 1024
NO_SPACE = -200
TRANSFER_FAILED = -800
AWAY_CODES = frozenset({-900, -901})
"""The master cannot be reached, or did not answer in time."""
MISS_CODES = frozenset({-703, -704, -707})
"""Not complete, not there, lease ran out."""

_KEY_PREFIX = "kvbus/"
_SETTINGS = {
    "MC_LOG_LEVEL": "ERROR",
    # More transfers in flight than this wedge the client for good.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    # A frozen peer: 3 s instead of 30.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
}


class MasterAway(StoreError):
    """The master did not answer."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Where one copy of an object lies."""

    address: int
    size: int
    endpoint: str


class MooncakeHandle:
    """A client of one master. Safe for several threads."""

    def __init__(self, store: Any, make_config: Callable[[PutOptions], Any]) -> None:  # noqa: ANN401 - untyped wheel
        self._store = store
        self._make_config = make_config
        self._lock = threading.Lock()
        # mutable state
        self._inside = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MooncakeHandle closed={self._is_closed} inside={self._inside}>"

    @classmethod
    def connect(cls, master: str, *, local_host: str) -> "MooncakeHandle":
        """Connect to the master at HOST:PORT, without memory of our own yet.

        Takes up to 5 s without a master. Raises StoreError; ConfigError when the
        library cannot be imported.
        """
        module = _import_mooncake()
        store = module.MooncakeDistributedStore()
        code = store.setup(local_host, "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master)
        if code != 0:
            raise MasterAway(f"no Mooncake master at {master} (code {code})")
        host = store.get_hostname()

        def make_config(options: PutOptions) -> Any:  # noqa: ANN401 - untyped wheel
            config = module.ReplicateConfig()
            config.preferred_segment = host
            config.replica_num = options.replica_num
            if options.soft_pin:
                config.soft_pin_action = module.SoftPinAction.ENABLE
            return config

        return cls(store, make_config)

    def close(self) -> bool:
        """Leave the pool (up to 2.1 s); False when calls inside forbid it."""
        with self._lock:
            self._is_closed = True
            if self._inside:
                return False
        self._store.close()
        return True

    def is_connected(self) -> bool:
        """Whether the master answered the client's last ping."""
        with self._use() as store:
            return int(store.health_check()) == 0

    def mount(self, path: str, size: int) -> bool:
        """Give the memory file at `path` to the pool."""
        with self._use() as store:
            return int(store.mount_segment(path, size)["ret"]) == 0

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Tell which objects exist, leasing them. Raises MasterAway."""
        with self._use() as store:
            codes = store.batch_is_exist(list(names))
        _check_away(codes)
        return [code == 1 for code in codes]

    def exist_all(self, names: Sequence[str]) -> list[bool]:
        """Do the same for any number of objects."""
        found: list[bool] = []
        for start in range(0, len(names), EXIST_KEYS):
            found += self.exist(names[start : start + EXIST_KEYS])
        return found

    def describe(self, names: Sequence[str]) -> dict[str, list[Replica]]:
        """Return the replicas in memory of objects that exist, leasing them."""
        with self._use() as store:
            found = store.batch_get_replica_desc(list(names))
        replicas: dict[str, list[Replica]] = {}
        for name, descriptors in found.items():
            replicas[name] = [
                Replica(buffer.buffer_address, buffer.size, buffer.transport_endpoint)
                for buffer in (
                    item.get_memory_descriptor().buffer_descriptor
                    for item in descriptors
                    if item.is_memory_replica()
                )
            ]
        return replicas

    def put(
        self,
        names: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        options: PutOptions = PLAIN,
    ) -> list[int]:
        """Store objects from pieces of memory; return the library's codes.

        Of more copies than the pool has members there are as many as members. Raises
        MasterAway.
        """
        _check_batch(pointers)
        with self._use() as store:
            codes = store.batch_put_from_multi_buffers(
                list(names), list(pointers), list(sizes), self._make_config(options)
            )
        _check_away(codes)
        return [int(code) for code in codes]

    def get(
        self,
        names: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read objects into pieces of memory; return their sizes, or codes.

        Raises MasterAway.
        """
        _check_batch(pointers)
        if len(set(names)) != len(names):
            raise ValueError("one key twice in one get leaves the first unfilled")
        with self._use() as store:
            codes = store.batch_get_into_multi_buffers(
                list(names), list(pointers), list(sizes)
            )
        _check_away(codes)
        return [int(code) for code in codes]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects, leased or not; return how many. Raises MasterAway."""
        with self._use() as store:
            codes = store.batch_remove(list(names), True)
        _check_away(codes)
        return sum(code == 0 for code in codes)

    @contextmanager
    def _use(self) -> Iterator[Any]:
        with self._lock:
            if self._is_closed:
                raise StoreError("the Mooncake client is closed")
            self._inside += 1
        try:
            yield self._store
        finally:
            with self._lock:
                self._inside -= 1


def name_of(key: bytes) -> str:
    """Return the name of a block's object."""
    return _KEY_PREFIX + key.hex()


def _check_away(codes: Sequence[int]) -> None:
    if any(code in AWAY_CODES for code in codes):
        raise MasterAway("the Mooncake master does not answer")


def _check_batch(pointers: Sequence[Sequence[int]]) -> None:
    if len(pointers) > MAX_BLOCKS or sum(map(len, pointers)) > MAX_PIECES:
        raise ValueError("a batch of this size wedges the client")


def _import_mooncake() -> ModuleType:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as exc:
        raise ConfigError(
            f"mooncake cannot be imported ({exc}); on a host without CUDA install "
            "mooncake-transfer-engine-non-cuda alone, and libibverbs1 libnuma1 "
            "libcurl4 of the system"
        ) from exc
