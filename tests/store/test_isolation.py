"""Whether an embedded store can be reached by others, and what happens if so."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.store import opening
from proxy.store.disk import DiskBackend
from proxy.store.isolation import Isolation, has_own_network
from proxy.store.options import StoreOptions
from tests.store.conftest import StartStore, child_pids, make_options, store_pid
from tests.store.test_faults import works

NO_NETWORK_NAMESPACES = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" "$@"'


def listening_inodes(pid: int | str) -> set[str]:
    """Return the inodes of sockets that listen in the namespace of a process."""
    found = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        found |= {line.split()[9] for line in lines if line.split()[3] == "0A"}
    return found


def own_sockets(pid: int) -> set[str]:
    """Return the inodes of the sockets that a process holds."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just now
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def can_unshare() -> bool:
    """Whether this system lets us make network namespaces at all."""
    return (
        subprocess.run(
            ["unshare", "--user", "--net", "true"], capture_output=True, check=False
        ).returncode
        == 0
    )


needs_namespaces = pytest.mark.skipif(
    not can_unshare(), reason="no network namespaces here"
)


@needs_namespaces
async def test_an_isolated_store_listens_to_nobody(
    folder: Path, start_store: StartStore
) -> None:
    """It works, its sockets are in a namespace with loopback alone, caps are gone."""
    before = listening_inodes("self")
    supervisor = await start_store(make_options("embedded", folder))
    assert supervisor.client.hello is not None
    assert supervisor.client.hello.isolated
    assert await works(supervisor.client, "x")
    pid = store_pid(supervisor)
    (master,) = child_pids(pid)
    host = Path("/proc/self/ns/net").readlink()
    for process in (pid, master):
        assert Path(f"/proc/{process}/ns/net").readlink() != host
        sockets = own_sockets(process)
        assert sockets & listening_inodes(process)
        assert not sockets & listening_inodes("self")
        status = Path(f"/proc/{process}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "CapBnd:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
    devices = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    new = listening_inodes("self") - before
    assert not new & (own_sockets(pid) | own_sockets(master))


@needs_namespaces
@pytest.mark.parametrize("is_exposed", [False, True])
def test_where_namespaces_are_forbidden(is_exposed: bool, folder: Path) -> None:
    """The store runs on disk and says why; with leave to, in RAM that others reach."""
    options = StoreOptions(
        runtime_dir=folder / "run",
        ram_size_bytes=128 << 20,
        segment_bytes=128 << 20,
        expose=is_exposed,
    )
    process = subprocess.Popen(
        [
            *("unshare", "--user", "--map-root-user", "bash", "-c"),
            NO_NETWORK_NAMESPACES,
            *(sys.executable, "-m", "proxy.store.server", options.to_json()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        listens = own_sockets(ready["pid"]) & listening_inodes("self")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert "no network namespace allowed here" in ready["reason"]
    assert "\n" not in ready["reason"]
    assert ready["kind"] == ("embedded" if is_exposed else "disk")
    assert ready["isolated"] is not is_exposed
    assert bool(listens) is is_exposed


def test_a_broken_mooncake_leaves_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Mooncake's program the store runs on disk, and says so in one line."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    options = make_options("embedded", folder)
    opened = opening.open_backend(options, Isolation(is_isolated=True))
    try:
        assert isinstance(opened.backend, DiskBackend)
        assert opened.kind == "disk"
        assert "mooncake is not installed" in opened.reason
        assert opened.capacity_bytes == options.ram_size_bytes
    finally:
        opened.backend.close()


@pytest.mark.parametrize(
    ("mark", "devices", "expected"),
    [
        (".dockerenv", {"eth0": (2, 37)}, True),
        ("run/.containerenv", {"eth0": (2, 37), "eth1": (3, 41)}, True),
        (None, {"eth0": (2, 37)}, False),
        (".dockerenv", {"eth0": (2, 2), "veth1": (9, 2)}, False),
        (".dockerenv", {"eth0": (2, 3), "eth1": (3, 2)}, False),
        (".dockerenv", {}, False),
    ],
)
def test_a_network_of_its_own_is_told_conservatively(
    mark: str | None,
    devices: dict[str, tuple[int, int]],
    expected: bool,
    tmp_path: Path,
) -> None:
    """Only a container whose devices all end elsewhere counts."""
    for name, (index, link) in {"lo": (1, 1), **devices}.items():
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "ifindex").write_text(f"{index}\n")
        (folder / "iflink").write_text(f"{link}\n")
    if mark is not None:
        (tmp_path / mark).parent.mkdir(exist_ok=True)
        (tmp_path / mark).write_text("")
    assert has_own_network(tmp_path) is expected
