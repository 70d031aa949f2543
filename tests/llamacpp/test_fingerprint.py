"""What is in a fingerprint, and what is not."""

import pytest

from proxy.llamacpp.fingerprint import (
    default_block_size,
    fingerprint,
    inexact_flags,
    kv_flags,
)


def test_harmless_flags_are_left_out() -> None:
    """Slots, context, threads, ports and paths do not change KV."""
    line = (
        "--model m.gguf --port 1 -c 8192 -np 4 --slot-save-path /x --metrics"
        " --threads=4 -ngl 99 --flash-attn on -ctk q8_0 --no-webui --alias x:latest"
        " --temp 1 --top-p 1.0 --top-k 40 --min-p 0 --repeat-penalty 1 --mmproj p.gguf"
    )
    assert kv_flags(line.split()) == ()


@pytest.mark.parametrize(
    "flags",
    [
        "--rope-freq-scale 0.5",
        "--lora a.gguf",
        "--override-kv x=int:1",
        "--a-flag-of-tomorrow",
        "LLAMA_ARG_ROPE_FREQ_BASE=5",
        "LLAMA_ATTN_ROT_DISABLE=1",
    ],
)
def test_all_other_flags_count(flags: str) -> None:
    """A flag that may change KV, or that nobody knows, makes another fingerprint."""
    plain = kv_flags(["--model", "m.gguf"])
    other = kv_flags(["--model", "m.gguf", *flags.split()])
    assert other == tuple(flags.split())
    assert fingerprint({"flags": "\0".join(plain)}) != fingerprint(
        {"flags": "\0".join(other)}
    )


def test_fields_do_not_run_into_each_other() -> None:
    """The same characters in other fields are another fingerprint."""
    assert fingerprint({"a": "bc", "d": ""}) != fingerprint({"a": "b", "cd": ""})
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("bytes_per_token", "block_size"),
    [(57_344, 32), (30_464, 64), (23_040, 64), (1_000, 256), (1 << 20, 16)],
)
def test_blocks_are_about_a_megabyte(bytes_per_token: int, block_size: int) -> None:
    """The smallest power of two from 16 to 256 with at least 1 MiB."""
    assert default_block_size(bytes_per_token) == block_size


@pytest.mark.parametrize(
    ("bytes_per_token", "block_size"),
    [(57_344, 64), (131_072, 64), (327_680, 16), (23_040, 64), (1_000, 256)],
)
def test_blocks_of_v_by_element_have_64_tokens(
    bytes_per_token: int, block_size: int
) -> None:
    """At least, where that makes no more than 8 MiB."""
    found = default_block_size(bytes_per_token, is_by_element=True)
    assert found == block_size


@pytest.mark.parametrize(
    "flags", ["--cache-reuse 256", "--lora a.gguf", "LLAMA_ARG_CONTROL_VECTOR=x"]
)
def test_some_flags_forbid_sharing(flags: str) -> None:
    """KV that is no function of the prompt and of what we know is not shared."""
    assert inexact_flags(["--port", "1", *flags.split()]) == flags.split()[0]
    assert inexact_flags(["--port", "1"]) == ""
