"""`kvbus demo`: six agents on two runners, first stock, then through kvbus.

The agents share one system text of about 1,500 tokens and differ in a short question.
Both halves run the same schedule on the same model with the engine's own caches on:

    agent 1 · agents 2 and 3 together · another chat · one runner is killed and
    restarted · agents 4 and 5 together · agent 6

Stock agents are bound to a runner in turn, as clients of two llama-servers are; kvbus
chooses itself. Time to first token is taken at the client. `total_s` is the time in
which requests were being answered: the restart itself is left out on both sides.
"""

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import httpx
import orjson

from proxy.errors import ConfigError
from proxy.model_files import (
    DEFAULT_MODEL_NAME,
    default_cache_dir,
    ensure_default_model,
)
from proxy.serving import cpu_share

NUM_RUNNERS = 2
REPLY_TOKENS = 24
CONTEXT_TOKENS = 4096
OTHER_CHAT = "Write a short poem about the sea, the wind and an old lighthouse."
QUESTIONS = (
    "Which ship goes first when two of them want the same berth?",
    "In which unit are depths kept, and what margin is added?",
    "When may the tool that writes into the register be called?",
    "What does the board show if a number is missing?",
    "How many entries may a list in an answer have?",
    "At which time does the Maren lie at berth two in the example?",
)
SCHEDULE = ((0,), (1, 2), "chat", "restart", (3, 4), (5,))
START_SECONDS = 120.0


