"""Two ways to serve some agents on two runners: llama-servers, and kvbus.

A schedule is played by each in the same way; what is asked and in which order is told
by a `Scenario`. Prefilled tokens are what the engine says of each request.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from benchmarks.serving import Endpoint, Reply, store_in_use, stream
from proxy.model_files import default_cache_dir
from proxy.serving import cpu_share
from tests.e2e.processes import Kvbus
from tests.runners import Runner, running

NUM_RUNNERS = 2
REPLY_TOKENS = 16
CONTEXT_TOKENS = 4096
ENGINE_CACHE_MIB = 8192  # the engine's default
Step = tuple[int, ...]
"""The agents that ask at the same time; none: a runner is restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What became of one agent's request."""

    agent: int
    ttft_seconds: float
    total_seconds: float
    num_prompt_tokens: int
    num_prefilled_tokens: int
    num_restored_tokens: int = 0
    decision: str = ""


class Contender(Protocol):
    """One way to serve the agents."""

    def ask(self, agent: int) -> Reply:
        """Have an agent's question answered."""
        ...

    def restart_runner(self) -> None:
        """Kill a runner and wait until there is another in its place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What all contenders get."""

    model: Path
    model_name: str
    system_text: str
    questions: tuple[str, ...]
    schedule: tuple[Step, ...]
    kvbus_flags: tuple[str, ...]

    def messages(self, agent: int) -> list[dict[str, str]]:
        """Return the chat of an agent."""
        return [
            {"role": "system", "content": self.system_text},
            {"role": "user", "content": self.questions[agent]},
        ]

    @property
    def agents(self) -> list[int]:
        """All agents, in the order in which they ask."""
        return list(chain.from_iterable(self.schedule))


class Bound:
    """Two llama-servers, each agent bound to one of them."""

    def __init__(self, scenario: Scenario, *, keeps: bool) -> None:
        self._scenario = scenario
        self._keeps = keeps
        self._stacks = [ExitStack() for _ in range(NUM_RUNNERS)]
        self._runners = [self._start(stack) for stack in self._stacks]

    def _start(self, stack: ExitStack) -> Runner:
        flags = (
            "--cache-ram", str(ENGINE_CACHE_MIB if self._keeps else 0),
            "--threads", str(cpu_share(NUM_RUNNERS)),
        )  # fmt: skip
        server = running(
            self._scenario.model, *flags, ctx_size=CONTEXT_TOKENS, parallel=1
        )
        return stack.enter_context(server)

    def close(self) -> None:
        """End both."""
        for stack in self._stacks:
            stack.close()

    def ask(self, agent: int) -> Reply:
        """Have a question answered by the agent's own server."""
        body = {
            "messages": self._scenario.messages(agent),
            "stream": True,
            "temperature": 0,
            "max_tokens": REPLY_TOKENS,
            "cache_prompt": self._keeps,
        }
        endpoint = Endpoint.of(self._runners[agent % NUM_RUNNERS])
        return stream(endpoint, "/v1/chat/completions", body)

    def restart_runner(self) -> None:
        """Kill the first server and start it again."""
        self._runners[0].process.kill()
        self._stacks[0].close()
        self._runners[0] = self._start(self._stacks[0])

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each agent's prompt."""
        runner = self._runners[0]
        texts = (
            runner.post("/apply-template", messages=self._scenario.messages(agent))
            for agent in self._scenario.agents
        )
        return [
            runner.post("/tokenize", content=text["prompt"], add_special=True)["tokens"]
            for text in texts
        ]


class ThroughKvbus:
    """One `kvbus serve` with two runners."""

    def __init__(self, kvbus: Kvbus, scenario: Scenario) -> None:
        self.kvbus = kvbus
        self._scenario = scenario

    def ask(self, agent: int) -> Reply:
        """Have a question answered by whichever runner kvbus chooses."""
        body = {
            "model": self._scenario.model_name,
            "messages": self._scenario.messages(agent),
            "options": {"temperature": 0, "num_predict": REPLY_TOKENS},
        }
        return stream(Endpoint.of(self.kvbus), "/api/chat", body)

    def restart_runner(self) -> None:
        """Kill the first runner; kvbus starts another one."""
        old = self.kvbus.runner_pids()[0]
        os.kill(old, signal.SIGKILL)

        def is_replaced() -> bool:
            runner = self.kvbus.status()["models"][0]["runners"][0]
            return bool(runner["ready"] and runner["pid"] != old)

        self.kvbus.wait(is_replaced, seconds=60, what="a new runner")


# -- one contender's turn ---------------------------------------------------------


def play(contender: Contender, scenario: Scenario) -> list[tuple[int, Reply]]:
    """Run the schedule; returns the replies in the order of the agents."""
    replies: list[tuple[int, Reply]] = []
    with ThreadPoolExecutor(NUM_RUNNERS) as pool:
        for step in scenario.schedule:
            if not step:
                contender.restart_runner()
                continue
            replies += zip(step, pool.map(contender.ask, step), strict=True)
    return replies


def play_bound(scenario: Scenario, *, keeps: bool) -> list[Asked]:
    """Let two llama-servers serve the schedule."""
    servers = Bound(scenario, keeps=keeps)
    try:
        return [
            Asked(
                agent=agent,
                ttft_seconds=reply.ttft_seconds,
                total_seconds=reply.total_seconds,
                num_prompt_tokens=reply.num_prompt_tokens,
                num_prefilled_tokens=reply.num_prefilled_tokens or 0,
            )
            for agent, reply in play(servers, scenario)
        ]
    finally:
        servers.close()


def play_kvbus(scenario: Scenario) -> tuple[list[Asked], dict[str, Any]]:
    """Let kvbus serve the schedule; also tells its store and block size."""
    flags = (
        "--model", f"{scenario.model_name}={scenario.model}",
        "--runners", str(NUM_RUNNERS), "--ctx", str(CONTEXT_TOKENS),
        "--threads", str(cpu_share(NUM_RUNNERS)),
        *scenario.kvbus_flags,
    )  # fmt: skip
    with store_in_use(default_cache_dir(), *flags) as (kvbus, store):
        replies = play(ThroughKvbus(kvbus, scenario), scenario)
        num_turns = len(replies)
        kvbus.wait(lambda: len(kvbus.turns()) >= num_turns, what="all turns' lines")
        runners = kvbus.status()["models"][0]["runners"]
        asked = [
            _asked(agent, reply, turn)
            for (agent, reply), turn in _pair(replies, kvbus.turns())
        ]
        return asked, {"store": store, "block_size": runners[0]["block_size"]}


def _pair(
    replies: Sequence[tuple[int, Reply]], turns: Sequence[dict[str, str]]
) -> Iterator[tuple[tuple[int, Reply], dict[str, str]]]:
    """Find each reply's line in the log: those of one step may be swapped.

    Of such two it does not matter which is which for any sum; the number of prompt
    tokens and the rest of the line belong together.
    """
    left = list(turns)
    for agent, reply in replies:
        turn = next(
            turn
            for turn in left
            if int(turn["prompt_tokens"]) == reply.num_prompt_tokens
        )
        left.remove(turn)
        yield (agent, reply), turn


def _asked(agent: int, reply: Reply, turn: dict[str, str]) -> Asked:
    return Asked(
        agent=agent,
        ttft_seconds=reply.ttft_seconds,
        total_seconds=reply.total_seconds,
        num_prompt_tokens=int(turn["prompt_tokens"]),
        num_prefilled_tokens=int(turn["prefilled_tokens"]),
        num_restored_tokens=int(turn["restored_tokens"]),
        decision=turn["decision"],
    )
