"""Given llama-servers: found, shared, watched; and refused where it is not safe."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.processes import Kvbus, shm_dir
from tests.e2e.test_sharing import TEXT, store_arguments


@contextmanager
def llama_server(
    model: Path,
    *flags: str,
    port: int = 0,
    alias: str = "given",
    context_tokens: int = 8192,
    shows_slots: bool = True,
) -> Iterator[str]:
    """Run a llama-server with a slot directory; gives its URL."""
    flags = (*flags, "--slots") if shows_slots else flags
    with tempfile.TemporaryDirectory(prefix="kvbus-e2e-", dir=shm_dir()) as slots:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "proxy.llamacpp.server",
                "--model", str(model), "--alias", alias,
                "--host", "127.0.0.1", "--port", str(port),
                "--ctx-size", str(context_tokens),
                "--slot-save-path", slots, "--threads", "1", *flags,
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            yield str(ready["address"])
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_two_given_servers_share(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """One model with two runners: what one prefilled the other restores."""
    with ExitStack() as stack:
        ends = [stack.enter_context(ExitStack()) for _ in range(2)]
        urls = [end.enter_context(llama_server(models["tiny"])) for end in ends]
        kvbus.start(
            "--upstream", urls[0], "--upstream", urls[1], "--restore", "always",
            *store_arguments("disk", kvbus),
        )  # fmt: skip
        model = kvbus.status()["models"][0]
        assert model["name"] == "given:latest"
        assert [runner["sharing"] for runner in model["runners"]] == [True, True]
        kvbus.generate("given", TEXT + "One?")
        kvbus.wait_commits(1)
        used = kvbus.turns()[0]["runner"]
        ends[
            [url.endswith(used.rpartition("@")[2]) for url in urls].index(True)
        ].close()
        kvbus.wait(
            lambda: len(kvbus.status()["models"][0]["runners"]) == 1,
            what="the loss of a server",
        )
        kvbus.generate("given", TEXT + "Two?")
        turn = kvbus.turns()[-1]
        assert turn["runner"] != used
        assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700


def test_a_restarted_server_is_used_again(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Behind the same URL a new process is inspected anew and restored into."""
    with llama_server(models["tiny"]) as url:
        kvbus.start(
            "--upstream", url, "--restore", "always", *store_arguments("disk", kvbus)
        )
        kvbus.generate("given", TEXT + "One?")
        kvbus.wait_commits(1)
    kvbus.wait(
        lambda: (
            kvbus.post(
                "/api/generate", {"model": "given", "prompt": "x", "raw": True}
            ).status_code
            == 500
        ),
        what="a clear error",
    )
    kvbus.wait(lambda: bool(kvbus.status()["upstreams"][0]["away"]), what="its end")
    assert kvbus.status()["upstreams"][0]["url"] == url
    with llama_server(models["tiny"], port=int(url.rpartition(":")[2])):
        kvbus.wait(
            lambda: any(r["ready"] for r in kvbus.status()["models"][0]["runners"]),
            what="the server's return",
        )
        told = {"url": url, "away": False, "reason": None}
        assert kvbus.status()["upstreams"] == [told]
        kvbus.generate("given", TEXT + "Two?")
        turn = kvbus.turns()[-1]
        assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700


def test_one_name_for_two_models_is_refused(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Two servers that call different models the same stop kvbus from starting."""
    with (
        llama_server(models["tiny"]) as one,
        llama_server(models["other"]) as other,
        pytest.raises(AssertionError, match="different models called given"),
    ):
        kvbus.start("--upstream", one, "--upstream", other, "--store", "none")


def test_a_server_that_hides_its_slots_is_used_plainly(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Where /slots is switched off nothing can be learned, but all is answered."""
    with llama_server(models["tiny"], shows_slots=False) as url:
        kvbus.start("--upstream", url, *store_arguments("disk", kvbus))
        runner = kvbus.status()["models"][0]["runners"][0]
        assert not runner["sharing"]
        assert "slots" in runner["reason"]
        assert kvbus.generate("given", TEXT)["done"]


@pytest.mark.parametrize("flag", ["--kv-unified", "--no-slot-dir"])
def test_a_server_that_cannot_share_is_used_plainly(
    kvbus: Kvbus, models: dict[str, Path], flag: str
) -> None:
    """The reason is told, and requests are forwarded."""
    flags = ("--parallel", "2", flag) if flag == "--kv-unified" else ()
    with llama_server(models["tiny"], *flags) as url:
        fragment = "#slot-dir=/does/not/exist" if flag == "--no-slot-dir" else ""
        kvbus.start("--upstream", url + fragment, *store_arguments("disk", kvbus))
        runner = kvbus.status()["models"][0]["runners"][0]
        assert not runner["sharing"]
        assert ("unified" if flags else "does not work") in runner["reason"]
        assert kvbus.generate("given", TEXT)["done"]
