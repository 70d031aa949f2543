"""Images through a real projector: seen, never shared, no harm to what is."""

import base64
import struct
import zlib
from pathlib import Path

import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments
from tests.ollama_models import write_ollama_model
from tests.projector import NUM_TOKENS, write_tiny_projector


def png(color: tuple[int, int, int]) -> str:
    """Return a picture of one color, as base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    rows = (b"\0" + bytes(color) * 40) * 40
    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 40, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny projector."""
    return write_tiny_projector(tmp_path_factory.mktemp("mm") / "p.gguf", seed=1)


def test_images_are_seen_and_not_shared(
    kvbus: Kvbus, models: dict[str, Path], projector: Path
) -> None:
    """Two images give two answers, nothing of them is stored; text is, as ever."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--mmproj", f"tiny={projector}",
        "--restore", "always", *store_arguments("disk", kvbus),
    )  # fmt: skip
    shown = kvbus.post("/api/show", {"model": "tiny"}).json()
    assert "vision" in shown["capabilities"]
    assert shown["projector_info"]["general.architecture"] == "clip"

    def look(color: tuple[int, int, int]) -> dict[str, object]:
        body = {
            "model": "tiny", "stream": False, "options": {"temperature": 0},
            "messages": [{"role": "user", "content": TEXT, "images": [png(color)]}],
        }  # fmt: skip
        answer = kvbus.post("/api/chat", {**body, "options": {"num_predict": 8}})
        assert answer.status_code == 200, answer.text
        kvbus.asked += 1
        return dict(answer.json())

    red, blue = look((200, 10, 10)), look((10, 10, 200))
    assert int(str(red["prompt_eval_count"])) > 1700 + NUM_TOKENS
    assert red["message"] != blue["message"]
    generated = kvbus.post(
        "/api/generate",
        {
            "model": "tiny", "prompt": "What?", "images": [png((1, 2, 3))],
            "stream": False, "options": {"num_predict": 2},
        },
    )  # fmt: skip
    kvbus.asked += 1
    assert generated.json()["prompt_eval_count"] > NUM_TOKENS
    assert kvbus.metric("kvbus_commits_total") == 0
    assert kvbus.status()["models"][0]["runners"][0]["slots"][0]["tokens"] == 0
    kvbus.generate("tiny", TEXT + "One?")
    kvbus.wait_commits(1)
    restart_runner(kvbus)
    kvbus.generate("tiny", TEXT + "Two?")
    turn = kvbus.turns()[-1]
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700


def test_a_projector_of_ollamas_folder_is_loaded(
    kvbus: Kvbus, models: dict[str, Path], projector: Path, tmp_path: Path
) -> None:
    """Its layer is enough; a model without one refuses images in Ollama's words."""
    folder = tmp_path / "models"
    write_ollama_model(folder, [("model", models["tiny"]), ("projector", projector)])
    kvbus.start(
        "--model", "ollama:tiny", "--model", f"other={models['other']}",
        "--store", "none", OLLAMA_MODELS=str(folder),
    )  # fmt: skip
    body = {"prompt": "What?", "images": [png((9, 9, 9))], "stream": False}
    seen = kvbus.post("/api/generate", {"model": "tiny", **body})
    assert seen.status_code == 200, seen.text
    refused = kvbus.post("/api/generate", {"model": "other", **body})
    assert refused.status_code == 400
    assert refused.json() == {"error": '"other" does not support images'}
    broken = {**body, "images": [base64.b64encode(b"no picture").decode()]}
    unread = kvbus.post("/api/generate", {"model": "tiny", **broken})
    assert unread.status_code == 400
