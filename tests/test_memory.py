"""The default size of the store, on machines and in containers made of files."""

from pathlib import Path

import pytest

from proxy.memory import default_store_bytes

GIB = 1 << 30
MIB = 1 << 20


class Machine:
    """The files of /proc and /sys/fs/cgroup that count."""

    def __init__(self, directory: Path, *, available: int) -> None:
        self.proc = directory / "proc"
        self.cgroups = directory / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.write(
            self.proc / "meminfo",
            f"MemTotal: {64 << 20} kB\nMemAvailable: {available >> 10} kB\n"
            "HugePages_Total: 0\n",
        )

    def write(self, path: Path, text: str) -> None:
        """Write a file, and the directories above it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def is_in(self, *lines: str) -> None:
        """Set our groups."""
        self.write(self.proc / "self" / "cgroup", "".join(f"{x}\n" for x in lines))

    def group_v2(self, name: str, limit: str, *, used: int, inactive: int = 0) -> None:
        """Make a group of cgroup v2."""
        group = self.cgroups / name
        self.write(group / "memory.max", f"{limit}\n")
        self.write(group / "memory.current", f"{used}\n")
        self.write(
            group / "memory.stat",
            f"anon {used - inactive}\ninactive_file {inactive}\nactive_file 0\n",
        )

    def group_v1(self, name: str, limit: int, *, used: int, inactive: int = 0) -> None:
        """Make a group of cgroup v1."""
        group = self.cgroups / "memory" / name
        self.write(group / "memory.limit_in_bytes", f"{limit}\n")
        self.write(group / "memory.usage_in_bytes", f"{used}\n")
        self.write(
            group / "memory.stat", f"inactive_file 0\ntotal_inactive_file {inactive}\n"
        )

    def default(self) -> int:
        """Return the default size there."""
        return default_store_bytes(proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with 12 GiB free."""
    return Machine(tmp_path, available=12 * GIB)


def test_without_groups_it_is_a_quarter(machine: Machine, tmp_path: Path) -> None:
    """A quarter of what is free, in segments, between 64 MiB and 4 GiB."""
    assert machine.default() == 3 * GIB
    sizes = {100 * GIB: 4 * GIB, 5 * GIB: 1280 * MIB, 600 * MIB: 128 * MIB, 0: 64 * MIB}
    for number, (available, size) in enumerate(sizes.items()):
        assert Machine(tmp_path / str(number), available=available).default() == size


def test_files_that_were_read_are_free(machine: Machine) -> None:
    """A container whose memory is full of the model that it read has room."""
    machine.is_in("0::/")
    machine.group_v2("", str(8 * GIB), used=8 * GIB - 1, inactive=6 * GIB)
    assert machine.default() == 1536 * MIB
    machine.group_v2("", str(8 * GIB), used=8 * GIB)
    assert machine.default() == 64 * MIB


def test_every_group_above_counts(machine: Machine) -> None:
    """The group that leaves least decides; one without a limit does not."""
    machine.is_in("0::/a/b/c")
    machine.group_v2("a/b/c", "max", used=GIB)
    machine.group_v2("a/b", str(20 * GIB), used=GIB)
    machine.group_v2("a", str(6 * GIB), used=2 * GIB)
    assert machine.default() == GIB


def test_cgroup_v1(machine: Machine) -> None:
    """The memory controller of v1 counts as well, with all that is below a group."""
    machine.is_in("12:cpu,cpuacct:/x", "4:memory:/a/b", "1:name=systemd:/x", "0::/x")
    unlimited = 9223372036854771712
    machine.group_v1("", unlimited, used=9 * GIB)
    machine.group_v1("a", unlimited, used=9 * GIB)
    assert machine.default() == 3 * GIB
    machine.group_v1("a/b", 6 * GIB, used=5 * GIB, inactive=3 * GIB)
    assert machine.default() == GIB


def test_a_container_that_sees_the_hosts_names(machine: Machine) -> None:
    """Where our group is not found by its name, the one at the root is ours."""
    machine.is_in("4:memory:/docker/0123", "0::/docker/0123")
    machine.group_v1("", 4 * GIB, used=0)
    assert machine.default() == GIB


def test_what_cannot_be_read_sets_no_limit(machine: Machine) -> None:
    """Files that are missing or hold no numbers change nothing."""
    machine.is_in("0::/a", "4:memory:/a")
    machine.group_v2("a", "much", used=0)
    machine.write(machine.cgroups / "memory" / "a" / "memory.limit_in_bytes", "1\n")
    assert machine.default() == 3 * GIB
    (machine.proc / "meminfo").unlink()
    assert machine.default() >= 64 * MIB


def test_this_machine() -> None:
    """The real files give a size in whole segments."""
    assert default_store_bytes() % (64 * MIB) == 0
