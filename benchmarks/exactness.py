"""Whether a prefix that went through a store decodes like a slot that held it.

Two runner processes of one model. For each prompt, cut at whole blocks to n tokens:

1. Slot 0 of runner A is primed with exactly the n tokens, and saved.
2. A fresh slot file is composed of a frame and the rows of the saved one, block by
   block, through the bytes of one block each, as a store does.
3. Runner B, which has never seen the prompt, restores it into a slot.
4. Both get the whole prompt and decode greedily. B must reuse n tokens, and the
   replies must be equal token for token.

The comparison is with a slot that is hot with the same n tokens, never with a cold
one: a cold prefill has other batch shapes, hence other rounding.

    python -m benchmarks.exactness [--model M.gguf] [--tokens 64] [--json FILE]

The exit code is 1 where any prompt failed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from proxy.llamacpp import state
from proxy.model_files import default_cache_dir, ensure_default_model
from tests.runners import Runner, running

BLOCK_SIZE = 32
NUM_SLOTS = 3  # of B; A has two
KV_FLAGS = {
    "f16": ("--flash-attn", "auto"),
    "q8_0": ("--cache-type-k=q8_0", "--cache-type-v=q8_0", "--flash-attn", "on"),
}

_TOPICS = (
    "a lighthouse keeper's log of one winter",
    "how bread dough rises and why it is knocked back",
    "the rules of a card game for three players",
    "a bridge that was built twice",
    "what a compiler does with a loop",
    "the migration of swifts over the Alps",
    "an inventory of a small hardware shop",
    "the tides in a narrow bay",
    "a letter from an archivist to a young colleague",
    "how to repair a bicycle tube by the roadside",
)
_DETAILS = (
    "Keep the dates apart from the places, and name every source that is used.",
    "The reader knows nothing of the subject but is patient and likes numbers.",
    "Where two accounts disagree, give both, the older one first, and say why.",
    "Write plainly; a sentence that needs to be read twice is a sentence too long.",
    "Prices are in shillings, distances in leagues, and times by the church clock.",
    "Do not begin with a definition. Begin with something that can be seen.",
)
_QUESTIONS = (
    "Write the opening paragraph.",
    "What would you ask before starting?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of one prompt."""

    num_prompt_tokens: int
    num_restored_tokens: int
    num_reused_tokens: int
    num_equal_tokens: int
    num_decoded_tokens: int

    @property
    def is_exact(self) -> bool:
        """Whether all was reused and every token is the same."""
        return (
            self.num_reused_tokens == self.num_restored_tokens
            and self.num_equal_tokens == self.num_decoded_tokens
        )


def prompts(count: int) -> list[list[dict[str, str]]]:
    """Give chats that share no prefix to speak of, 100 to 300 tokens each."""
    chats = []
    for number in range(count):
        topic = _TOPICS[number % len(_TOPICS)]
        question = _QUESTIONS[number // len(_TOPICS) % len(_QUESTIONS)]
        details = [
            _DETAILS[(number + k) % len(_DETAILS)] for k in range(3 + number % 9)
        ]
        system = f"Text {number}. You are writing about {topic}. {' '.join(details)}"
        chats.append(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ]
        )
    return chats


def tokenize(runner: Runner, messages: list[dict[str, str]]) -> list[int]:
    """Give the exact tokens of a chat."""
    prompt = runner.post("/apply-template", messages=messages)["prompt"]
    answer = runner.post(
        "/tokenize", content=prompt, add_special=True, parse_special=True
    )
    return [int(token) for token in answer["tokens"]]


def compose(saved: bytes, num_tokens: int, *, n_stream: int) -> bytearray:
    """Make the slot file of the first tokens of a saved one, block by block."""
    parsed = state.parse(saved, len(saved))
    size = state.file_bytes(parsed.layout, num_tokens, n_stream=n_stream)
    composed = bytearray(size)
    token_ids = parsed.token_ids[:num_tokens]
    state.write_frame(composed, parsed.layout, token_ids=token_ids, n_stream=n_stream)
    places = state.block_layout(parsed, BLOCK_SIZE)
    target = state.block_layout_for(parsed.layout, num_tokens, block_size=BLOCK_SIZE)
    for index in range(target.num_blocks):
        stored = b"".join(saved[at : at + size] for at, size in places.pieces(index))
        position = 0
        for at, size in target.pieces(index):
            composed[at : at + size] = stored[position : position + size]
            position += size
    return composed


def try_prompt(
    a: Runner, b: Runner, *, token_ids: list[int], slot: int, num_decoded: int
) -> Trial:
    """Run the four steps for one prompt; B, of `NUM_SLOTS`, restores into `slot`."""
    cut = (len(token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    a.post("/slots/0?action=erase")
    a.complete(token_ids[:cut], slot=0, num_tokens=0)
    saved = a.save(0, "kvbus-primed")
    composed = compose(saved.read_bytes(), cut, n_stream=NUM_SLOTS)
    (b.slots / "kvbus-composed").write_bytes(composed)
    b.restore(slot, "kvbus-composed")
    hot, hot_reused = a.complete(token_ids, slot=0, num_tokens=num_decoded)
    reply, reused = b.complete(token_ids, slot=slot, num_tokens=num_decoded)
    assert hot_reused == cut, "the slot to compare with is not hot"
    return Trial(
        num_prompt_tokens=len(token_ids),
        num_restored_tokens=cut,
        num_reused_tokens=reused,
        num_equal_tokens=sum(x == y for x, y in zip(hot, reply, strict=True)),
        num_decoded_tokens=len(hot),
    )


def run(model: Path, *, kv_type: str, count: int, num_decoded: int) -> list[Trial]:
    """Try `count` prompts with one KV type."""
    flags = KV_FLAGS[kv_type]
    trials = []
    with running(model, *flags) as a, running(model, *flags, parallel=NUM_SLOTS) as b:
        for number, messages in enumerate(prompts(count)):
            trial = try_prompt(
                a,
                b,
                token_ids=tokenize(a, messages),
                slot=number % NUM_SLOTS,
                num_decoded=num_decoded,
            )
            trials.append(trial)
    return trials


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness")
    parser.add_argument("--model", type=Path, help="the default model unless given")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write all trials there")
    options = parser.parse_args(argv)
    model = options.model or ensure_default_model(default_cache_dir(), print)
    results: dict[str, list[Trial]] = {}
    for kv_type in KV_FLAGS:
        trials = run(
            model, kv_type=kv_type, count=options.prompts, num_decoded=options.tokens
        )
        results[kv_type] = trials
        lengths = [trial.num_prompt_tokens for trial in trials]
        equal = sum(trial.num_equal_tokens for trial in trials)
        decoded = sum(trial.num_decoded_tokens for trial in trials)
        exact = sum(trial.is_exact for trial in trials)
        print(
            f"{kv_type}: {exact} of {len(trials)} prompts of {min(lengths)} to"
            f" {max(lengths)} tokens exact, {equal} of {decoded} tokens equal"
        )
    if options.json:
        rows = {kv: [asdict(trial) for trial in t] for kv, t in results.items()}
        options.json.write_text(json.dumps({"model": model.name, "trials": rows}))
    return int(not all(trial.is_exact for t in results.values() for trial in t))


if __name__ == "__main__":
    sys.exit(main())