@dataclass(slots=True)
class Tally:
    """The figures of one half."""

    name: str
    prefilled_tokens: int = 0
    restored_tokens: int = 0
    total_s: float = 0.0
    ttfts: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the figures as they go into the JSON file."""
        return {
            "prefilled_tokens": self.prefilled_tokens,
            "restored_tokens": self.restored_tokens,
            "ttft_mean_s": round(sum(self.ttfts) / len(self.ttfts), 4),
            "ttft_max_s": round(max(self.ttfts), 4),
            "total_s": round(self.total_s, 4),
        }


class Contender(Protocol):
    """One way to serve the agents."""

    async def ask(self, agent: int, messages: list[dict[str, str]]) -> float:
        """Have a chat answered; returns the seconds to its first token."""
        ...

    async def restart_runner(self) -> None:
        """Kill a runner and wait until there is one in its place."""
        ...

    async def count(self, tally: Tally) -> None:
        """Fill in the tokens that were prefilled and restored."""
        ...


def run(*, json_path: str | None) -> int:
    """Run both halves, print the table, write the JSON file. Raises ConfigError."""
    started = time.monotonic()
    model = ensure_default_model(default_cache_dir(), _say)
    result = asyncio.run(_run(model))
    print(_table(result))
    _say(f"The demo took {time.monotonic() - started:.0f} s.")
    if json_path:
        Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        Path(json_path).write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return 0


async def _run(model: Path) -> dict[str, Any]:
    tallies: list[Tally] = []
    prefix_tokens = 0
    with tempfile.TemporaryDirectory(prefix="kvbus-demo-") as scratch:
        async with _stock(model, Path(scratch)) as stock:
            prefix_tokens = await stock.prefix_tokens()
            tallies.append(await _play("stock", stock))
        async with _kvbus(model, Path(scratch)) as kvbus:
            tallies.append(await _play("kvbus", kvbus))
    figures = {tally.name: tally.figures() for tally in tallies}
    return {"agents": len(QUESTIONS), "prefix_tokens": prefix_tokens, **figures}


async def _play(name: str, contender: Contender) -> Tally:
    tally = Tally(name)
    for step in SCHEDULE:
        started = time.monotonic()
        if step == "restart":
            _say(f"[{name}] a runner is killed and restarted")
            await contender.restart_runner()
            continue
        if step == "chat":
            await contender.ask(0, [{"role": "user", "content": OTHER_CHAT}])
            _say(f"[{name}] another chat was answered in between")
        else:
            agents = [int(agent) for agent in step]
            ttfts = await asyncio.gather(
                *(contender.ask(agent, _messages(agent)) for agent in agents)
            )
            for agent, ttft in zip(agents, ttfts, strict=True):
                _say(f"[{name}] agent {agent + 1} of 6: first token after {ttft:.2f} s")
            tally.ttfts += ttfts
        tally.total_s += time.monotonic() - started
    await contender.count(tally)
    return tally


def _messages(agent: int) -> list[dict[str, str]]:
    text = resources.files("proxy").joinpath("demo_text.md").read_text()
    return [
        {"role": "system", "content": text},
        {"role": "user", "content": QUESTIONS[agent]},
    ]


# -- stock ------------------------------------------------------------------------


class Stock:
    """Two llama-servers with their own caches on, and clients bound to one of them."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model = model
        self._scratch = scratch
        self._processes: list[asyncio.subprocess.Process] = []
        self._clients: list[httpx.AsyncClient] = []
        self._prefilled = 0

    async def start(self, number: int) -> asyncio.subprocess.Process:
        """Start the llama-server `number` and wait until it answers."""
        path = self._scratch / f"stock-{number}.sock"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy.llamacpp.server",
            "--model", str(self._model), "--host", str(path),
            "--ctx-size", str(CONTEXT_TOKENS),
            "--threads", str(cpu_share(NUM_RUNNERS)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self._processes.append(process)
        await _read_until(process, "ready")
        return process

    async def open(self) -> None:
        """Start all servers."""
        for number in range(NUM_RUNNERS):
            await self.start(number)
            path = self._scratch / f"stock-{number}.sock"
            self._clients.append(
                httpx.AsyncClient(
                    base_url="http://stock",
                    timeout=None,  # noqa: S113 - a prefill takes as long as it takes
                    transport=httpx.AsyncHTTPTransport(
                        uds=str(path), limits=httpx.Limits(max_keepalive_connections=0)
                    ),
                )
            )

    async def close(self) -> None:
        """End all servers."""
        for client in self._clients:
            await client.aclose()
        for process in self._processes:
            await _end(process)

    async def prefix_tokens(self) -> int:
        """Count the tokens that the prompts of two agents share."""
        ids: list[list[int]] = []
        for agent in (0, 1):
            body = {"messages": _messages(agent)}
            prompt = await self._clients[0].post("/apply-template", json=body)
            tokens = await self._clients[0].post(
                "/tokenize", json={"content": prompt.json()["prompt"]}
            )
            ids.append(tokens.json()["tokens"])
        shared = 0
        while ids[0][shared] == ids[1][shared]:
            shared += 1
        return shared

    async def ask(self, agent: int, messages: list[dict[str, str]]) -> float:
        """Have a chat answered by the agent's own server."""
        body = {
            "messages": messages,
            "stream": True,
            "temperature": 0,
            "max_tokens": REPLY_TOKENS,
        }

        def is_text(event: dict[str, Any]) -> bool:
            self._prefilled += event.get("timings", {}).get("prompt_n", 0)
            choices = event.get("choices") or [{}]
            return bool(choices[0].get("delta", {}).get("content"))

        client = self._clients[agent % NUM_RUNNERS]
        return await _first_text(client, "/v1/chat/completions", body, is_text)

    async def restart_runner(self) -> None:
        """Kill the first server and start it again."""
        self._processes[0].kill()
        await self._processes[0].wait()
        await self.start(0)

    async def count(self, tally: Tally) -> None:
        """Fill in what the servers said of each request."""
        tally.prefilled_tokens = self._prefilled


@asynccontextmanager
async def _stock(model: Path, scratch: Path) -> AsyncIterator[Stock]:
    stock = Stock(model, scratch)
    try:
        _say("[stock] starting two llama-servers")
        await stock.open()
        yield stock
    finally:
        await stock.close()


# -- kvbus ------------------------------------------------------------------------


class ThroughKvbus:
    """One `kvbus serve` with two runners."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)  # noqa: S113 - as above

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(self, agent: int, messages: list[dict[str, str]]) -> float:
        """Have a chat answered by whichever runner kvbus chooses."""
        body = {
            "model": DEFAULT_MODEL_NAME,
            "messages": messages,
            "options": {"temperature": 0, "num_predict": REPLY_TOKENS},
        }

        def is_text(event: dict[str, Any]) -> bool:
            return bool(event.get("message", {}).get("content"))

        return await _first_text(self._client, "/api/chat", body, is_text)

    async def restart_runner(self) -> None:
        """Kill the runner that was used first; kvbus starts another one."""
        runners = await self._runners()
        os.kill(runners[0]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            now = await self._runners()
            if now[0]["ready"] and now[0]["pid"] != runners[0]["pid"]:
                return
        raise ConfigError("the runner did not come back")

    async def count(self, tally: Tally) -> None:
        """Fill in what the engine confirmed, from the metrics."""
        text = (await self._client.get("/metrics")).text
        tally.prefilled_tokens = _metric(text, "kvbus_prefilled_tokens_total")
        tally.restored_tokens = _metric(text, "kvbus_avoided_prefill_tokens_total")

    async def _runners(self) -> list[dict[str, Any]]:
        status = (await self._client.get("/kvcache/status")).json()
        return list(status["models"][0]["runners"])


@asynccontextmanager
async def _kvbus(model: Path, scratch: Path) -> AsyncIterator[ThroughKvbus]:
    _say("[kvbus] starting kvbus serve with two runners")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "serve",
        "--listen", "127.0.0.1:0",
        "--model", f"{DEFAULT_MODEL_NAME}={model}",
        "--runners", str(NUM_RUNNERS),
        "--ctx", str(CONTEXT_TOKENS),
        "--threads", str(cpu_share(NUM_RUNNERS)),
        "--store", "embedded", "--store-size", "512M",
        "--runtime-dir", str(scratch / "run"),
        "--log-level", "error",
        stdout=asyncio.subprocess.PIPE,
        env=_environment(),
    )  # fmt: skip
    try:
        line = await _read_until(process, "ready on")
        found = re.search(r"http://\S+", line)
        assert found is not None
        kvbus = ThroughKvbus(found[0])
        try:
            yield kvbus
        finally:
            await kvbus.close()
    finally:
        await _end(process)


def _environment() -> dict[str, str]:
    """Return our environment without settings that would change the comparison."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVBUS_") or name == "KVBUS_CACHE_DIR"
    }


