"""Measure what it costs to go through kvbus instead of straight to a llama-server.

1. Time to first token of a prompt of about 100 tokens that nobody has seen: `direct`
   asks a llama-server over its unix socket, `kvbus` asks a `kvbus serve --store none`
   over TCP, `embedded` one with a store in the path (lookup before, commit after).
   `again` is a second llama-server like `direct`: what it differs by is noise. Each
   has its own engine process with the same flags and gets the same prompts, so that
   all do the same cold prefill, into the same slot, with the same sampling options.
   Who goes first changes from prompt to prompt. Before the next request all commits
   have ended; `busy` is `embedded` asked again at once, while its commit is under way.
2. Streaming: decoded tokens per second of one long reply, from the request to its end
   at the client; its short prompt is in the slot already, for everybody.
3. The time that the proxy itself computes, per request and per streamed token, which
   does not depend on what else the machine does.

The tiny model shows the overhead best, the real one what it amounts to. Engines have
half of the cores: the rest is for proxy and client, as beside an engine on a GPU. The
last part streams once more with engines on all cores, which the proxy disturbs.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Headline, Report, Spread
from benchmarks.serving import (
    Endpoint,
    Generation,
    Reply,
    cpu_seconds,
    start_with_store,
)
from proxy.model_files import default_cache_dir, ensure_default_model
from proxy.serving import cpu_share
from tests.e2e.processes import Kvbus
from tests.models import write_tiny_model
from tests.runners import running

CONTEXT_TOKENS = 4096
PROMPT_TOKENS = 100
FIRST_TOKENS = 4
BLOCK_SIZE = 32
"""So that a prompt of 100 tokens has blocks, whatever the model."""

MODEL_NAME = "bench:1"
LONG_PROMPTS_TRIED = 100
STREAMING = ("direct", "again", "kvbus")
TTFT_GOAL_MS = 3.0
RATE_GOAL = 0.97
WORDS = """
answer asked care count day distance evening every explain first grey helpful
history kept keeper lamp lighthouse morning nobody north note number question rain
result ship star system thing token water weather why wind works wrote
"""

Ask = Callable[[Generation], Reply]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured with one model."""

    warm_up: int
    prompts: int
    """0: only streaming is measured."""
    replies: int
    tokens: int
    threads: int
    """Of each engine."""


