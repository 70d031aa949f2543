"""A model out of Ollama's folder, served."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.processes import Kvbus
from tests.ollama_models import write_ollama_model


def test_a_model_of_ollamas_folder_is_served(
    kvbus: Kvbus, models: dict[str, Path], tmp_path: Path
) -> None:
    """Its SYSTEM, PARAMETERs and MESSAGEs count; another pull counts when reloaded."""
    folder = tmp_path / "models"
    layers: list[tuple[str, bytes | Path]] = [
        ("model", models["tiny"]),
        ("system", b"Be kind"),
        ("params", b'{"num_predict":3,"num_ctx":2048}'),
        ("messages", b'[{"role":"user","content":"Hi"}]'),
    ]
    write_ollama_model(folder, layers)
    kvbus.start(
        "--model", "ollama:tiny", "--model", "mine:7b=ollama:Tiny:Latest",
        "--store", "none", OLLAMA_MODELS=str(folder),
    )  # fmt: skip
    prompt = kvbus.post(
        "/api/chat",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Yes?"}],
            "_debug_render_only": True,
        },
    ).json()["_debug_info"]["rendered_template"]
    assert prompt.index("Be kind") < prompt.index("Hi") < prompt.index("Yes?")
    answer = kvbus.post(
        "/api/generate", {"model": "mine:7b", "prompt": "x", "stream": False}
    ).json()
    assert answer["eval_count"] <= 3
    shown = kvbus.post("/api/show", {"model": "tiny"}).json()
    assert shown["system"] == "Be kind"
    status = kvbus.status()["models"]
    assert [model["name"] for model in status] == ["tiny:latest", "mine:7b"]
    assert [model["runners"][0]["context_tokens"] for model in status] == [2048, 2048]
    first = shown["modelfile"]

    write_ollama_model(folder, [("model", models["other"]), *layers[1:2]])
    kvbus.post("/api/generate", {"model": "tiny", "keep_alive": 0})
    kvbus.post("/api/generate", {"model": "tiny"})
    second = kvbus.post("/api/show", {"model": "tiny"}).json()
    assert second["modelfile"] != first
    assert "parameters" not in second


def test_a_bad_folder_is_one_clear_line(kvbus: Kvbus, tmp_path: Path) -> None:
    """A model that is not there ends the process with code 2."""
    done = subprocess.run(
        [
            sys.executable, "-m", "proxy", "serve", "--store", "none",
            "--listen", "127.0.0.1:0", "--model", "ollama:nothing",
            "--runtime-dir", str(kvbus.runtime_dir),
            "--slot-dir", str(kvbus.slot_root),
        ],
        env={"OLLAMA_MODELS": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"kvbus: ollama:nothing: there is no such model in {tmp_path}"
    )
