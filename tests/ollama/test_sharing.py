"""What requests say about sharing: every key and form, and all that is wrong."""

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from proxy.errors import RequestError
from proxy.ollama.backend import ReuseOptions
from proxy.ollama.sharing import KEYS, SharingPolicy

POLICY = SharingPolicy(lambda: ("tcp", "disk"))


def read(body: object = None, *headers: tuple[str, str]) -> ReuseOptions:
    """Read what a body's value and headers say."""
    request = SimpleNamespace(headers=CIMultiDict(headers))
    return POLICY(cast("web.Request", request), body)


def header(text: str) -> ReuseOptions:
    """Read what the options header says."""
    return read(None, ("X-KVBus-Options", text))


def test_nothing_said_shares_all() -> None:
    """Neither a field nor a header: one namespace, read and written."""
    assert read() == read({}) == header("") == header(" ; , ") == ReuseOptions()
    nothing = dict.fromkeys(KEYS)
    assert read(nothing) == header(orjson.dumps(nothing).decode()) == ReuseOptions()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"enable": True}, ReuseOptions()),
        ({"enable": False}, ReuseOptions(read=False, write=False)),
        ({"enable": False, "read": True}, ReuseOptions(read=False, write=False)),
        ({"read": False}, ReuseOptions(read=False)),
        ({"write": False}, ReuseOptions(write=False)),
        ({"block_size": 16}, ReuseOptions(block_size=16)),
        ({"block_size": 1024}, ReuseOptions(block_size=1024)),
        ({"transport": "disk"}, ReuseOptions()),
        (
            {"replica_num": 2, "soft_pin": True},
            ReuseOptions(replica_num=2, soft_pin=True),
        ),
        ({"namespace": "team a/ü-😀"}, ReuseOptions(namespace="team a/ü-😀")),
    ],
)
def test_a_key_means_the_same_everywhere(
    values: dict[str, Any], expected: ReuseOptions
) -> None:
    """In the body, as JSON in the header, and as pairs in the header."""
    assert read(values) == expected
    assert header(orjson.dumps(values).decode()) == expected
    for separator in (";", ", ", " ;"):
        pairs = separator.join(f"{key} = {value}" for key, value in values.items())
        assert header(pairs) == expected


def test_the_body_outranks_the_header() -> None:
    """Key by key: what the body does not say is taken from the header."""
    options = read({"namespace": "b"}, ("X-KVBus-Options", "namespace=h; write=false"))
    assert options == ReuseOptions(namespace="b", write=False)


def test_several_header_lines_are_one() -> None:
    """Lines add up, in whatever form each is; a key twice is refused."""
    lines = [("X-KVBus-Options", '{"read": false}'), ("x-kvbus-options", "soft_pin=on")]
    assert read(None, *lines) == ReuseOptions(read=False, soft_pin=True)
    with pytest.raises(RequestError, match="twice"):
        read(None, *lines, ("X-KVBus-Options", "read=true"))
    with pytest.raises(RequestError, match="twice"):
        header("read=true;read=true")


@pytest.mark.parametrize("word", ["1", "true", "ON"])
def test_bypass_outranks_everything(word: str) -> None:
    """Nothing is read and nothing written, whatever else is said."""
    bypass = ("X-KVBus-Bypass", word)
    options = read({"read": True, "enable": True, "namespace": "n"}, bypass)
    assert options == ReuseOptions(namespace="n", read=False, write=False)


