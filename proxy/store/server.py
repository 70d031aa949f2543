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
from typing import Any

from proxy.errors import ConfigError
from proxy.store.isolation import Isolation, has_threads, isolate
from proxy.store.options import StoreOptions
from proxy.store.process import (
    EXIT_CONFIG,
    EXIT_TAKEN,
    InstanceLock,
    SocketTakenError,
    ensure_private_folder,
    forbid_core_dumps,
)

logger = logging.getLogger("proxy.store.server")

SWITCH_SECONDS = 0.001
"""How long a busy thread may keep the interpreter from one that answers pings."""


class _EndedBeforeReady(BaseException):
    """A signal came while the store was being opened."""


def run(options: StoreOptions) -> int:
    """Serve until told to end; return the exit code of the process.

    Runs the store in a fresh interpreter in place of this one where threads exist
    already; then it does not return.
    """
    forbid_core_dumps()
    isolation = Isolation(is_isolated=False)
    if options.kind == "embedded":
        if has_threads():
            os.execv(  # noqa: S606 - no shell is wanted
                sys.executable,
                [sys.executable, "-m", "proxy.store.server", options.to_json()],
            )
        isolation = isolate()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_before_ready)
    try:
        return _serve(options, isolation)
    except _EndedBeforeReady:
        return 0
    except SocketTakenError as exc:
        sys.stderr.write(f"kvbus store: {exc}\n")
        return EXIT_TAKEN
    except ConfigError as exc:
        sys.stderr.write(f"kvbus store: {exc}\n")
        return EXIT_CONFIG


def _end_before_ready(_number: int, _frame: object) -> None:
    raise _EndedBeforeReady


def _serve(options: StoreOptions, isolation: Isolation) -> int:
    ensure_private_folder(options.runtime_dir)
    ensure_private_folder(options.socket_path.parent)
    lock = InstanceLock.acquire(
        options.lock_path, is_service=options.linger_seconds is None
    )
    try:
        # Imported late: they start threads (see above).
        from proxy.store.opening import open_backend
        from proxy.store.serving import StoreServer, listen_privately

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
                    facts=facts,
                    linger_seconds=options.linger_seconds,
                ).serve()
            finally:
                options.socket_path.unlink(missing_ok=True)
        finally:
            opened.backend.close()
    finally:
        lock.release()
    return 0


def main(arguments: list[str]) -> int:
    """Run the store with the options given as one JSON argument."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m proxy.store.server OPTIONS_AS_JSON\n")
        return EXIT_CONFIG
    try:
        options = StoreOptions.from_json(arguments[0])
    except ConfigError as exc:
        sys.stderr.write(f"kvbus store: {exc}\n")
        return EXIT_CONFIG
    return run(options)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
