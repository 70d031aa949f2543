"""The runner process: what it serves, and how it ends."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.models import write_tiny_model
from tests.runners import Runner, runner_command, running

END_SECONDS = 1.0
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
FLAGS = ("--ctx-size", "512", "--parallel", "2")

PARENT = """
import json, os, subprocess, sys
reading, writing = os.pipe()
command = [*json.loads(sys.argv[1]), "--parent-fd", str(reading)]
runner = subprocess.Popen(command, pass_fds=(reading,), stdout=subprocess.PIPE)
runner.stdout.readline()
print(runner.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one tiny model for all tests."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", seed=2)


@pytest.fixture(scope="module")
def runner(model: Path) -> Iterator[Runner]:
    """Run a runner whose end is not what is tested."""
    with running(model, "--alias", "tiny:latest", ctx_size=1024) as runner:
        yield runner


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Iterator["Place"]:
    """Start runners in a directory of their own; kill what is left of them."""
    place = Place(model, tmp_path)
    yield place
    for process in place.processes:
        process.kill()
        process.communicate()


class Place:
    """Runners of one test, in one directory."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self.directory = directory
        self.socket = directory / "r.sock"
        self.slots = directory / "slots"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, model: Path | None = None) -> subprocess.Popen[str]:
        """Start a runner."""
        command = runner_command(model or self.model, self.directory, *FLAGS, *flags)
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def start_ready(self, *flags: str) -> subprocess.Popen[str]:
        """Start a runner and wait until it is ready."""
        process = self.start(*flags)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"] is True
        return process

    def failure(
        self, *flags: str, model: Path | None = None
    ) -> tuple[int, list[str], str]:
        """Run a runner that ends; give exit code, lines on stderr, and stdout."""
        process = self.start(*flags, model=model)
        out, err = process.communicate(timeout=30)
        return process.returncode, err.splitlines(), out


def engine_pid(guard_pid: int) -> int:
    """Give the pid of the process that serves."""
    children = Path(f"/proc/{guard_pid}/task/{guard_pid}/children").read_text()
    (pid,) = children.split()
    return int(pid)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Tell whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_ready_means_ready(place: Place) -> None:
    """The first request after the ready line is answered, and stdout has one line."""
    process = place.start_ready()
    transport = httpx.HTTPTransport(uds=str(place.socket))
    with httpx.Client(transport=transport) as client:
        assert client.get("http://runner/health").json() == {"status": "ok"}
    process.terminate()
    out, _ = process.communicate(timeout=10)
    assert out == ""


def test_the_ready_line_names_address_and_engine(runner: Runner) -> None:
    """The ready line tells the socket's address and the engine with its version."""
    assert runner.ready["address"] == f"unix://{runner.socket}"
    assert runner.ready["engine"].startswith("xllamacpp 20")


def test_it_listens_on_a_free_port(place: Place) -> None:
    """Port 0 of an address is a free port, told in the ready line."""
    command = [sys.executable, "-m", "proxy.llamacpp.server"]
    command += ["--model", str(place.model), "--ctx-size", "256"]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    place.processes.append(process)
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["address"]
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


def test_it_serves_what_kvbus_asks_of_it(runner: Runner) -> None:
    """Properties, slots, templates, tokens, metrics and completions are there."""
    props = runner.get("/props")
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["model_alias"] == "tiny:latest"
    assert [slot["id"] for slot in runner.get("/slots")] == [0, 1]
    messages = [{"role": "user", "content": "Hello"}]
    prompt = runner.post("/apply-template", messages=messages)["prompt"]
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokens = runner.post("/tokenize", content=prompt, parse_special=True)["tokens"]
    assert tokens[0] == 1
    assert tokens.count(2) == 1
    reply, _ = runner.complete(tokens, slot=1, num_tokens=5)
    assert len(reply) == 5
    _, reused = runner.complete([*tokens, 9, 9], slot=1, num_tokens=1)
    assert reused == len(tokens)


