"""Count how often eight agents with one system text have it prefilled.

The agents share about 1,500 tokens of text and differ in a short question. Three
contenders take turns, each with fresh processes and the same schedule:

    agent 1 · 2 and 3 · 4 and 5 · a runner is killed and restarted · 6 and 7 · 8

- `no reuse`: two llama-servers that keep nothing between requests;
- `stock`: two llama-servers with the engine's caches on, agents bound to them in turn;
- `kvbus`: two runners of kvbus with its store; it chooses the runner.

Prefilled tokens are what the engine says of each request. For kvbus there is a bound:
one prefix, everybody's own tail, and at most a block less one token per restore.
"""

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.contenders import (
    CONTEXT_TOKENS,
    NUM_RUNNERS,
    REPLY_TOKENS,
    Asked,
    Bound,
    Scenario,
    Step,
    play_bound,
    play_kvbus,
)
from benchmarks.results import Headline, Report, Spread
from proxy.model_files import default_cache_dir, ensure_default_model
from proxy.serving import cpu_share
from tests.models import write_tiny_model

QUESTIONS = (
    "Which ship goes first when two of them want the same berth?",
    "In which unit are depths kept, and what margin is added?",
    "When may the tool that writes into the register be called?",
    "What does the board show if a number is missing?",
    "How many entries may a list in an answer have?",
    "At which time does the Maren lie at berth two in the example?",
    "Who has to be told when a pilot is late?",
    "May two ships lie side by side at one berth?",
)
SCHEDULE: tuple[Step, ...] = ((0,), (1, 2), (3, 4), (), (5, 6), (7,))
QUICK_SCHEDULE: tuple[Step, ...] = ((0,), (1, 2), (), (3,))


