"""What is told of loaded models."""

import time
from collections.abc import Iterator

import pytest

from proxy.ollama.listing import ps_reply
from tests.fakes.scripted_turns import ScriptedModel

TIME_NS = 1_796_112_000_120_034_000  # 2026-12-01T08:00:00.120034Z


@pytest.fixture(params=["UTC0", "CET-1", "NST3:30"])
def zone(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Be in a time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", str(request.param))
        time.tzset()
        yield str(request.param)
    time.tzset()


def test_the_end_of_a_model_is_local_time(zone: str) -> None:
    """With the offset of here, up to nine digits, and centuries ahead for never."""
    soon, never = ScriptedModel(remaining_seconds=300.5), ScriptedModel("lasting")
    listed = ps_reply([soon, never], time_ns=TIME_NS)["models"]
    assert [model["name"] for model in listed] == ["lasting", "smol:latest"]
    assert (
        listed[1]["expires_at"]
        == {
            "UTC0": "2026-12-01T08:05:00.620034Z",
            "CET-1": "2026-12-01T09:05:00.620034+01:00",
            "NST3:30": "2026-12-01T04:35:00.620034-03:30",
        }[zone]
    )
    assert listed[0]["expires_at"] > "2318"