def test_sampling_defaults_are_those_of_the_command_line(tmp_path: Path) -> None:
    """Also where the model's file recommends others, which only count without."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=2, recommended_temperature=0.125)
    names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
    flags = "--temp 1.0 --top-p 0.75 --top-k 30 --min-p 0.0 --repeat-penalty 1.5"
    with running(model, *flags.split(), ctx_size=512) as runner:
        given = runner.get("/props")["default_generation_settings"]["params"]
    assert [given[name] for name in names] == [1.0, 0.75, 30, 0.0, 1.5]
    with running(model, ctx_size=512) as runner:
        own = runner.get("/props")["default_generation_settings"]["params"]
    assert own["temperature"] == 0.125


def test_a_context_that_may_shift_holds_the_same_kv(tmp_path: Path) -> None:
    """The flag changes no byte of a slot; `--n-predict` holds where nothing is said."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=2, is_endless=True)
    prompt = list(range(3, 203))
    saved = []
    for flags in ((), ("--context-shift", "--n-predict", "700")):
        with running(model, *flags, ctx_size=512, parallel=1) as runner:
            runner.complete(prompt, slot=0, num_tokens=40)
            saved.append(runner.save(0, "a").read_bytes())
            runner.restore(0, "a")
            body = {"prompt": prompt, "id_slot": 0, "cache_prompt": True, "n_keep": 9}
            timings = runner.post("/completion", **body)["timings"]
            assert timings["cache_n"] == len(prompt) - 1
            assert timings["predicted_n"] == (700 if flags else 512 - len(prompt))
            if flags:  # what is reused of a shifted slot is what was kept
                _, reused = runner.complete(prompt, slot=0, num_tokens=1)
                assert reused == 9
    assert saved[0] == saved[1]


def test_slots_keep_what_they_hold(runner: Runner) -> None:
    """A slot that was filled is not emptied by what another slot does."""
    prompt = list(range(3, 90))
    runner.complete(prompt, slot=0, num_tokens=1)
    runner.complete(list(range(200, 300)), slot=1, num_tokens=4)
    _, reused = runner.complete([*prompt, 5], slot=0, num_tokens=1)
    assert reused == len(prompt)


def test_nobody_else_may_read_prompts(place: Place) -> None:
    """Socket, slot directory and slot files are the owner's alone; no core dumps."""
    process = place.start_ready()
    runner = Runner(process, place.directory)
    runner.complete([5, 6, 7], slot=0, num_tokens=1)
    saved = runner.save(0, "kvbus-a")
    runner.close()
    for path in (place.socket, place.slots, saved):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    limits = Path(f"/proc/{engine_pid(process.pid)}/limits").read_text()
    (core,) = (line for line in limits.splitlines() if line.startswith("Max core"))
    assert core.split()[4:6] == ["0", "0"]


def test_logs_hold_no_prompts(place: Place) -> None:
    """Neither a served prompt nor a refused one appears in the log."""
    process = place.start_ready()
    runner = Runner(process, place.directory)
    runner.post("/completion", prompt="Xyzzy secret", n_predict=3)
    with pytest.raises(httpx.HTTPStatusError):
        runner.post("/completion", prompt="Xyzzy secret" * 200, n_predict=3)
    runner.close()
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert "Xyzzy" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(place: Place, number: signal.Signals) -> None:
    """SIGTERM and SIGINT give exit code 0 at once and leave nothing behind."""
    process = place.start_ready()
    (place.slots / "kvbus-1").write_bytes(b"x")
    (place.slots / "kvbus-2").symlink_to("nowhere")
    engine = engine_pid(process.pid)
    process.send_signal(number)
    assert process.wait(END_SECONDS) == 0
    assert not is_alive(engine)
    assert not place.socket.exists()
    assert not place.slots.exists()


def test_files_of_others_stay(place: Place) -> None:
    """A file that is not ours stays in the slot directory."""
    process = place.start_ready()
    for name in ("kvbus-1", "mine"):
        (place.slots / name).write_bytes(b"x")
    process.terminate()
    assert process.wait(END_SECONDS) == 0
    assert [path.name for path in place.slots.iterdir()] == ["mine"]


