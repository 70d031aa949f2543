"""What must be equal for the KV of one runner to be right in another.

Rules:
1. Everything that changes K or V rows is in: model content (tokenizer, architecture
   and RoPE metadata are part of it), KV types and layout, engine build, every flag
   of the engine that is not known to be harmless, block size, namespace.
2. What the composer adapts or what only changes speed is not: number of slots and
   streams, batch sizes, threads, GPU layers; the context size only as far as RoPE
   depends on it.
3. Fields are named and length-prefixed, so that no two sets of fields collide.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from proxy.blocks import Fingerprint

HARMLESS_FLAGS: Mapping[str, int] = {
    # flag -> values that follow it
    "-m": 1, "--model": 1, "-a": 1, "--alias": 1, "--host": 1, "--port": 1,
    "-c": 1, "--ctx-size": 1, "-np": 1, "--parallel": 1, "-b": 1, "--batch-size": 1,
    "-ub": 1, "--ubatch-size": 1, "-t": 1, "--threads": 1, "-tb": 1,
    "--threads-batch": 1, "--threads-http": 1, "-ngl": 1, "--gpu-layers": 1,
    "--n-gpu-layers": 1, "--slot-save-path": 1, "--cache-ram": 1, "-cram": 1,
    "--slots": 0, "--no-slots": 0, "--metrics": 0, "--props": 0, "--no-webui": 0,
    "--webui": 0, "--no-ui": 0, "--offline": 0, "--jinja": 0, "--no-jinja": 0,
    "--chat-template": 1, "--chat-template-file": 1, "--log-disable": 0,
    "--log-verbosity": 1, "-lv": 1, "-v": 0, "--verbose": 0, "--log-file": 1,
    "--log-colors": 1, "--log-timestamps": 0, "--no-log-timestamps": 0,
    "--log-prefix": 0, "--no-log-prefix": 0, "--parent-fd": 1, "--timeout": 1,
    "-to": 1, "--no-kv-unified": 0, "--kv-unified": 0, "-kvu": 0, "-no-kvu": 0,
    "--no-cache-idle-slots": 0, "--cache-idle-slots": 0, "--cont-batching": 0,
    "-cb": 0, "--mlock": 0, "--no-mmap": 0, "--mmap": 0, "--load-mode": 1,
    "--slot-prompt-similarity": 1, "-sps": 1, "--ctx-checkpoints": 1,
    "--no-context-shift": 0, "--context-shift": 0, "--keep": 1, "-n": 1,
    "--predict": 1, "--n-predict": 1, "--no-warmup": 0,
    "--warmup": 0, "--seed": 1, "-s": 1, "--temp": 1, "--top-p": 1, "--top-k": 1,
    "--min-p": 1, "--repeat-penalty": 1, "--reasoning-format": 1,
    "-mm": 1, "--mmproj": 1,
    "--prio": 1, "--numa": 1, "--sse-ping-interval": 1, "--api-key": 1,
    # told by the probed state file
    "-fa": 1, "--flash-attn": 1, "-ctk": 1, "--cache-type-k": 1, "-ctv": 1,
    "--cache-type-v": 1,
}  # fmt: skip


def kv_flags(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of a llama-server command line that may change KV.

    `arguments` is the command line without the program. Unknown flags count: better
    a miss than a wrong hit.
    """
    found: list[str] = []
    i = 0
    while i < len(arguments):
        name, has_value, _ = arguments[i].partition("=")
        values = HARMLESS_FLAGS.get(name)
        if values is None:
            found.append(arguments[i])
            i += 1
        else:
            i += 1 if has_value else 1 + values
    return tuple(found)


INEXACT_FLAGS = (
    # K and V of a token are then no function of the tokens before it
    "--cache-reuse", "LLAMA_ARG_CACHE_REUSE",
    # their contents and scales are not known here
    "--lora", "--control-vector", "LLAMA_ARG_LORA", "LLAMA_ARG_CONTROL_VECTOR",
)  # fmt: skip


def inexact_flags(arguments: Sequence[str]) -> str:
    """Return the first flag under which KV must not be shared at all, or ""."""
    return next((arg for arg in arguments if arg.startswith(INEXACT_FLAGS)), "")


def shifts_context(arguments: Sequence[str]) -> bool:
    """Tell whether a server shifts a context that is full.

    >>> shifts_context(["--context-shift"]), shifts_context(["--port", "1"])
    (True, False)
    """
    return any(
        arg == "--context-shift" or arg.startswith("LLAMA_ARG_CONTEXT_SHIFT=")
        for arg in arguments
    )


def rope_context(
    metadata: Mapping[str, object],
    *,
    architecture: str,
    trained_tokens: int,
    context_tokens: int,
) -> str:
    """Tell which of its RoPE factors a LongRoPE model uses: "long" or "short".

    llama.cpp takes the long factors when a sequence's context is larger than the one
    that the model was trained with at first (`rope.scaling.original_context_length`,
    else `context_length`). For all other models the answer changes nothing but the
    key, and only where the context exceeds the trained one.
    """
    key = f"{architecture}.rope.scaling.original_context_length"
    original = metadata.get(key)
    limit = original if isinstance(original, int) else trained_tokens
    return "long" if context_tokens > limit else "short"


def fingerprint(fields: Mapping[str, bytes | str | int]) -> Fingerprint:
    """Digest named fields; their order does not matter."""
    digest = blake2b(digest_size=32, person=b"kvbus-fp-1")
    for name in sorted(fields):
        value = fields[name]
        data = value if isinstance(value, bytes) else str(value).encode()
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return Fingerprint(digest.digest())


def default_block_size(kv_bytes_per_token: int, *, is_by_element: bool = False) -> int:
    """Return the smallest power of two from 16 to 256 with 1 MiB or more a block.

    Objects of 0.5 to 4 MiB move best; a restore recomputes up to a block less one.
    Where V lies by element each of its elements moves by itself, and moves twice as
    fast by 64 tokens as by 32: such blocks have 64 where that makes 8 MiB at most. A
    memory that has no rows at all is cut by 64.

    >>> default_block_size(57_344), default_block_size(57_344, is_by_element=True)
    (32, 64)
    """
    if not kv_bytes_per_token:
        return 64
    size = 16
    while size < 256 and size * kv_bytes_per_token < 1 << 20:
        size *= 2
    while is_by_element and size < 64 and 2 * size * kv_bytes_per_token <= 8 << 20:
        size *= 2
    return size
