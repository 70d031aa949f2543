"""A real process under its owner: parked, wanted and killed at bad moments."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.llamacpp import embedded
from proxy.llamacpp.embedded import EmbeddedOptions, EmbeddedRunner
from proxy.llamacpp.runner import Runner
from proxy.model_sources import ModelSource
from tests.models import write_tiny_llama

SECONDS = 30.0


class Heard:
    """What is told of a runner."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._changed = asyncio.Event()

    def runner_ready(self, runner: Runner) -> None:
        """Note it."""
        self._note("ready")

    def runner_gone(self, runner: Runner, reason: str) -> None:
        """Note it."""
        self._note("gone")

    def runner_parked(self, runner: Runner) -> None:
        """Note it."""
        self._note("parked")

    def _note(self, word: str) -> None:
        self.words.append(word)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, word: str, *, count: int = 1) -> None:
        """Wait until a word was heard so many times."""
        async with asyncio.timeout(SECONDS):
            while self.words.count(word) < count:
                await self._changed.wait()


@asynccontextmanager
async def owned(model: Path, cache: Path) -> AsyncIterator[tuple[Runner, Heard]]:
    """Run a runner under its owner; nothing is left of it afterwards."""
    source, heard = ModelSource(model=model), Heard()
    files = await source.look(cache)
    runner = Runner(
        runner_id="m/0",
        facts=files.facts,
        listener=heard,
        block_size=None,
        patience=embedded.PATIENCE,
        can_park=True,
    )
    with tempfile.TemporaryDirectory(prefix="kvbus-") as name:
        options = EmbeddedOptions(
            alias="m:latest",
            slots=1,
            context_tokens=512,
            kv_type="f16",
            flash_attention="auto",
            threads=1,
            cache_ram_mib=0,
            socket_path=Path(name) / "r.sock",
            slot_directory=Path(name) / "slots",
        )
        owner = EmbeddedRunner(
            runner,
            options,
            look=lambda: source.look(cache),
            on_files=lambda files: None,
        )
        life = asyncio.create_task(owner.run())
        try:
            yield runner, heard
        finally:
            life.cancel()
            await asyncio.wait({life})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a tiny model."""
    return write_tiny_llama(tmp_path / "m.gguf", seed=1)


def is_alive(pid: int) -> bool:
    """Tell whether a process of ours runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_parked_and_wanted_again(model: Path, tmp_path: Path) -> None:
    """The process ends; another one comes when somebody wants it."""
    async with owned(model, tmp_path) as (runner, heard):
        await heard.wait("ready")
        pid = runner.pid
        assert pid is not None
        runner.park()
        assert not runner.is_ready
        await asyncio.wait_for(runner.wait_ended(), SECONDS)
        assert not is_alive(pid)
        assert runner.pid is None
        runner.want()
        await heard.wait("ready", count=2)
        assert runner.sharing is not None
        assert heard.words == ["ready", "parked", "ready"]


async def test_wanted_before_it_has_ended(model: Path, tmp_path: Path) -> None:
    """The old process ends all the same, and another one is started after it."""
    async with owned(model, tmp_path) as (runner, heard):
        await heard.wait("ready")
        pid = runner.pid
        runner.park()
        runner.want()
        await heard.wait("ready", count=2)
        assert runner.pid != pid
        assert heard.words == ["ready", "parked", "ready"]


async def test_parked_while_it_starts(model: Path, tmp_path: Path) -> None:
    """It starts when it is wanted, also where it was ready just before."""
    async with owned(model, tmp_path) as (runner, heard):
        await asyncio.sleep(0.1)  # in the middle of it, wherever that is
        runner.park()
        await asyncio.wait_for(runner.wait_ended(), SECONDS)
        assert heard.words in (["parked"], ["ready", "parked"])
        assert not runner.is_ready
        runner.want()
        await heard.wait("ready", count=len(heard.words))


async def test_killed_while_it_is_parked(model: Path, tmp_path: Path) -> None:
    """A death at that moment is not followed by a restart."""
    async with owned(model, tmp_path) as (runner, heard):
        await heard.wait("ready")
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGKILL)
        runner.park()
        await asyncio.wait_for(runner.wait_ended(), SECONDS)
        assert heard.words == ["ready", "parked"]
        assert not runner.has_failed


async def test_parked_between_a_death_and_the_next_start(
    model: Path, tmp_path: Path
) -> None:
    """The pause before a restart does not hold up who parks, nor who wants."""
    async with owned(model, tmp_path) as (runner, heard):
        await heard.wait("ready")
        model.unlink()
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGKILL)
        await heard.wait("gone", count=embedded.PATIENCE)
        assert runner.has_failed
        runner.park()
        await asyncio.wait_for(runner.wait_ended(), embedded.FIRST_PAUSE_SECONDS)
        assert not runner.has_failed
        write_tiny_llama(model, seed=1)
        runner.want()
        await heard.wait("ready", count=2)