# -- both -------------------------------------------------------------------------


async def _first_text(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    is_text: Callable[[dict[str, Any]], bool],
) -> float:
    """Read a streamed answer to its end; returns the seconds to its first text."""
    started = time.monotonic()
    first = 0.0
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise ConfigError(f"{path} answered {response.text}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{") and is_text(orjson.loads(data)) and not first:
                first = time.monotonic() - started
    return first or time.monotonic() - started


async def _read_until(process: asyncio.subprocess.Process, word: str) -> str:
    """Return the first line of a process that holds `word`. Raises ConfigError."""
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        while line := (await process.stdout.readline()).decode():
            if word in line:
                return line
    raise ConfigError(f"a process of the demo ended: {await process.wait()}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


def _metric(text: str, name: str) -> int:
    values = re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, values)))


def _say(text: str) -> None:
    print(text, flush=True)


def _table(result: dict[str, Any]) -> str:
    rows = [
        f"\n{result['agents']} agents, {result['prefix_tokens']} shared tokens,"
        f" {NUM_RUNNERS} runners",
        f"{'':24}{'stock':>10}{'kvbus':>10}{'ratio':>10}",
    ]
    for key, title in (
        ("prefilled_tokens", "prefilled tokens"),
        ("restored_tokens", "restored tokens"),
        ("ttft_mean_s", "mean TTFT, s"),
        ("ttft_max_s", "max TTFT, s"),
        ("total_s", "total time, s"),
    ):
        stock, kvbus = result["stock"][key], result["kvbus"][key]
        ratio = f"{stock / kvbus:.2f}x" if stock and kvbus else ""
        rows.append(f"{title:24}{stock:>10}{kvbus:>10}{ratio:>10}")
    return "\n".join(rows)
