"""A real runner of ours as a context, spoken to over its unix socket."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 60
STOP_SECONDS = 10
REQUEST_SECONDS = 120


class Runner:
    """One running `proxy.llamacpp.server`."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self.process = process
        self.slots = directory / "slots"
        self.socket = directory / "r.sock"
        self.ready: dict[str, Any] = {}
        transport = httpx.HTTPTransport(uds=str(self.socket))
        self._http = httpx.Client(
            transport=transport, base_url="http://runner", timeout=REQUEST_SECONDS
        )

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Give the JSON answer of a GET; any status but 200 is an error."""
        return self._http.get(path).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:  # noqa: ANN401 - JSON
        """Give the JSON answer of a POST; any status but 200 is an error."""
        return self._http.post(path, json=body).raise_for_status().json()

    def try_post(self, path: str, **body: Any) -> httpx.Response:  # noqa: ANN401 - JSON
        """Give the answer of a POST, whatever its status."""
        return self._http.post(path, json=body)

    def complete(
        self, token_ids: Sequence[int], *, slot: int, num_tokens: int
    ) -> tuple[list[int], int]:
        """Decode greedily; give the new tokens and how many were in the slot."""
        answer = self.post(
            "/completion",
            prompt=list(token_ids),
            id_slot=slot,
            n_predict=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            cache_prompt=True,
            return_tokens=True,
        )
        return answer["tokens"], answer["timings"]["cache_n"]

    def save(self, slot: int, name: str) -> Path:
        """Save a slot; give the file."""
        self.post(f"/slots/{slot}?action=save", filename=name)
        return self.slots / name

    def restore(self, slot: int, name: str) -> None:
        """Restore a slot from a file in the slot directory."""
        self.post(f"/slots/{slot}?action=restore", filename=name)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def runner_command(model: Path, directory: Path, *flags: str) -> list[str]:
    """Give the command of a runner with its socket and slots below `directory`."""
    command = [sys.executable, "-m", "proxy.llamacpp.server", "--model", str(model)]
    command += ["--host", str(directory / "r.sock"), "--slots", "--metrics"]
    command += ["--slot-save-path", str(directory / "slots"), "--cache-ram", "0"]
    command += ["--threads", "1"]  # several wait for one another on a busy machine
    return [*command, *flags]


@contextmanager
def running(
    model: Path, *flags: str, ctx_size: int = 4096, parallel: int = 2
) -> Iterator[Runner]:
    """Run a runner until the end of the context."""
    flags = ("--ctx-size", str(ctx_size), "--parallel", str(parallel), *flags)
    with tempfile.TemporaryDirectory(prefix="kvbus-") as name:
        directory = Path(name)
        process = subprocess.Popen(
            runner_command(model, directory, *flags),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
        runner = Runner(process, directory)
        assert process.stdout is not None
        try:
            runner.ready = json.loads(process.stdout.readline())
            yield runner
        finally:
            runner.close()
            process.terminate()
            process.wait(STOP_SECONDS)
            process.stdout.close()