def efforts(*, is_quick: bool) -> dict[str, Effort]:
    """Return what is measured, by the name of its model and of the part."""
    cores = cpu_share(1)
    half = max(1, cores // 2)
    quick = Effort(prompts=12, warm_up=2, replies=2, tokens=400, threads=half)
    tiny = Effort(prompts=150, warm_up=10, replies=15, tokens=1000, threads=half)
    real = Effort(prompts=60, warm_up=3, replies=5, tokens=448, threads=half)
    stream = Effort(prompts=0, warm_up=0, replies=5, tokens=448, threads=cores)
    if is_quick:
        return {"tiny": quick}
    return {"tiny": tiny, "135M": real, "135M, all cores": stream}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """How to ask everybody, and the two kvbus processes."""

    asks: Mapping[str, Ask]
    plain: Kvbus
    stored: Kvbus
    store_kind: str


@contextmanager
def contenders(model: Path, *, threads: int) -> Iterator[Contenders]:
    """Start everybody."""
    with ExitStack() as stack:
        asks: dict[str, Ask] = {}
        own = ("--cache-ram", "8192", "--threads", str(threads))
        for name in ("direct", "again"):
            server = running(model, *own, ctx_size=CONTEXT_TOKENS, parallel=1)
            asks[name] = _direct(Endpoint.of(stack.enter_context(server)))
        flags = (
            "--model", f"{MODEL_NAME}={model}",
            "--ctx", str(CONTEXT_TOKENS),
            "--threads", str(threads),
        )  # fmt: skip
        plain = stack.enter_context(Kvbus(default_cache_dir()))
        plain.start(*flags, "--store", "none")
        asks["kvbus"] = _through(plain)
        stored = stack.enter_context(Kvbus(default_cache_dir()))
        kind = start_with_store(stored, *flags, "--block-size", str(BLOCK_SIZE))
        asks["embedded"] = _through(stored)
        yield Contenders(asks=asks, plain=plain, stored=stored, store_kind=kind)


def _direct(endpoint: Endpoint) -> Ask:
    return lambda generation: generation.direct(endpoint)


def _through(kvbus: Kvbus) -> Ask:
    endpoint = Endpoint.of(kvbus)
    return lambda generation: generation.through_kvbus(endpoint, model=MODEL_NAME)


def fresh_prompts(count: int, *, words: int, seed: int) -> list[str]:
    """Make prompts of so many words that differ from their first word on."""
    chance = random.Random(seed)
    return [
        f"{chance.randrange(10**6)} " + " ".join(chance.choices(WORDS.split(), k=words))
        for _ in range(count)
    ]


def _fitting_words(direct: Ask) -> int:
    """Return how many words make a prompt of about `PROMPT_TOKENS` tokens."""
    trial = Generation(fresh_prompts(1, words=100, seed=0)[0], 1)
    return round(100 * PROMPT_TOKENS / direct(trial).num_prompt_tokens)


# -- time to first token ----------------------------------------------------------


def measure_ttft(all_: Contenders, effort: Effort) -> dict[str, list[Reply]]:
    """Send each prompt to everybody; returns the replies after the warm-up."""
    words = _fitting_words(all_.asks["direct"])
    prompts = fresh_prompts(2 * (effort.warm_up + effort.prompts), words=words, seed=1)
    replies: dict[str, list[Reply]] = {name: [] for name in (*all_.asks, "busy")}
    for number, prompt in enumerate(prompts[::2]):
        for name in _in_turn(all_.asks, number):
            replies[name].append(all_.asks[name](Generation(prompt, FIRST_TOKENS)))
            if name == "embedded":
                other = Generation(prompts[2 * number + 1], FIRST_TOKENS)
                replies["busy"].append(all_.asks[name](other))
                all_.stored.wait_commits(2 * (number + 1))
    return {name: found[effort.warm_up :] for name, found in replies.items()}


def _in_turn(names: Iterable[str], number: int) -> list[str]:
    """Return the names with another one in front from round to round."""
    ordered = list(names)
    first = number % len(ordered)
    return ordered[first:] + ordered[:first]


def compare_ttft(replies: Mapping[str, Sequence[Reply]]) -> dict[str, Any]:
    """Compare everybody with `direct`: percentiles, and differences by prompt."""
    seconds = {
        name: [reply.ttft_seconds for reply in found] for name, found in replies.items()
    }
    base = Spread.of(seconds["direct"])
    compared: dict[str, Any] = {
        "prompt_tokens": statistics.median(
            reply.num_prompt_tokens for reply in replies["direct"]
        )
    }
    for name, values in seconds.items():
        spread = Spread.of(values)
        pairs = zip(values, seconds["direct"], strict=True)
        compared[name] = {
            "ttft_seconds": asdict(spread),
            "p50_over_direct_seconds": spread.median - base.median,
            "p99_over_direct_seconds": spread.p99 - base.p99,
            "paired_difference_seconds": asdict(Spread.of([a - b for a, b in pairs])),
        }
    return compared


# -- streaming --------------------------------------------------------------------


def find_long_reply(ask: Ask, num_tokens: int) -> Generation:
    """Find a prompt whose reply does not end early, once the prompt is in the slot.

    A prompt that is evaluated in one piece may get another reply than one that is in
    the slot already: the batches have other shapes, hence other rounding.
    """
    for prompt in fresh_prompts(LONG_PROMPTS_TRIED, words=20, seed=3):
        generation = Generation(prompt, num_tokens)
        ask(generation)
        if ask(generation).num_decoded_tokens == num_tokens:
            return generation
    raise AssertionError(f"no prompt has a reply of {num_tokens} tokens")


def measure_streaming(all_: Contenders, effort: Effort) -> dict[str, Any]:
    """Have everybody write the same long reply, in turns; rates and their ratios."""
    generation = find_long_reply(all_.asks["direct"], effort.tokens)
    for name in STREAMING:  # from here on all have the prompt in their slot
        all_.asks[name](generation)
    rates: dict[str, list[float]] = {name: [] for name in STREAMING}
    for number in range(effort.replies):
        for name in _in_turn(STREAMING, number):
            reply = all_.asks[name](generation)
            assert reply.num_decoded_tokens == effort.tokens, "it ended early"
            rates[name].append(reply.tokens_per_second)
    base = rates["direct"]
    found: dict[str, Any] = {"decoded_tokens": effort.tokens}
    for name in STREAMING:
        ratios = [a / b for a, b in zip(rates[name], base, strict=True)]
        found[name] = {
            "tokens_per_second": asdict(Spread.of(rates[name])),
            "ratio_to_direct": asdict(Spread.of(ratios)),
        }
    return found


# -- what the proxy computes ------------------------------------------------------


def measure_cpu(all_: Contenders, effort: Effort) -> dict[str, float]:
    """Take the proxy's own processor time, per short request and per token."""
    words = _fitting_words(all_.asks["direct"])
    ask, pid = all_.asks["kvbus"], all_.plain.pid
    generation = find_long_reply(ask, effort.tokens)
    before = cpu_seconds(pid)
    for prompt in fresh_prompts(effort.prompts, words=words, seed=2):
        ask(Generation(prompt, FIRST_TOKENS))
    between = cpu_seconds(pid)
    num_tokens = 0
    for _ in range(effort.replies):
        num_tokens += ask(generation).num_decoded_tokens
    long_seconds = cpu_seconds(pid) - between
    per_request = (between - before) / effort.prompts
    return {
        "cpu_per_request_seconds": per_request,
        "cpu_per_token_seconds": (long_seconds - effort.replies * per_request)
        / num_tokens,
    }


# -- the whole --------------------------------------------------------------------


def run(is_quick: bool) -> Report:
    """Measure with the tiny model and, unless it has to be quick, with the real one."""
    found: dict[str, Any] = {}
    parts = efforts(is_quick=is_quick)
    store = ""
    with tempfile.TemporaryDirectory() as scratch:
        tiny = write_tiny_model(Path(scratch) / "tiny.gguf", seed=1)
        for name, effort in parts.items():
            is_tiny = name == "tiny"
            model = (
                tiny if is_tiny else ensure_default_model(default_cache_dir(), print)
            )
            with contenders(model, threads=effort.threads) as all_:
                store = all_.store_kind
                found[name] = _measure(name, all_, effort)
            print(_detail(name, found[name]))
    return Report(
        benchmark="overhead",
        settings={
            "store": store,
            "block_size": BLOCK_SIZE,
            "context_tokens": CONTEXT_TOKENS,
            "slots_per_runner": 1,
            "parts": {name: asdict(effort) for name, effort in parts.items()},
            "work": "cold prefill of the same fresh prompt everywhere, slot 0",
        },
        results=found,
        summary=_summary(found, store),
    )


def _measure(name: str, all_: Contenders, effort: Effort) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if effort.prompts:
        print(f"{name}: time to first token", flush=True)
        found["ttft"] = compare_ttft(measure_ttft(all_, effort))
    print(f"{name}: streaming", flush=True)
    found["streaming"] = measure_streaming(all_, effort)
    found["cpu"] = measure_cpu(all_, effort) if effort.prompts else {}
    return found


_QUARTILES = ("p25", "median", "p75")


def _detail(part: str, found: Mapping[str, Any]) -> str:
    """Lay out everything that was measured in one part."""
    rows: list[tuple[object, ...]] = []
    for name, one in found.get("ttft", {}).items():
        if name == "prompt_tokens":
            continue
        spread, paired = one["ttft_seconds"], one["paired_difference_seconds"]
        times = (spread["median"], spread["p99"], *map(paired.get, _QUARTILES))
        rows.append((name, *(f"{1e3 * t:.2f}" for t in times)))
    header = (f"{part}: TTFT, ms", "p50", "p99", "less direct: p25", "median", "p75")
    tables = [results.table(header, rows)] if rows else []
    rows = []
    for name in STREAMING:
        one = found["streaming"][name]
        rate, ratio = one["tokens_per_second"], one["ratio_to_direct"]
        values = (rate["median"], *map(ratio.get, _QUARTILES))
        rows.append((name, *(f"{value:.3f}" for value in values)))
    names = (f"{part}: streaming", "tokens/s", "over direct: p25", "median", "p75")
    tables.append(results.table(names, rows))
    lines = [f"{key}: {1e6 * took:.0f} us" for key, took in found["cpu"].items()]
    return "\n\n".join((*tables, "\n".join(lines)))


def _summary(found: Mapping[str, Any], store: str) -> list[Headline]:
    lines: list[Headline] = []
    for part, one in found.items():
        if ttft := one.get("ttft"):
            lines += _ttft_lines(part, ttft, store)
        streaming = one["streaming"]
        ratio = streaming["kvbus"]["ratio_to_direct"]["median"]
        what = f"{part}: streaming rate, kvbus over direct"
        if part == "135M":
            lines.append(results.at_least(what, ratio, "x", goal=RATE_GOAL))
        else:
            lines.append(Headline(what=what, value=ratio, unit="x"))
        lines.append(
            Headline(
                what=f"{part}: streaming rate, direct over direct",
                value=streaming["again"]["ratio_to_direct"]["median"],
                unit="x",
            )
        )
    return lines


def _ttft_lines(part: str, ttft: Mapping[str, Any], store: str) -> list[Headline]:
    def over(name: str, key: str) -> float:
        return 1e3 * float(ttft[name][f"{key}_over_direct_seconds"])

    def line(what: str, milliseconds: float) -> Headline:
        return Headline(what=f"{part}: {what}", value=milliseconds, unit="ms")

    paired = ttft["kvbus"]["paired_difference_seconds"]["median"]
    return [
        results.at_most(
            f"{part}: TTFT p50, kvbus less direct",
            over("kvbus", "p50"),
            "ms",
            goal=TTFT_GOAL_MS,
        ),
        line("TTFT, kvbus less direct, median of the pairs", 1e3 * paired),
        line("TTFT p99, kvbus less direct", over("kvbus", "p99")),
        line(f"TTFT p50, {store} store, less direct", over("embedded", "p50")),
        line(f"TTFT p50, {store} store busy, less direct", over("busy", "p50")),
        line("TTFT p50, direct less direct", over("again", "p50")),
    ]


if __name__ == "__main__":
    sys.exit(results.main("overhead", run))
