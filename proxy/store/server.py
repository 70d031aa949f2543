"""The store process: ``python -m proxy.store.server OPTIONS_AS_JSON``.

Order matters here: the network is left before any thread exists, and therefore
before numpy or Mooncake is imported (both start threads); then the lock is taken, the
backend opened, and the socket opened last, so whoever can connect finds it working.

Rules:
1. One line of JSON on stdout says that it is ready, or one line on stderr why not.
2. The process leaves no socket, no lock, no child and no temporary file behind.
3. Nothing runs at interpreter exit: threads may hang in foreign code for ever.
"""

import json
import logging
import os
import signal
import sys
from typing import Any, NoReturn

from proxy.errors import ConfigError
from proxy.store.isolation import Isolation, isolate
from proxy.store.options import StoreOptions
from proxy.store.process import (
    EXIT_CONFIG,
    EXIT_TAKEN,
    InstanceLock,
    SocketTakenError,
    ensure_private_folder,
    forbid_core_dumps,
)

SWITCH_SECONDS = 0.00005
"""How long a busy thread may keep the interpreter from one that answers pings, or
that has a copy to start: 8 copy threads move a tenth more so than with 1 ms, 12 a
third more."""


class _EndedBeforeReady(BaseException):
    """A signal came while the store was being opened."""


def run(options: StoreOptions) -> NoReturn:
    """Turn this process into the store.

    A fresh interpreter takes its place (same pid): it has no threads yet, and does
    not run this one's exit handlers. See `main` for the exit codes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(  # noqa: S606 - no shell is wanted
        sys.executable,
        [sys.executable, "-m", "proxy.store.server", options.to_json()],
    )


def main(arguments: list[str]) -> int:
    """Serve with the options given as one JSON argument; return the exit code.

    0: ended as told. `EXIT_CONFIG`, `EXIT_TAKEN`: see there. To be called in a fresh
    process, which has one thread.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        if len(arguments) != 1:
            raise ConfigError("usage: python -m proxy.store.server OPTIONS_AS_JSON")
        options = StoreOptions.from_json(arguments[0])
        forbid_core_dumps()
        isolation = Isolation(is_isolated=False)
        if options.kind == "embedded":
            isolation = isolate()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end_before_ready)
        _serve(options, isolation)
    except _EndedBeforeReady:
        return 0
    except ConfigError as exc:
        sys.stderr.write(f"kvbus store: {exc}\n")
        return EXIT_TAKEN if isinstance(exc, SocketTakenError) else EXIT_CONFIG
    return 0


def _end_before_ready(_number: int, _frame: object) -> None:
    raise _EndedBeforeReady


def _serve(options: StoreOptions, isolation: Isolation) -> None:
    ensure_private_folder(options.runtime_dir)
    ensure_private_folder(options.socket_path.parent)
    lock = InstanceLock.acquire(
        options.lock_path, is_service=options.linger_seconds is None
    )
    try:
        # Imported late: they start threads (see above).
        from proxy.store.opening import open_backend
        from proxy.store.serving import StoreServer, listen_privately
        from proxy.store.slotview import part_bytes_for

        sys.setswitchinterval(SWITCH_SECONDS)
        opened = open_backend(options, isolation)
        try:
            facts: dict[str, Any] = {
                "kind": opened.kind,
                "capacity_bytes": opened.capacity_bytes,
                "isolated": opened.isolated,
                "reason": opened.reason,
            }
            listener = listen_privately(options.socket_path)
            try:
                ready = json.dumps({"ready": True, "pid": os.getpid(), **facts})
                sys.stdout.write(ready + "\n")
                sys.stdout.flush()
                StoreServer(
                    listener,
                    backend=opened.backend,
                    part_bytes=part_bytes_for(options.num_copy_threads),
                    facts=facts,
                    linger_seconds=options.linger_seconds,
                ).serve()
            finally:
                options.socket_path.unlink(missing_ok=True)
        finally:
            opened.backend.close()
    finally:
        lock.release()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
