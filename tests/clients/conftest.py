"""One `kvbus serve` for all client libraries, and the table of what they called.

Rules:
1. A module is about one client, and says so in `CLIENT` and `PACKAGE`. It is skipped
   where the library is absent.
2. A test names in `calls` what it calls of the library; the table at the end of the
   run has a row for each test.
3. Libraries warn as they like: their warnings are no faults of ours.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.library import installed_version
from tests.e2e.processes import Kvbus
from tests.embedding_model import write_tiny_encoder
from tests.models import write_tiny_model
from tests.scripted_model import Script, write_scripted_model

CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
SCRIPTS = {
    "talker:1b": Script(
        to_user=f"<think>\nI should look first.\n</think>\n\n{CALL}",
        to_tool="<think>\nSnow, it says.\n</think>\n\nIt snows in Oslo now.",
        unthinking="Ask me about the weather.",
    ),
    "tooler:1b": Script(to_user=CALL, to_tool="It snows in Oslo.", thinks=False),
    "muser:1b": Script(
        to_user="<think>\nAdd the two numbers.\n</think>\n\n4", knows_tools=False
    ),
    "plain:1b": Script(to_user="Hi there, friend.", knows_tools=False, thinks=False),
}
"""talker thinks and calls, tooler only calls, muser only thinks, plain does neither."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note the client and the calls of each test for the table."""
    for item in items:
        marker = item.get_closest_marker("calls")
        module = item.getparent(pytest.Module)
        if marker is None or module is None:
            continue
        version = installed_version(module.obj.PACKAGE)
        item.user_properties += [
            ("client", f"{module.obj.CLIENT} {version}"),
            ("calls", ", ".join(marker.args)),
        ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> None:
    """Print the table: client, calls, result."""
    rows: list[tuple[str, str, str]] = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            noted = dict(getattr(report, "user_properties", ()))
            if "client" in noted:
                rows.append((noted["client"], noted["calls"], outcome))
    if not rows:
        return
    width = max(len(client) for client, _calls, _outcome in rows)
    terminalreporter.section("clients")
    terminalreporter.write_line(f"{'client':{width}}  result   calls")
    for client, calls, outcome in sorted(set(rows)):
        terminalreporter.write_line(f"{client:{width}}  {outcome:7}  {calls}")


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the libraries ask no proxy, fetch nothing, and keep their files here."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OLLAMA_API_KEY", "OLLAMA_HOST", "OPENAI_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("LLM_USER_PATH", str(home))
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of model facts."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def served(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path
) -> Iterator[Kvbus]:
    """Return one kvbus with scripted models, an endless one and an encoder."""
    directory = tmp_path_factory.mktemp("models")
    paths = {
        name: write_scripted_model(directory / f"{name[:-3]}.gguf", script)
        for name, script in SCRIPTS.items()
    }
    paths["endless"] = write_tiny_model(
        directory / "endless.gguf", seed=1, is_endless=True, fills_in="present"
    )
    paths["encoder"] = write_tiny_encoder(directory / "encoder.gguf", seed=1)
    models = [
        argument
        for name, path in paths.items()
        for argument in ("--model", f"{name}={path}")
    ]
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            *models, "--ctx", "8192", "--response-headers", "true",
            "--restore", "always", "--store", f"disk:{kvbus.root}/blocks",
            "--store-size", "256M",
        )  # fmt: skip
        yield kvbus
