"""Which backend a store runs on, by its options and by what this machine allows."""

from dataclasses import dataclass

from proxy.errors import ConfigError
from proxy.store.backend import Backend, CopyThreads
from proxy.store.disk import DiskBackend
from proxy.store.options import StoreOptions, default_copy_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBackend:
    """A backend, and what clients are told of it."""

    backend: Backend
    kind: str
    capacity_bytes: int
    isolated: bool
    """Nobody but this user's processes on this host can reach the blocks."""
    reason: str


def open_backend(options: StoreOptions) -> OpenedBackend:
    """Open what `options` ask for. Raises ConfigError."""
    copy = CopyThreads(options.copy_threads or default_copy_threads())
    if options.kind != "disk" or options.disk_dir is None:
        raise ConfigError(f"store kind {options.kind} is not available")
    return OpenedBackend(
        backend=DiskBackend(options.disk_dir, options.disk_size_bytes, copy),
        kind="disk",
        capacity_bytes=options.disk_size_bytes,
        isolated=True,
        reason="",
    )