def test_it_ends_with_its_parent(place: Place) -> None:
    """When the parent is killed, the runner is gone within a second, and cleaned up."""
    command = runner_command(place.model, place.directory, *FLAGS)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(command)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    place.processes.append(parent)
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    engine = engine_pid(guard)
    (place.slots / "kvbus-1").write_bytes(b"x")
    parent.kill()
    assert wait_until(lambda: not is_alive(engine), END_SECONDS)
    assert wait_until(lambda: not is_alive(guard), END_SECONDS)
    assert not place.socket.exists()
    assert not place.slots.exists()


def test_a_dead_engine_ends_the_guard_alike(place: Place) -> None:
    """The guard ends by the engine's signal; the slot files stay the caller's."""
    for number in (signal.SIGKILL, signal.SIGABRT):
        process = place.start_ready()
        (place.slots / "kvbus-1").write_bytes(b"x")
        os.kill(engine_pid(process.pid), number)
        assert process.wait(END_SECONDS) == -number
        assert not place.socket.exists()
        assert (place.slots / "kvbus-1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_guard_takes_the_engine_along(place: Place) -> None:
    """No engine is left when the guard, whose pid the caller has, is killed."""
    process = place.start_ready()
    engine = engine_pid(process.pid)
    process.kill()
    assert wait_until(lambda: not is_alive(engine), END_SECONDS)


def test_a_socket_left_over_is_replaced(place: Place) -> None:
    """A runner starts where a killed one left its socket."""
    process = place.start_ready()
    engine = engine_pid(process.pid)
    process.kill()
    assert wait_until(lambda: not is_alive(engine), END_SECONDS)
    assert place.socket.exists()
    place.start_ready()


def test_a_socket_in_use_is_not_taken(place: Place) -> None:
    """A runner refuses a socket that another process listens on."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place.socket))
        other.listen()
        code, lines, _ = place.failure()
    assert code == 1
    assert lines[-1] == f"runner: socket {place.socket} is in use"
    assert place.socket.exists()


def test_a_bad_model_is_one_clear_line(place: Place) -> None:
    """A missing, foreign or truncated model ends the runner with code 1 and why."""
    missing = place.directory / "missing.gguf"
    foreign = place.directory / "foreign.gguf"
    foreign.write_bytes(b"no model" * 100)
    truncated = place.directory / "truncated.gguf"
    truncated.write_bytes(place.model.read_bytes()[:200_000])
    reasons = {
        missing: "No such file or directory",
        foreign: "not a GGUF file",
        truncated: "the engine could not load it",
    }
    for path, reason in reasons.items():
        code, lines, out = place.failure(model=path)
        assert (code, out) == (1, "")
        assert lines[-1] == f"runner: model {path}: {reason}"
        if path != truncated:
            assert len(lines) == 1


def test_a_missing_engine_is_named(place: Place, tmp_path: Path) -> None:
    """Without xllamacpp the last line names the extra to install."""
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('not here')")
    place_environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        runner_command(place.model, place.directory, *FLAGS),
        env=place_environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "runner: no engine to run models with (not here): install kvbus[embedded]"
    ]


def test_a_long_socket_path_is_refused(place: Place) -> None:
    """A path that does not fit into a socket address is refused in words."""
    deep = place.directory / ("d" * 100)
    deep.mkdir()
    process = subprocess.run(
        runner_command(place.model, deep, *FLAGS),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.strip().endswith("is too long for a unix socket")


def test_what_clients_send_is_not_printed(place: Place) -> None:
    """The engine tells of a grammar that it refuses; nobody reads it in a file."""
    process = place.start_ready()
    transport = httpx.HTTPTransport(uds=str(place.socket))
    with httpx.Client(transport=transport, timeout=30) as client:
        body = {"prompt": "x", "n_predict": 1, "grammar": "root ::= ( my secret"}
        answer = client.post("http://runner/completion", json=body)
        assert answer.status_code == 400
    process.terminate()
    _, printed = process.communicate(timeout=30)
    assert "secret" not in printed
