"""Count the bytes that ten prompts take which share 4,000 tokens.

kvbus serves the ten prompts and stores their blocks; a llama-server evaluates the
same ten prompts and saves its slot to a file after each, as one has to without kvbus.
Counted are the bytes that the store holds in the end, and the bytes of the ten files.

A store keeps whole blocks only: the last tokens of each prompt, fewer than a block,
are in the files but not in the store. `ideal` is the ratio of the tokens: ten whole
prompts over one prefix and ten tails.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.agents import shared_tokens
from benchmarks.results import Headline, Report
from benchmarks.serving import Endpoint, Generation, store_in_use
from proxy.model_files import default_cache_dir, ensure_default_model
from tests.e2e.processes import Kvbus, shm_dir
from tests.models import write_tiny_model
from tests.runners import Runner, running

NUM_PROMPTS = 10
SHARED_TOKENS = 4000
QUICK_SHARED_TOKENS = 800
REPLY_TOKENS = 8
CONTEXT_TOKENS = 6144
MODEL_NAME = "bench:1"
SENTENCE = "On day {} the keeper of the lighthouse wrote down the weather. "


def prompts_sharing(runner: Runner, num_tokens: int) -> list[str]:
    """Make prompts that have their first `num_tokens` or a few more in common."""
    text = "".join(map(SENTENCE.format, range(num_tokens // 8)))
    start, stop = 0, len(text)
    while stop - start > 1:
        middle = (start + stop) // 2
        if _num_tokens(runner, text[:middle]) < num_tokens:
            start = middle
        else:
            stop = middle
    tails = (
        f"\nQuestion {number}:" + f" What was different on day {number}?" * 5
        for number in range(NUM_PROMPTS)
    )
    return [text[:stop] + tail for tail in tails]


def _num_tokens(runner: Runner, text: str) -> int:
    return len(_token_ids(runner, text))


def _token_ids(runner: Runner, text: str) -> list[int]:
    answer = runner.post("/tokenize", content=text, add_special=True)
    return list(answer["tokens"])


def save_snapshot(runner: Runner, prompt: str) -> int:
    """Evaluate a prompt, save the slot to a file; returns the file's bytes."""
    Generation(prompt, REPLY_TOKENS).direct(Endpoint.of(runner))
    path = runner.save(0, "snapshot")
    try:
        return path.stat().st_size
    finally:
        path.unlink()


def run(is_quick: bool) -> Report:
    """Give each prompt to both, one after the other."""
    with tempfile.TemporaryDirectory(dir=shm_dir()) as scratch:
        if is_quick:
            model = write_tiny_model(Path(scratch) / "tiny.gguf", seed=1)
            flags: tuple[str, ...] = ("--block-size", "64")
        else:
            model = ensure_default_model(default_cache_dir(), print)
            flags = ()
        with _both(model, flags) as (runner, kvbus, kind):
            num_shared = QUICK_SHARED_TOKENS if is_quick else SHARED_TOKENS
            prompts = prompts_sharing(runner, num_shared)
            ids = [_token_ids(runner, prompt) for prompt in prompts]
            files: list[int] = []
            for number, prompt in enumerate(prompts):
                files.append(save_snapshot(runner, prompt))
                generation = Generation(prompt, REPLY_TOKENS)
                generation.through_kvbus(Endpoint.of(kvbus), model=MODEL_NAME)
                kvbus.wait_commits(number + 1)
                print(f"{number + 1} of {NUM_PROMPTS} prompts", flush=True)
            status = kvbus.status()
            found = _found(ids, files, status)
    print(_detail(found))
    return Report(
        benchmark="dedup",
        settings={
            "model": model.name,
            "store": kind,
            "kvbus_flags": flags,
            "prompts": NUM_PROMPTS,
            "reply_tokens": REPLY_TOKENS,
            "block_size": status["models"][0]["runners"][0]["block_size"],
        },
        results=found,
        summary=[
            Headline(
                what=f"bytes of {NUM_PROMPTS} slot files over bytes in the store",
                value=found["files_over_store"],
                unit="x",
            ),
            Headline(
                what="the same ratio in tokens, if nothing were rounded to blocks",
                value=found["ideal"],
                unit="x",
            ),
        ],
    )


@contextmanager
def _both(model: Path, flags: Sequence[str]) -> Iterator[tuple[Runner, Kvbus, str]]:
    context = ("--ctx", str(CONTEXT_TOKENS))
    with (
        running(model, ctx_size=CONTEXT_TOKENS, parallel=1) as runner,
        store_in_use(
            default_cache_dir(), "--model", f"{MODEL_NAME}={model}", *context, *flags
        ) as (kvbus, kind),
    ):
        yield runner, kvbus, kind


def _found(
    ids: Sequence[Sequence[int]], files: Sequence[int], status: dict[str, Any]
) -> dict[str, Any]:
    shared = shared_tokens(ids)
    num_tokens = sum(map(len, ids))
    store = status["store"]
    return {
        "shared_tokens": shared,
        "prompt_tokens": num_tokens,
        "snapshot_bytes": sum(files),
        "store_bytes": store["used_bytes"],
        "store_blocks": store["blocks"],
        "files_over_store": sum(files) / store["used_bytes"],
        "ideal": num_tokens / (shared + num_tokens - shared * len(ids)),
    }


def _detail(found: dict[str, Any]) -> str:
    rows = [
        ("slot files", f"{found['snapshot_bytes'] / 1e6:.1f}", ""),
        ("store", f"{found['store_bytes'] / 1e6:.1f}", found["store_blocks"]),
    ]
    title = f"{NUM_PROMPTS} prompts, {found['shared_tokens']} tokens in common"
    return results.table((title, "MB", "blocks"), rows)


if __name__ == "__main__":
    sys.exit(results.main("dedup", run))