# -- the comparison ---------------------------------------------------------------


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with."""
    columns = zip(*prompts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, columns))


def prefill_bound(asked: Sequence[Asked], *, prefix: int, block_size: int) -> int:
    """Return what kvbus prefills at most: prefix + tails + (B - 1) per restore."""
    tails = sum(one.num_prompt_tokens - prefix for one in asked)
    num_restores = sum(one.decision == "restore" for one in asked)
    return prefix + tails + num_restores * (block_size - 1)


def run(is_quick: bool) -> Report:
    """Let the contenders take turns, round by round."""
    with tempfile.TemporaryDirectory() as scratch:
        scenario = _scenario(is_quick, Path(scratch))
        servers = Bound(scenario, keeps=False)
        try:
            prefix = shared_tokens(servers.prompts())
        finally:
            servers.close()
        rounds = [_round(scenario, prefix, n) for n in range(1 if is_quick else 3)]
    print(_detail(rounds))
    settings = {
        "model": scenario.model.name,
        "agents": len(scenario.agents),
        "runners": NUM_RUNNERS,
        "slots_per_runner": 1,
        "threads_per_runner": cpu_share(NUM_RUNNERS),
        "context_tokens": CONTEXT_TOKENS,
        "reply_tokens": REPLY_TOKENS,
        "shared_tokens": prefix,
        "schedule": [[agent + 1 for agent in step] for step in scenario.schedule],
        "kvbus_flags": scenario.kvbus_flags,
        "rounds": len(rounds),
        **rounds[0]["kvbus_facts"],
    }
    compared = _compare(rounds)
    return Report(
        benchmark="agents",
        settings=settings,
        results={"rounds": rounds, **compared},
        summary=_summary(compared, settings),
    )


def _scenario(is_quick: bool, scratch: Path) -> Scenario:
    text = resources.files("proxy").joinpath("demo_text.md").read_text()
    if is_quick:
        return Scenario(
            system_text=text[: len(text) // 4],
            questions=QUESTIONS,
            model=write_tiny_model(scratch / "tiny.gguf", seed=1),
            model_name="tiny",
            schedule=QUICK_SCHEDULE,
            # its prefill is cheaper than any restore
            kvbus_flags=("--restore", "always", "--block-size", "64"),
        )
    return Scenario(
        system_text=text,
        questions=QUESTIONS,
        model=ensure_default_model(default_cache_dir(), print),
        model_name="smollm2:135m",
        schedule=SCHEDULE,
        kvbus_flags=(),
    )


def _round(scenario: Scenario, prefix: int, number: int) -> dict[str, Any]:
    """Let every contender play once; who begins changes from round to round."""
    facts: dict[str, Any] = {}

    def through_kvbus() -> list[Asked]:
        asked, found = play_kvbus(scenario)
        facts.update(found)
        return asked

    contenders: list[tuple[str, Callable[[], list[Asked]]]] = [
        ("no reuse", lambda: play_bound(scenario, keeps=False)),
        ("stock", lambda: play_bound(scenario, keeps=True)),
        ("kvbus", through_kvbus),
    ]
    first = number % len(contenders)
    played: dict[str, list[Asked]] = {}
    for name, contender in contenders[first:] + contenders[:first]:
        print(f"round {number + 1}: {name}", flush=True)
        played[name] = contender()
    asked = played["kvbus"]
    bound = prefill_bound(asked, prefix=prefix, block_size=facts["block_size"])
    return {
        "kvbus_facts": facts,
        "kvbus_bound_tokens": bound,
        **{name: _figures(played[name]) for name, _ in contenders},
    }


def _figures(asked: Sequence[Asked]) -> dict[str, Any]:
    ttfts = [one.ttft_seconds for one in asked]
    return {
        "prefilled_tokens": sum(one.num_prefilled_tokens for one in asked),
        "restored_tokens": sum(one.num_restored_tokens for one in asked),
        "ttft_mean_seconds": statistics.fmean(ttfts),
        "ttft_max_seconds": max(ttfts),
        "requests": [asdict(one) for one in asked],
    }


def _compare(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take the ratios within each round, and their spread over the rounds."""
    compared: dict[str, Any] = {}
    for key in ("prefilled_tokens", "ttft_mean_seconds", "ttft_max_seconds"):
        for baseline in ("stock", "no reuse"):
            ratios = [one[baseline][key] / one["kvbus"][key] for one in rounds]
            name = f"{key}_{baseline.replace(' ', '_')}_over_kvbus"
            compared[name] = asdict(Spread.of(ratios))
    over = [
        one["kvbus"]["prefilled_tokens"] - one["kvbus_bound_tokens"] for one in rounds
    ]
    compared["tokens_over_bound"] = asdict(Spread.of(over))
    return compared


def _summary(compared: dict[str, Any], settings: dict[str, Any]) -> list[Headline]:
    lines = [
        Headline(
            what=f"{baseline} over kvbus ({settings['store']}): {what}",
            value=compared[f"{key}_{baseline.replace(' ', '_')}_over_kvbus"]["median"],
            unit="x",
        )
        for key, what in (
            ("prefilled_tokens", "prefilled tokens"),
            ("ttft_mean_seconds", "mean TTFT"),
            ("ttft_max_seconds", "max TTFT"),
        )
        for baseline in ("stock", "no reuse")
    ]
    worst = compared["tokens_over_bound"]["maximum"]
    bound = "prefilled tokens of kvbus over prefix + tails + (B-1) a restore, worst"
    return [*lines, results.at_most(bound, worst, "tokens", goal=0)]


def _detail(rounds: Sequence[dict[str, Any]]) -> str:
    """Lay out what each contender did in each round."""
    rows = [
        (
            f"round {number}, {name}",
            one[name]["prefilled_tokens"],
            one["kvbus_bound_tokens"] if name == "kvbus" else "",
            one[name]["restored_tokens"],
            f"{one[name]['ttft_mean_seconds']:.3f}",
            f"{one[name]['ttft_max_seconds']:.3f}",
        )
        for number, one in enumerate(rounds, 1)
        for name in ("no reuse", "stock", "kvbus")
    ]
    header = ("", "prefilled", "bound", "restored", "TTFT mean s", "TTFT max s")
    return results.table(header, rows)


if __name__ == "__main__":
    sys.exit(results.main("agents", run))
