"""Bodies of /v1: packed ones, fields that are taken out, media."""

import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from proxy.errors import RequestError
from proxy.v1.bodies import (
    MAX_UNPACKED_BYTES,
    check_bounds,
    has_media,
    read_object,
    take_model,
    unpack,
    without_taken_out,
)


def request(body: bytes, coding: str = "") -> web.Request:
    """Make a request that has this body."""
    headers = {"Content-Encoding": coding} if coding else {}
    made = make_mocked_request("POST", "/v1/responses", headers=headers)
    made._read_bytes = body
    return made


@pytest.mark.parametrize("coding", ["zstd", "ZSTD", " zstd"])
async def test_a_body_in_zstd(coding: str) -> None:
    """It is unpacked, whatever the case of the word."""
    packed = zstandard.compress(b'{"model": "m"}')
    assert await read_object(request(packed, coding)) == {"model": "m"}


async def test_several_frames_are_one_body() -> None:
    """A client may compress as it goes."""
    packed = zstandard.compress(b'{"model":') + zstandard.compress(b' "m"}')
    assert await read_object(request(packed, "zstd")) == {"model": "m"}


async def test_a_large_plain_body_is_read_beside_the_loop() -> None:
    """The same object comes out of it."""
    text = "x" * (2 << 20)
    assert await read_object(request(b'{"prompt": "%s"}' % text.encode())) == {
        "prompt": text
    }


def test_a_bomb_is_refused_at_its_bound() -> None:
    """20 MiB may come out of a body, and not one byte more."""
    assert len(unpack(zstandard.compress(bytes(MAX_UNPACKED_BYTES)))) == 20 << 20
    with pytest.raises(RequestError, match="too large") as caught:
        unpack(zstandard.compress(bytes(MAX_UNPACKED_BYTES + 1)))
    assert caught.value.status == 413
    with pytest.raises(RequestError, match="too large"):
        unpack(zstandard.compress(bytes(1 << 30)))


@pytest.mark.parametrize(
    ("body", "coding", "says"),
    [
        (b"", "", "missing request body"),
        (b"{nope", "", "invalid character 'n'"),
        (b'{"a": 1', "", "unexpected EOF"),
        (b"[1]", "", "must be a JSON object, not array"),
        (b"{}", "gzip", "'gzip' are not read"),
        (b"{}", "zstd", "not valid zstd"),
        (zstandard.compress(b'{"a": 1}')[:-2], "zstd", "unexpected EOF"),
        (zstandard.compress(b"nope"), "zstd", "invalid character"),
    ],
)
async def test_what_is_no_body(body: bytes, coding: str, says: str) -> None:
    """Each mistake is a 400 that tells what it was."""
    with pytest.raises(RequestError, match=says) as caught:
        await read_object(request(body, coding))
    assert caught.value.status == 400


@pytest.mark.parametrize("value", [None, "", 5, ["m"]])
def test_a_model_must_be_named(value: object) -> None:
    """No name, and what is no name, is a 400."""
    with pytest.raises(RequestError, match="model") as caught:
        take_model({"model": value})
    assert caught.value.status == 400
    assert take_model({"model": "m"}) == "m"


def test_only_what_breaks_a_lease_is_taken_out() -> None:
    """All other fields go on, in their order, known or not."""
    body = {
        "model": "m",
        "n": 2,
        "id_slot": 1,
        "zzz": {"id_slot": 3},
        "n_cmpl": 2,
        "mooncake": {},
        "n_cache_reuse": 64,
        "cache_prompt": True,
        "messages": [],
    }
    kept = without_taken_out(body)
    assert list(kept) == ["model", "zzz", "cache_prompt", "messages"]
    assert kept["zzz"] == {"id_slot": 3}
    assert "n" in body


@pytest.mark.parametrize(
    "body",
    [
        {"json_schema": {"minItems": 10**8}},
        {"response_format": {"json_schema": {"schema": {"maxItems": 10**8}}}},
        {"text": {"format": {"schema": {"maxItems": 10**8}}}},
        {"output_config": {"format": {"schema": {"maxItems": 10**8}}}},
        {"output_format": {"schema": {"maxItems": 10**8}}},
        {"tools": [{"input_schema": {"maxItems": 10**8}}]},
        {"grammar": "(" * 10**5},
        {"grammar_triggers": [{"type": 2, "value": "(a|b|.)*Z"}]},
    ],
)
def test_what_would_end_an_engine_is_refused(body: dict[str, object]) -> None:
    """Wherever it stands in a body."""
    with pytest.raises(RequestError, match="may") as caught:
        check_bounds(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("text", False),
        (None, False),
        ([{"role": "user", "content": "image_url"}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "image"}]}], False),
        ([{"role": "user", "content": [{"type": "image_url"}]}], True),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], True),
        (
            [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}],
            True,
        ),
        ([{"type": "function_call_output", "output": [{"type": "input_image"}]}], True),
        ([{"type": "input_image", "image_url": "data:"}], True),
    ],
)
def test_media_is_found_at_any_depth(messages: object, expected: bool) -> None:
    """Pictures and sounds are told from text that speaks of them."""
    assert has_media(messages) is expected
