"""What a block store is told: where it listens, where its blocks live, how much.

The same value travels from the command line to the store process (as JSON), and to
every proxy that looks for a running store, so both name the same socket.

Rules:
1. What exists is valid: a wrong value raises `ConfigError` with one clear line.
2. Stores that keep different blocks never share a socket: its name carries a digest
   of what tells them apart (kind, pool, folder). Sizes and times do not: whoever
   comes second joins the store that runs, as it is.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from proxy.errors import ConfigError
from proxy.store.placement import num_cpus

StoreKind = Literal["embedded", "mooncake", "disk"]
"""embedded: RAM of this host, a Mooncake master of our own; mooncake: the pool of a
given master; disk: a folder."""

MIN_SEGMENT_BYTES = 64 << 20
"""An object must fit into one segment, and blocks reach tens of MB."""

_SPEC = frozenset(
    {"kind", "master_host", "master_port", "local_host", "disk_dir", "expose"}
)

MAX_SOCKET_PATH_BYTES = 107  # sun_path holds 108 with the closing zero


MAX_DEFAULT_COPY_THREADS = 8
"""So many use up what one CPU socket can move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Settings of one store process."""

    runtime_dir: Path
    """Folder of the socket, its lock and its log: ours alone (0700), created."""
    socket: Path | None = None
    """A socket path of its own; else a name derived from the settings."""
    kind: StoreKind = "embedded"
    master_host: str = ""
    """kind mooncake: where the pool's master listens."""
    master_port: int = 0
    master_metrics_port: int = 9003
    """kind mooncake: where the master tells its usage; 0: nowhere."""
    local_host: str = ""
    """kind mooncake: the address under which other members of the pool reach us."""
    ram_size_bytes: int = 4 << 30
    segment_bytes: int = 256 << 20
    """RAM is mounted in segments of this size, so it can grow and shrink."""
    disk_dir: Path | None = None
    """Folder of the disk tier, or of the whole store where Mooncake cannot run."""
    disk_size_bytes: int = 0
    """Size of the disk tier below the RAM; 0: none. For kind disk: its size."""
    linger_seconds: float | None = None
    """None: a service. Else how long it outlives clients that left without a word."""
    expose: bool = False
    """Allow an embedded store that others on the network can reach."""
    copy_threads: int = 0
    """Threads that copy blocks; 0: by the number of CPUs."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StoreKind):
            raise ConfigError(f"store kind {self.kind!r} is not known")
        if self.kind == "mooncake":
            if not self.master_host or not 0 < self.master_port < 65536:
                raise ConfigError("a Mooncake pool needs HOST:PORT of its master")
            if _is_loopback(self.local_host) and not _is_loopback(self.master_host):
                raise ConfigError("members of the pool cannot reach us by loopback")
        elif self.master_host or self.master_port:
            raise ConfigError(f"a store of kind {self.kind} has no master address")
        if self.kind == "disk" and (not self.disk_dir or self.disk_size_bytes <= 0):
            raise ConfigError("a disk store needs a folder and a size")
        if self.disk_size_bytes < 0 or (self.disk_size_bytes and not self.disk_dir):
            raise ConfigError("a disk tier needs a folder and a size that is not < 0")
        if self.segment_bytes < MIN_SEGMENT_BYTES or self.segment_bytes % (16 << 20):
            raise ConfigError("segments are whole multiples of 16 MiB, from 64 MiB")
        if self.kind != "disk" and self.ram_size_bytes < self.segment_bytes:
            raise ConfigError(
                f"the store's RAM is smaller than one segment ({self.segment_bytes})"
            )
        if self.linger_seconds is not None and self.linger_seconds < 0:
            raise ConfigError("a store cannot linger for less than 0 seconds")
        if not 0 <= self.copy_threads <= 64:
            raise ConfigError("a store copies with 1 to 64 threads (0: choose)")
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"socket path too long for the system: {self.socket_path}"
            )

    @property
    def num_copy_threads(self) -> int:
        """How many threads copy."""
        return self.copy_threads or min(MAX_DEFAULT_COPY_THREADS, num_cpus())

    @property
    def socket_path(self) -> Path:
        """Where the store listens."""
        if self.socket is not None:
            return self.socket
        spec = {name: value for name, value in self.to_dict().items() if name in _SPEC}
        digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        return self.runtime_dir / f"store-{digest[:12]}.sock"

    @property
    def lock_path(self) -> Path:
        """Held by the one store that serves `socket_path`."""
        return self.socket_path.with_suffix(".lock")

    @property
    def log_path(self) -> Path:
        """Where a store that a proxy started writes its few lines."""
        return self.socket_path.with_suffix(".log")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }

    def to_json(self) -> str:
        """Return the settings as one JSON object; `from_json` is the inverse."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "StoreOptions":
        """Read what `to_json` wrote. Raises ConfigError."""
        try:
            values = json.loads(text)
            for name in ("runtime_dir", "socket", "disk_dir"):
                if values.get(name) is not None:
                    values[name] = Path(values[name])
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as exc:
            raise ConfigError(f"store options cannot be read: {exc}") from exc


def _is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")
