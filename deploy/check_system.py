"""Tells which Debian/Ubuntu packages kvbus needs and does not find. Any Python 3.

Run by `make`; exit code 1 and one line per missing thing, else silence.
"""

import ctypes
import importlib.util
import sys

LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def missing_packages() -> list:
    """Return the names of the packages that are missing."""
    missing = []
    if importlib.util.find_spec("ensurepip") is None:
        missing.append("python3-venv")
    if sys.platform == "linux":
        for library, package in LIBRARIES.items():
            try:
                ctypes.CDLL(library)
            except OSError:
                missing.append(package)
    return missing


def main() -> int:
    """Say what is missing; returns the exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs under any Python
        print("kvbus needs Python 3.11 or newer; this is", sys.version.split()[0])
        return 1
    missing = missing_packages()
    if missing:
        print("Missing system packages. On Debian or Ubuntu, run:")
        print("  sudo apt-get install --yes", *missing)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
