"""Measure what a streamed chat below `/v1` costs more than one asked directly.

As `benchmarks.overhead`, whose parts these are, with `POST /v1/chat/completions` at
both ends: `direct` and `again` are llama-servers that get the body themselves, with
their slot named; `kvbus` has no store, so its turn is lease, rendering and tokenizing
of the prompt, and the relay; `embedded` looks the prompt up, and commits after the
answer: what it takes more than `kvbus` is the bookkeeping of sharing. Embedded in the
name of a figure is the kind of store in use here.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.overhead import (
    BLOCK_SIZE,
    CONTEXT_TOKENS,
    MODEL_NAME,
    STREAMING,
    Ask,
    Contenders,
    compare_ttft,
    efforts,
    measure_cpu,
    measure_streaming,
    measure_ttft,
)
from benchmarks.results import Headline, Report
from benchmarks.serving import Endpoint, Generation, Reply, start_with_store, stream
from proxy.model_files import default_cache_dir, ensure_default_model
from tests.e2e.processes import Kvbus
from tests.models import write_tiny_model
from tests.runners import running

PATH = "/v1/chat/completions"
PARTS = ("tiny", "135M")


@contextmanager
def contenders(model: Path, *, threads: int) -> Iterator[Contenders]:
    """Start everybody."""
    with ExitStack() as stack:
        asks: dict[str, Ask] = {}
        own = ("--cache-ram", "8192", "--threads", str(threads))
        for name in ("direct", "again"):
            server = running(model, *own, ctx_size=CONTEXT_TOKENS, parallel=1)
            endpoint = Endpoint.of(stack.enter_context(server))
            asks[name] = _asking(endpoint, id_slot=0)
        flags = (
            "--model", f"{MODEL_NAME}={model}",
            "--ctx", str(CONTEXT_TOKENS),
            "--threads", str(threads),
        )  # fmt: skip
        plain = stack.enter_context(Kvbus(default_cache_dir()))
        plain.start(*flags, "--store", "none")
        asks["kvbus"] = _asking(Endpoint.of(plain))
        stored = stack.enter_context(Kvbus(default_cache_dir()))
        kind = start_with_store(stored, *flags, "--block-size", str(BLOCK_SIZE))
        asks["embedded"] = _asking(Endpoint.of(stored))
        yield Contenders(asks=asks, plain=plain, stored=stored, store_kind=kind)


def _asking(endpoint: Endpoint, **fields: int) -> Ask:
    def ask(generation: Generation) -> Reply:
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": generation.prompt}],
            "max_tokens": generation.num_tokens,
            "temperature": 0,
            "stream": True,
            **fields,
        }
        return stream(endpoint, PATH, body)

    return ask


def run(is_quick: bool) -> Report:
    """Measure with the tiny model and, unless it has to be quick, with the real one."""
    parts = {
        name: effort
        for name, effort in efforts(is_quick=is_quick).items()
        if name in PARTS
    }
    found: dict[str, Any] = {}
    store = ""
    with tempfile.TemporaryDirectory() as scratch:
        for name, effort in parts.items():
            if name == "tiny":
                path = Path(scratch) / "tiny.gguf"
                model = write_tiny_model(path, seed=1, is_endless=True)
            else:
                model = ensure_default_model(default_cache_dir(), print)
            with contenders(model, threads=effort.threads) as all_:
                store = all_.store_kind
                print(f"{name}: time to first token, streaming", flush=True)
                found[name] = {
                    "ttft": compare_ttft(measure_ttft(all_, effort)),
                    "streaming": measure_streaming(all_, effort),
                    "cpu": measure_cpu(all_, effort),
                }
    return Report(
        benchmark="v1_overhead",
        settings={
            "route": PATH,
            "store": store,
            "block_size": BLOCK_SIZE,
            "context_tokens": CONTEXT_TOKENS,
            "parts": {name: asdict(effort) for name, effort in parts.items()},
        },
        results=found,
        summary=[
            line for part, one in found.items() for line in _lines(part, one, store)
        ],
    )


def _lines(part: str, found: Mapping[str, Any], store: str) -> Iterator[Headline]:
    ttft = found["ttft"]
    names = {
        "kvbus": "no store",
        "embedded": f"{store} store",
        "busy": f"{store} store, during a commit",
        "again": "direct, again",
    }
    for name, shown in names.items():
        for key in ("p50", "p99"):
            value = 1e3 * ttft[name][f"{key}_over_direct_seconds"]
            what = f"{part}: TTFT {key} less direct, {shown}"
            yield Headline(what=what, value=value, unit="ms")
    paired = ttft["embedded"]["paired_difference_seconds"]["median"]
    what = f"{part}: TTFT less direct, median of the pairs, {store} store"
    yield Headline(what=what, value=1e3 * paired, unit="ms")
    for name in STREAMING[1:]:
        ratio = found["streaming"][name]["ratio_to_direct"]["median"]
        what = f"{part}: streaming rate over direct, {names[name]}"
        yield Headline(what=what, value=ratio, unit="x")
    for key, value in found["cpu"].items():
        what = f"{part}: {key.removesuffix('_seconds')}, no store"
        yield Headline(what=what, value=1e6 * value, unit="us")


if __name__ == "__main__":
    sys.exit(results.main("v1_overhead", run))
