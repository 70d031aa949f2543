"""Which backend a store runs on, by its options and by what this machine allows.

    embedded, isolated                          -> Mooncake
    embedded, own network of a container,
              or the operator exposes it        -> Mooncake, reachable by others
    embedded, else; or Mooncake does not work   -> disk, and one line that says why
    mooncake                                    -> Mooncake in the given pool
    disk                                        -> disk

With `disk_size_bytes`, the first three and the pool have a disk tier below them.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from proxy.errors import ConfigError, StoreError
from proxy.store.backend import Backend, CopyThreads
from proxy.store.disk import DiskBackend
from proxy.store.isolation import Isolation, has_own_network
from proxy.store.mooncake_watch import MooncakeWatch
from proxy.store.options import StoreOptions
from proxy.store.tiers import TieredBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBackend:
    """A backend, and what clients are told of it."""

    backend: Backend
    kind: str
    capacity_bytes: int
    isolated: bool
    """Nobody but this user's processes on this host can reach the blocks."""
    reason: str


def open_backend(options: StoreOptions, isolation: Isolation) -> OpenedBackend:
    """Open what `options` ask for.

    Raises ConfigError when neither that nor a folder instead can be used.
    """
    copy = CopyThreads(options.num_copy_threads)
    if options.kind == "disk":
        return _open_disk(options, copy, reason="")
    reason = ""
    if options.kind == "embedded" and not isolation.is_isolated:
        if options.expose:
            reason = f"reachable by others, as allowed: {isolation.reason}"
        elif has_own_network():
            reason = f"reachable from the container's network: {isolation.reason}"
        else:
            reason = f"on disk, since RAM cannot be isolated: {isolation.reason}"
            return _open_disk(options, copy, reason=reason)
    try:
        watch = MooncakeWatch(options, copy)
        watch.open()
    except (ConfigError, StoreError) as exc:
        if options.kind == "mooncake":
            raise ConfigError(f"no Mooncake pool: {exc}") from exc
        logger.warning("no Mooncake: %s", exc)
        return _open_disk(options, copy, reason=f"on disk, without Mooncake: {exc}")
    ram: Backend = watch.backend
    if options.disk_size_bytes and options.disk_dir is not None:
        disk = DiskBackend(options.disk_dir, options.disk_size_bytes, copy)
        ram = TieredBackend(watch.backend, disk)
    return OpenedBackend(
        backend=ram,
        kind=options.kind,
        capacity_bytes=watch.backend.limit_bytes,
        isolated=isolation.is_isolated,
        reason=reason,
    )


def _open_disk(
    options: StoreOptions, copy: CopyThreads, *, reason: str
) -> OpenedBackend:
    folder: Path = options.disk_dir or options.runtime_dir / "blocks"
    size_bytes = options.disk_size_bytes or options.ram_size_bytes
    return OpenedBackend(
        backend=DiskBackend(folder, size_bytes, copy),
        kind="disk",
        capacity_bytes=size_bytes,
        isolated=True,
        reason=reason,
    )
