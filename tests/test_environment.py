"""Variables that mean nothing are told, in one line and with a near name."""

import subprocess
import sys

import pytest

from proxy.config import SETTINGS
from proxy.environment import unknown_variables


def test_known_variables_are_not_told() -> None:
    """Every setting, the file's name, and what is not ours."""
    names = ["KVBUS_CONFIG", "KVBU_RUNNERS", "PATH", *(s.variable for s in SETTINGS)]
    assert unknown_variables(dict.fromkeys(names, "x")) == ""


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (
            ["KVBUS_RUNNER", "KVBUS_ZZZ"],
            "no such setting, ignored: KVBUS_RUNNER (did you mean KVBUS_RUNNERS?),"
            " KVBUS_ZZZ",
        ),
        (
            ["KVBUS_STORESIZE"],
            "no such setting, ignored: KVBUS_STORESIZE"
            " (did you mean KVBUS_STORE_SIZE?)",
        ),
        (
            ["KVBUS_slots"],
            "no such setting, ignored: KVBUS_slots (did you mean KVBUS_SLOTS?)",
        ),
    ],
)
def test_unknown_variables_are_told(names: list[str], line: str) -> None:
    """All of them in one line; a value is never part of it."""
    assert unknown_variables(dict.fromkeys(names, "secret")) == line


def test_variables_of_a_service_are_no_mistake() -> None:
    """What Kubernetes sets beside a Service that is called kvbus."""
    names = (
        "KVBUS_SERVICE_HOST",
        "KVBUS_SERVICE_PORT",
        "KVBUS_SERVICE_PORT_HTTP",
        "KVBUS_PORT",
        "KVBUS_PORT_11435_TCP",
        "KVBUS_PORT_11435_TCP_ADDR",
    )
    assert unknown_variables(dict.fromkeys(names, "x")) == ""
    assert "KVBUS_PORTS" in unknown_variables({"KVBUS_PORTS": "x"})


@pytest.mark.parametrize("command", ["serve", "store"])
def test_commands_warn_and_go_on(command: str) -> None:
    """One line on stderr, before anything else is said."""
    done = subprocess.run(
        [sys.executable, "-m", "proxy", command, "--store", "nonsense"],
        env={"KVBUS_RUNNER": "2", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second = done.stderr.splitlines()
    assert first.endswith("KVBUS_RUNNER (did you mean KVBUS_RUNNERS?)")
    assert "nonsense" in second
    assert done.returncode == 2