def test_bypass_off_changes_nothing() -> None:
    """0 is as no header; anything else is refused."""
    assert read(None, ("X-KVBus-Bypass", "0")) == ReuseOptions()
    with pytest.raises(RequestError, match="X-KVBus-Bypass"):
        read(None, ("X-KVBus-Bypass", "2"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"enable": 1}, "mooncake.enable"),
        ({"read": "true"}, "mooncake.read"),
        ({"write": []}, "mooncake.write"),
        ({"soft_pin": 0}, "mooncake.soft_pin"),
        ({"block_size": 15}, "mooncake.block_size"),
        ({"block_size": 48}, "mooncake.block_size"),
        ({"block_size": 2048}, "mooncake.block_size"),
        ({"block_size": 0}, "mooncake.block_size"),
        ({"block_size": True}, "mooncake.block_size"),
        ({"block_size": 64.0}, "mooncake.block_size"),
        ({"block_size": "64"}, "mooncake.block_size"),
        ({"replica_num": 0}, "mooncake.replica_num"),
        ({"replica_num": 9}, "mooncake.replica_num"),
        ({"replica_num": -1}, "mooncake.replica_num"),
        ({"transport": "rdma"}, "the store has tcp, disk"),
        ({"transport": 1}, "mooncake.transport"),
        ({"namespace": 1}, "mooncake.namespace"),
        ({"namespace": "é" * 129}, "mooncake.namespace"),
        ({"enable": False, "block_size": 3}, "mooncake.block_size"),
        ({"blocksize": 64}, "mooncake.blocksize.*block_size"),
        ({"Enable": True}, "mooncake.Enable.*enable"),
        ({"x\n" * 99: True}, r"mooncake.x\\nx.*known: enable, "),
        ([], "'mooncake' must be an object"),
        ("on", "'mooncake' must be an object"),
        (False, "'mooncake' must be an object"),
    ],
)
def test_what_is_wrong_is_named(values: Any, named: str) -> None:  # noqa: ANN401
    """A 400 names the key, and says what it must be or which there are."""
    with pytest.raises(RequestError, match=named) as caught:
        read(values)
    assert caught.value.status == 400
    if isinstance(values, dict):
        with pytest.raises(RequestError, match=named):
            header(orjson.dumps(values).decode())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ('{"read": false} x', "JSON"),
        ("read", "key=value"),
        ("namespace=a;b", "key=value"),
        ("read=maybe", "mooncake.read"),
        ("block_size=64.0", "mooncake.block_size"),
        ("block_size=١٦", "mooncake.block_size"),
        ("replica_num=99999999999999999999", "mooncake.replica_num"),
        ("readonly=1", "mooncake.readonly.*read"),
        ('{"namespace": "\udcff"}', "JSON"),
        ("namespace=\udcff", "mooncake.namespace"),
    ],
)
def test_a_wrong_header_is_named(text: str, named: str) -> None:
    """Neither JSON nor pairs, or a value that is none."""
    with pytest.raises(RequestError, match=named) as caught:
        header(text)
    assert caught.value.status == 400


def test_a_store_without_transports_has_none() -> None:
    """Without a store every transport is refused."""
    request = make_mocked_request("POST", "/api/chat")
    with pytest.raises(RequestError, match="there is no store"):
        SharingPolicy(lambda: ())(request, {"transport": "tcp"})


def test_a_namespace_shows_nowhere() -> None:
    """Neither in a representation nor in an error."""
    assert "secret" not in repr(read({"namespace": "secret"}))
    with pytest.raises(RequestError) as caught:
        read({"namespace": "secret" * 100})
    assert "secret" not in caught.value.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def status_of(body: object, *headers: tuple[str, str]) -> int:
    """Return 200, or the status of the refusal."""
    try:
        hash(read(body, *headers))
    except RequestError as exc:
        return exc.status
    return 200


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), _JSON) | _JSON)
def test_any_value_is_read_or_refused(value: object) -> None:
    """Whatever a body holds is a value of options or a 400."""
    assert status_of(value) in (200, 400)


@given(st.text(st.characters(exclude_characters="\r\n\0"), max_size=60))
def test_any_header_is_read_or_refused(text: str) -> None:
    """Whatever a header holds is a value of options or a 400."""
    assert status_of(None, ("X-KVBus-Options", text)) in (200, 400)
