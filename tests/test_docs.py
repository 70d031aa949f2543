"""The documents tell what the code does: names, options, metrics, links, examples."""

import doctest
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.metrics import MetricWrapperBase

from proxy import cli
from proxy.admin import Admin
from proxy.config import SETTINGS
from proxy.metrics import Metrics
from proxy.ollama.embedding_handlers import EmbeddingsApi
from proxy.ollama.handlers import OllamaApi
from proxy.ollama.options import SamplingOptions
from proxy.reuse.trace import TurnTrace
from proxy.v1.embeddings import V1Embeddings
from proxy.v1.handlers import V1Api

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")]
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
TERMS = (
    "token ids", "slot", "sequence state", "slot file", "cell", "KV cache", "block",
    "KV block", "block key", "namespace", "fingerprint", "prefix match", "lookup",
    "prepare", "commit", "restore", "keep slot", "recompute", "lease", "prefill",
    "decode", "TTFT", "fail open", "object", "replica", "segment", "master",
)  # fmt: skip


def read(name: str) -> str:
    """Return the text of a document."""
    return (ROOT / name).read_text()


def section(text: str, heading: str) -> str:
    """Return the part of a document below a heading of the second level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"no section {heading}"
    return found[1]


def rows(text: str) -> dict[str, str]:
    """Return the rows of tables by each code name in their first cell."""
    found: dict[str, str] = {}
    for row in re.findall(r"^\| `.*$", text, re.M):
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", row.split(" | ")[0]), row)
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors that a reader's browser makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


def test_every_option_is_documented() -> None:
    """The table names exactly the settings, each with its variable and default."""
    table = rows(section(read("docs/configuration.md"), "Options of `kvbus serve`"))
    assert set(table) == {"--config", *(f"--{setting.name}" for setting in SETTINGS)}
    for setting in SETTINGS:
        row = table[f"--{setting.name}"]
        assert f"| `{setting.variable}` |" in row, setting.name
        if setting.default:
            assert f"| `{setting.default}` |" in row, setting.name


def test_every_command_is_documented() -> None:
    """Each command has a section, and each flag of it is named in the document."""
    text = read("docs/configuration.md")
    commands = cli._parser()._subparsers
    assert commands is not None
    for name, parser in cast(
        "dict[str, Any]", commands._group_actions[0].choices
    ).items():
        assert f"`kvbus {name}`" in text
        for flag in (f for action in parser._actions for f in action.option_strings):
            assert flag in ("-h", "--help") or f"`{flag}" in text, (name, flag)


def test_every_metric_is_documented() -> None:
    """The tables name exactly the metrics, each with its type and labels."""
    table = {
        name: row
        for name, row in rows(read("docs/metrics.md")).items()
        if name.startswith("kvbus_")
    }
    found = set()
    for metric in vars(Metrics()).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        suffix = "_total" if metric._type == "counter" else ""
        name = metric._name + suffix
        labels = ", ".join(metric._labelnames)
        assert f"| {metric._type} | {labels} |".replace("  ", " ") in table[name], name
        found.add(name)
    assert found == set(table)


def test_every_route_is_documented() -> None:
    """docs/api.md names every route, those included that are only refused."""
    nothing = cast("Any", None)
    api = OllamaApi(nothing, nothing, observer=nothing)
    admin = Admin(
        catalog=nothing,
        metrics=nothing,
        store=None,
        switch=nothing,
        log=nothing,
        upstreams=nothing,
        transports=nothing,
        is_ready=lambda: True,
        is_loopback_listener=True,
    )
    v1 = V1Api(nothing, nothing, observer=nothing)
    embeddings = EmbeddingsApi(nothing, observer=nothing)
    v1_embeddings = V1Embeddings(nothing, observer=nothing)
    text = read("docs/api.md")
    for part in (api, admin, v1, embeddings, v1_embeddings):
        for route in part.routes():
            path = route.path.replace(":.+}", "}")
            assert f"`{route.method} {path}`" in text, route


def test_every_benchmark_is_documented() -> None:
    """docs/benchmarks.md names the command of each benchmark."""
    text = read("docs/benchmarks.md")
    for path in (ROOT / "benchmarks").glob("[a-z]*.py"):
        if 'if __name__ == "__main__":' in path.read_text():
            assert f"`python -m benchmarks.{path.stem}`" in text, path


def test_every_client_is_documented() -> None:
    """docs/clients.md has a row for each library that tests/clients talks through."""
    table = rows(section(read("docs/clients.md"), "Run by `make e2e`"))
    for path in (ROOT / "tests" / "clients").glob("test_*.py"):
        for client in re.findall(r"^CLIENT.* = \"(.*?)[\" ]", path.read_text(), re.M):
            assert client in table or client == "all", (path, client)


def test_every_sampling_option_is_documented() -> None:
    """docs/api.md names every option with its default."""
    table = rows(section(read("docs/api.md"), "`options`"))
    for name, field in SamplingOptions.__dataclass_fields__.items():
        shown = {"None": "the slot's", "()": "none"}
        default = str(field.default)
        assert f"| {shown.get(default, f'`{default}`')} |" in table[name], name


def test_every_field_of_the_turn_line_is_documented() -> None:
    """docs/operations.md names every field of a turn's log line."""
    trace = TurnTrace(request_id="i", model="m", route="r", prompt_tokens=1)
    table = rows(section(read("docs/operations.md"), "The log"))
    for field in re.findall(r"(\w+)=", trace.line()):
        assert field in table, field


