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

The tiny model shows the overhead best, the real one what it amounts to.
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
from tests.e2e.processes import Kvbus
from tests.models import write_tiny_model
from tests.runners import running

CONTEXT_TOKENS = 4096
PROMPT_TOKENS = 100
FIRST_TOKENS = 4
BLOCK_SIZE = 32
"""So that a prompt of 100 tokens has blocks, whatever the model."""

MODEL_NAME = "bench:1"
LONG_PROMPT = (
    "The keeper of the lighthouse wrote down the weather. One, two, three, four,"
)
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
    long_replies: int
    long_tokens: int


FULL_TINY = Effort(warm_up=10, prompts=150, long_replies=15, long_tokens=2000)
FULL_REAL = Effort(warm_up=3, prompts=60, long_replies=7, long_tokens=448)
QUICK = Effort(warm_up=2, prompts=12, long_replies=2, long_tokens=400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """How to ask everybody, and the two kvbus processes."""

    asks: Mapping[str, Ask]
    plain: Kvbus
    stored: Kvbus
    store_kind: str


@contextmanager
def contenders(model: Path) -> Iterator[Contenders]:
    """Start everybody."""
    with ExitStack() as stack:
        asks: dict[str, Ask] = {}
        for name in ("direct", "again"):
            server = stack.enter_context(
                running(
                    model, "--cache-ram", "8192", ctx_size=CONTEXT_TOKENS, parallel=1
                )
            )
            asks[name] = _direct(Endpoint.of(server))
        flags = ("--model", f"{MODEL_NAME}={model}", "--ctx", str(CONTEXT_TOKENS))
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


def measure_streaming(all_: Contenders, effort: Effort) -> dict[str, Any]:
    """Have everybody write the same long reply, in turns; rates and their ratios."""
    names = ("direct", "again", "kvbus")
    generation = Generation(LONG_PROMPT, effort.long_tokens)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(effort.long_replies):
        for name in _in_turn(names, number):
            reply = all_.asks[name](generation)
            assert reply.num_decoded_tokens == effort.long_tokens, "it ended early"
            rates[name].append(reply.tokens_per_second)
    base = rates["direct"]
    found: dict[str, Any] = {"decoded_tokens": effort.long_tokens}
    for name in names:
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
    before = cpu_seconds(pid)
    for prompt in fresh_prompts(effort.prompts, words=words, seed=2):
        ask(Generation(prompt, FIRST_TOKENS))
    between = cpu_seconds(pid)
    for _ in range(effort.long_replies):
        ask(Generation(LONG_PROMPT, effort.long_tokens))
    per_reply = (cpu_seconds(pid) - between) / effort.long_replies
    per_request = (between - before) / effort.prompts
    return {
        "cpu_per_request_seconds": per_request,
        "cpu_per_token_seconds": (per_reply - per_request) / effort.long_tokens,
    }


# -- the whole --------------------------------------------------------------------


def run(is_quick: bool) -> Report:
    """Measure with the tiny model and, unless it has to be quick, with the real one."""
    found: dict[str, Any] = {}
    store = ""
    with tempfile.TemporaryDirectory() as scratch:
        models = {"tiny": write_tiny_model(Path(scratch) / "tiny.gguf", seed=1)}
        efforts = {"tiny": QUICK if is_quick else FULL_TINY, "135M": FULL_REAL}
        if not is_quick:
            models["135M"] = ensure_default_model(default_cache_dir(), print)
        for name, model in models.items():
            effort = efforts[name]
            with contenders(model) as all_:
                store = all_.store_kind
                print(f"{name}: time to first token", flush=True)
                ttft = compare_ttft(measure_ttft(all_, effort))
                print(f"{name}: streaming", flush=True)
                streaming = measure_streaming(all_, effort)
                cpu = measure_cpu(all_, effort) if name == "tiny" else {}
            found[name] = {"ttft": ttft, "streaming": streaming, "cpu": cpu}
            print(_detail(name, found[name]))
    return Report(
        benchmark="overhead",
        settings={
            "store": store,
            "block_size": BLOCK_SIZE,
            "context_tokens": CONTEXT_TOKENS,
            "slots_per_runner": 1,
            "efforts": {name: asdict(efforts[name]) for name in found},
            "work": "cold prefill of the same fresh prompt everywhere, slot 0",
        },
        results=found,
        summary=_summary(found, store),
    )


def _detail(model: str, found: Mapping[str, Any]) -> str:
    rows: list[tuple[object, ...]] = []
    for name, one in found["ttft"].items():
        if name == "prompt_tokens":
            continue
        spread, paired = one["ttft_seconds"], one["paired_difference_seconds"]
        times = (spread["median"], spread["p99"], *map(paired.get, _QUARTILES))
        rows.append((f"{model} {name}", *(f"{1e3 * t:.2f}" for t in times)))
    first = results.table(
        ("TTFT, ms", "p50", "p99", "paired p25", "median", "p75"), rows
    )
    rows = []
    for name in ("direct", "again", "kvbus"):
        one = found["streaming"][name]
        rate, ratio = one["tokens_per_second"], one["ratio_to_direct"]
        values = (rate["median"], *map(ratio.get, _QUARTILES))
        rows.append((f"{model} {name}", *(f"{value:.3f}" for value in values)))
    second = results.table(
        ("streaming", "tokens/s", "ratio p25", "median", "p75"), rows
    )
    cpu = "".join(f"{key}: {1e6 * t:.0f} us\n" for key, t in found["cpu"].items())
    return f"{first}\n\n{second}\n{cpu}"


_QUARTILES = ("p25", "median", "p75")


def _summary(found: Mapping[str, Any], store: str) -> list[Headline]:
    lines: list[Headline] = []
    for model, one in found.items():
        ttft, streaming = one["ttft"], one["streaming"]

        def over(name: str, key: str, ttft: Mapping[str, Any] = ttft) -> float:
            return 1e3 * float(ttft[name][f"{key}_over_direct_seconds"])

        ratio = streaming["kvbus"]["ratio_to_direct"]["median"]
        rate = f"{model}: streaming rate, kvbus over direct"
        lines += [
            results.at_most(
                f"{model}: TTFT p50, kvbus less direct",
                over("kvbus", "p50"), "ms", goal=3.0,
            ),
            _plain(f"{model}: TTFT p99, kvbus less direct", over("kvbus", "p99")),
            _plain(f"{model}: TTFT p50, {store} store", over("embedded", "p50")),
            _plain(f"{model}: TTFT p50, {store} store, commit under way",
                   over("busy", "p50")),
            _plain(f"{model}: TTFT p50, direct less direct", over("again", "p50")),
            results.at_least(rate, ratio, "x", goal=0.97) if model == "135M"
            else Headline(what=rate, value=ratio, unit="x"),
        ]  # fmt: skip
    return lines


def _plain(what: str, value: float) -> Headline:
    return Headline(what=what, value=value, unit="ms")


if __name__ == "__main__":
    sys.exit(results.main("overhead", run))
