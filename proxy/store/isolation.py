"""Takes the store process off the network, so that nobody can reach its memory.

A Mooncake client listens on two ports of all addresses, and whoever reaches them can
read and write every block (prompts). No setting of its own prevents that; a network
namespace of our own does, with nothing in it but a loopback device.

Rules:
1. Whether it works here is tried in a child that is thrown away, so that the process
   is never left half way.
2. It happens before any thread exists: the kernel moves single threads, and a user
   namespace can only be entered by a process that has one.
3. Afterwards the process holds no capability, and nothing that it starts can gain
   one: it cannot go back, be it root.
"""

import ctypes
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_IFREQ = struct.Struct("16sH22x")
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_PROBE_OK = b"ok"

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


class IsolationError(Exception):
    """The network cannot be left here; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """Whether this process has left the network, or why not."""

    is_isolated: bool
    reason: str = ""


def isolate() -> Isolation:
    """Leave the network of the host, if this system allows it.

    To be called in a process that has one thread.
    """
    problem = probe()
    if problem:
        return Isolation(is_isolated=False, reason=problem)
    try:
        leave_network()
        drop_privileges()
    except (IsolationError, OSError) as exc:
        # The probe did the same; the process may be half way, which is no harm: it
        # has less than before. It does not count as isolated.
        return Isolation(is_isolated=False, reason=str(exc))
    return Isolation(is_isolated=True)


def has_threads() -> bool:
    """Whether this process has more than one thread, of Python or not."""
    tasks = Path("/proc/self/task")
    return tasks.exists() and len(list(tasks.iterdir())) > 1


def probe() -> str:
    """Try to leave the network in a child; return why it failed, or nothing."""
    if not hasattr(os, "fork") or not Path("/proc/self/ns/net").exists():
        return "this system has no network namespaces"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = _PROBE_OK
        try:
            leave_network()
            drop_privileges()
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname(), timeout=1).close()
        except (IsolationError, OSError) as exc:
            answer = str(exc).encode()[:200] or b"failed"
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return "" if answer == _PROBE_OK else answer.decode(errors="replace") or "it died"


def leave_network() -> None:
    """Move this process into a network of its own. Raises IsolationError, OSError."""
    if has_threads():
        raise IsolationError("threads exist already")
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            error = os.strerror(ctypes.get_errno())
            raise IsolationError(f"no network namespace allowed here: {error}")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        _, flags = _IFREQ.unpack(request)
        fcntl.ioctl(control, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def drop_privileges() -> None:
    """Give up every capability, for good. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1  # until the kernel knows no more, or we may not
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    nothing = bytes(24)  # effective, permitted, inheritable, for 64 capabilities
    if libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")


def has_own_network(root: Path = Path("/")) -> bool:
    """Whether this is a container that does not share the network of its host.

    True only where a container's mark is found and every device but loopback has its
    other end elsewhere (veth and the like: its `iflink` is not its own `ifindex`, nor
    any device's here). With the host's network there is always one real device.
    """
    if not any((root / mark.lstrip("/")).exists() for mark in _CONTAINER_MARKS):
        return False
    try:
        devices = [
            (_read_number(folder / "ifindex"), _read_number(folder / "iflink"))
            for folder in (root / "sys/class/net").iterdir()
            if folder.name != "lo" and (folder / "ifindex").exists()
        ]
    except (OSError, ValueError):
        return False
    indexes = {index for index, _ in devices}
    return bool(devices) and all(link not in indexes for _, link in devices)


def _read_number(path: Path) -> int:
    return int(path.read_text())