@pytest.mark.parametrize("name", NAMES)
def test_names_in_code_font_exist(name: str) -> None:
    """Dotted names of ours resolve by import, and paths of the repository exist."""
    text = read(name)
    for dotted in re.findall(r"`(proxy(?:\.\w+)+)(?:\(\))?`", text):
        assert resolves(dotted), dotted
    paths = r"`((?:proxy|tests|docs|deploy|benchmarks)/[\w./-]*)`"
    for path in re.findall(paths, text):
        assert (ROOT / path).exists(), path


def resolves(dotted: str) -> bool:
    """Tell whether a dotted name is a module, or a name in one."""
    parts = dotted.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:stop]))
        except ModuleNotFoundError:
            continue
        for part in parts[stop:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    """Relative links name files of the repository and headings in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", read(name)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), target


def test_the_readme_says_how_to_start() -> None:
    """It names both commands and every package that the check asks for."""
    text = read("README.md")
    assert "make demo" in text
    assert "make test" in text
    path = ROOT / "deploy" / "check_system.py"
    spec = importlib.util.spec_from_file_location("check_system", path)
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    for package in ("python3-venv", *check.LIBRARIES.values()):
        assert re.search(rf"apt-get install.*\b{package}\b", text), package


def test_the_glossary_has_the_terms() -> None:
    """Every term that the code is written in has an entry."""
    text = read("docs/glossary.md")
    known = {
        term
        for cell in re.findall(r"^\| (.+?) \|", text, re.M)
        for term in re.findall(r"\*\*(.+?)\*\*", cell)
    }
    known |= set(re.findall(r"A \*\*(.+?)\*\*", text))
    assert set(TERMS) <= known


@pytest.mark.parametrize("name", NAMES)
def test_python_examples_are_sound(name: str) -> None:
    """Blocks of Python compile; those written as a session give what they show."""
    text = read(name)
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        if not code.startswith(">>>"):
            compile(code, name, "exec")
    results = doctest.testfile(str(ROOT / name), module_relative=False)
    assert results.failed == 0


def test_services_run_commands_that_exist() -> None:
    """The command line of each systemd unit is one that kvbus takes."""
    units = sorted((ROOT / "deploy").glob("*.service"))
    assert len(units) == 2
    for unit in units:
        found = re.search(r"^ExecStart=\S+/kvbus (.+)$", unit.read_text(), re.M)
        assert found, unit
        assert cli._parser().parse_args(found[1].split()).run
