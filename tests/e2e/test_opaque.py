"""Slot files that are not understood: declined, or stored whole if that is wanted."""

from pathlib import Path

import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments
from tests.model_shapes import Architecture
from tests.models import write_tiny_model


@pytest.fixture
def blind(kvbus: Kvbus) -> Kvbus:
    """Give a kvbus that reads no more of a slot file than its tokens."""
    kvbus.module = "tests.fakes.blind_kvbus"
    return kvbus


def start(kvbus: Kvbus, tmp_path: Path, architecture: Architecture, *more: str) -> None:
    """Serve a model of some memory."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=3, architecture=architecture)
    kvbus.start(
        "--model", f"m={model}", "--restore", "always",
        *store_arguments("embedded", kvbus), *more,
    )  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama", "lfm2", "mamba"])
def test_a_prompt_that_extends_a_whole_file_is_restored_from_it(
    blind: Kvbus, tmp_path: Path, architecture: Architecture
) -> None:
    """To the last token, and answered as by the hot slot; no other prompt is."""
    start(blind, tmp_path, architecture, "--opaque=true")
    blind.generate("m", TEXT + "One?", num_predict=1)
    held = int(blind.turns()[-1]["prompt_tokens"])
    blind.wait_commits(1)
    hot = blind.generate("m", TEXT + "One? And two?")
    assert int(blind.turns()[-1]["reused_tokens"]) == held
    restart_runner(blind)

    restored = blind.generate("m", TEXT + "One? And two?")
    turn = blind.turns()[-1]
    assert turn["decision"] == "restore"
    assert int(turn["restored_tokens"]) == int(turn["reused_tokens"]) == held
    assert restored["response"] == hot["response"]
    restart_runner(blind)

    for other in (TEXT + "Two?", TEXT[:4000], "Another " + TEXT):
        blind.generate("m", other)
        assert blind.turns()[-1]["decision"] != "restore"
    assert blind.metric("kvbus_restore_ineffective_total") == 0
    assert blind.metric("kvbus_failed_open_total") == 0


def test_it_is_declined_unless_it_is_wanted(blind: Kvbus, tmp_path: Path) -> None:
    """With the reason, and nothing is stored."""
    start(blind, tmp_path, "lfm2")
    blind.generate("m", TEXT)
    (runner,) = blind.status()["models"][0]["runners"]
    assert not runner["sharing"]
    assert "a kind that nobody knows" in runner["reason"]
    assert blind.turns()[-1]["result"] == "complete"
    assert blind.status()["store"]["blocks"] == 0
