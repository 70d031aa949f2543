"""A real `kvbus serve` as a child process, and what tests ask of it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 90.0


class Kvbus:
    """One `kvbus serve` with directories of its own, and its log."""

    def __init__(self, cache_dir: Path) -> None:
        # short paths: a unix socket's path has at most 107 bytes
        self.root = Path(tempfile.mkdtemp(prefix="kvbus-e2e-"))
        self.runtime_dir = self.root / "run"
        self.slot_root = Path(tempfile.mkdtemp(prefix="kvbus-e2e-", dir=shm_dir()))
        self.cache_dir = cache_dir
        self.log = self.root / "log"
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.asked = 0
        self.module = "proxy"

    def start(self, *arguments: str, **environment: str) -> "Kvbus":
        """Start it and wait for its ready line."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", self.module, "serve",
                    "--listen", "127.0.0.1:0",
                    "--runtime-dir", str(self.runtime_dir),
                    "--slot-dir", str(self.slot_root),
                    "--cache-dir", str(self.cache_dir),
                    "--threads", "1",
                    *arguments,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        assert self.process.stdout is not None
        line = ""
        for line in self.process.stdout:
            found = re.search(r"ready on (http://\S+)", line)
            if found:
                self.url = found[1]
                return self
        raise AssertionError(f"kvbus did not start: {line} {self.log_text()}")

    def __enter__(self) -> "Kvbus":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.slot_root, ignore_errors=True)

    def stop(self, number: int = signal.SIGTERM) -> float:
        """End it by a signal; returns how long that took, in seconds."""
        process, self.process = self.process, None
        if process is None:
            return 0.0
        started = time.monotonic()
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
        return time.monotonic() - started

    @property
    def pid(self) -> int:
        """The pid of the proxy."""
        assert self.process is not None
        return self.process.pid

    def log_text(self) -> str:
        """Return all that it logged."""
        return self.log.read_text()

    def turns(self) -> list[dict[str, str]]:
        """Return the fields of each turn's log line, oldest first.

        Waits for the lines of all `generate` calls: a line follows its answer.
        """

        def is_complete() -> bool:
            results = [turn["result"] for turn in self._lines()]
            return results.count("complete") >= self.asked

        self.wait(is_complete, what="the last turn's line")
        return self._lines()

    def _lines(self) -> list[dict[str, str]]:
        return [
            dict(re.findall(r'(\w+)=("[^"]*"|\S*)', line))
            for line in self.log_text().splitlines()
            if " event=turn " in line
        ]

    def status(self) -> dict[str, Any]:
        """Return /kvcache/status."""
        answer = httpx.get(f"{self.url}/kvcache/status", trust_env=False, timeout=10)
        return dict(answer.json())

    def request(self, request_id: str) -> dict[str, Any]:
        """Return all that is known of a recent request."""
        url = f"{self.url}/kvcache/requests/{request_id}"
        return dict(httpx.get(url, trust_env=False, timeout=10).json())

    def latest_request(self) -> dict[str, Any]:
        """Return all that is known of the latest request that generates."""
        url = f"{self.url}/kvcache/requests?limit=1"
        (brief,) = httpx.get(url, trust_env=False, timeout=10).json()["requests"]
        return self.request(brief["id"])

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=10).text
        pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
        return sum(map(float, re.findall(pattern, text, re.MULTILINE)))

    def wait(
        self, condition: Callable[[], bool], *, seconds: float = 20.0, what: str = ""
    ) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"never happened: {what}\n{self.log_text()}")
            time.sleep(0.02)

    def wait_commits(self, count: float) -> None:
        """Wait until so many commits have ended, in whatever way."""
        self.wait(
            lambda: self.metric("kvbus_commits_total") >= count,
            what=f"{count} commits",
        )

    def runner_pids(self) -> list[int]:
        """Return the pids of all runners."""
        return [
            runner["pid"]
            for model in self.status()["models"]
            for runner in model["runners"]
        ]

    def runner_pid(self, model_name: str) -> int:
        """Return the pid of the first runner of a model."""
        pids = [
            model["runners"][0]["pid"]
            for model in self.status()["models"]
            if model["name"] == model_name
        ]
        return int(pids[0])

    def store_pid(self) -> int:
        """Return the pid of the store, which may seem away for a moment."""
        self.wait(lambda: "pid" in self.status()["store"], what="the store")
        return int(self.status()["store"]["pid"])

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Post a JSON body."""
        return httpx.post(f"{self.url}{path}", json=body, trust_env=False, timeout=120)

    def generate(self, model: str, prompt: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        """Generate greedily from a raw prompt; returns the whole answer."""
        body = {
            "model": model,
            "prompt": prompt,
            "raw": True,
            "stream": False,
            "options": {"temperature": 0, "num_predict": 8, **options},
        }
        answer = self.post("/api/generate", body)
        self.asked += 1
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def shm_dir() -> str | None:
    """Return where slot files should be, if there is memory to mount them in."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def children_of(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def is_alive(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
