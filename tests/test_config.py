"""Settings: precedence, types, and one clear line for each mistake."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import cli, config
from proxy.config import ServeOptions
from proxy.errors import ConfigError
from proxy.model_sources import ModelSource
from proxy.ollama_folder import OllamaName
from proxy.reuse.plan import RestoreMode
from proxy.setting_values import parse_size

EXAMPLE = Path(__file__).parent.parent / "deploy" / "config.example.toml"


def load(*arguments: str, **environment: str) -> ServeOptions:
    """Load the settings of a command line and an environment."""
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    return config.load(parser.parse_args(arguments), environment)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Each source is asked in turn."""
    file = tmp_path / "kvbus.toml"
    file.write_text('slots = 2\nrunners = 2\nctx = 2048\nlisten = ":1"\n')
    options = load(
        "--config", str(file), "--slots", "4", KVBUS_SLOTS="3", KVBUS_RUNNERS="3"
    )
    assert (options.slots, options.runners, options.ctx) == (4, 3, 2048)
    assert options.kv_type == "f16"
    assert options.sources["slots"] == "--slots"
    assert options.sources["runners"] == "KVBUS_RUNNERS"


def test_every_setting_has_all_its_forms() -> None:
    """Flag, variable and file key exist for each, and the example names them all."""
    text = EXAMPLE.read_text()
    for setting in config.SETTINGS:
        assert f"\n# {setting.name} =" in text, setting.name
        assert setting.help
    assert set(ServeOptions.__dataclass_fields__) - {"sources"} == {
        setting.attribute for setting in config.SETTINGS
    }


def test_the_example_file_holds_the_defaults(tmp_path: Path) -> None:
    """Uncommented, the example changes nothing."""
    lines = EXAMPLE.read_text().splitlines()
    known = {setting.name for setting in config.SETTINGS if setting.default}
    active = [
        line.removeprefix("# ")
        for line in lines
        if line.startswith("# ") and line[2:].partition(" =")[0] in known
    ]
    assert len(active) == len(known)
    file = tmp_path / "kvbus.toml"
    file.write_text("\n".join(active))
    given, default = load("--config", str(file)), load()
    for name in ServeOptions.__dataclass_fields__:
        if name != "sources":
            assert getattr(given, name) == getattr(default, name)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--listen", "nowhere", "not HOST:PORT"),
        ("--listen", "127.0.0.1:99999", "not HOST:PORT"),
        ("--model", "just-a-path.gguf", "not NAME=PATH"),
        ("--model", "ollama:", "ollama:NAME:TAG"),
        ("--mmproj", "path.gguf", "not NAME=PATH"),
        ("--keep-alive", "5 minutes", "unknown unit"),
        ("--upstream", "ftp://x", "give http://HOST:PORT"),
        ("--upstream", "http://h:1#dir=x", "only #slot-dir"),
        ("--runners", "0", "number from 1"),
        ("--slots", "two", "number from 1"),
        ("--ctx", "-5", "number from 16"),
        ("--kv-type", "q9", "one of f16"),
        ("--flash-attn", "maybe", "one of on"),
        ("--block-size", "0", "neither auto"),
        ("--store", "redis://x", "not embedded"),
        ("--store-size", "big", "not a size"),
        ("--restore", "perhaps", "one of auto"),
        ("--store-expose", "perhaps", "neither true"),
    ],
)
def test_a_bad_value_is_one_clear_line(flag: str, value: str, says: str) -> None:
    """The error names the flag and what is wrong, and the command exits with 2."""
    with pytest.raises(ConfigError, match=says) as caught:
        load(f"{flag}={value}")
    assert str(caught.value).startswith(f"{flag}: ")
    assert "\n" not in str(caught.value)


def test_settings_that_exclude_each_other_are_one_clear_line() -> None:
    """The engine quantizes V only with flash attention."""
    with pytest.raises(ConfigError, match="needs flash attention"):
        load("--kv-type", "q8_0", "--flash-attn", "off")


def test_projectors_belong_to_models() -> None:
    """Each --mmproj is of a --model, whose name may lack the tag."""
    flags = ("--model", "a=/x.gguf", "--model", "ollama:me/b:7b")
    (_, first), (name, second) = load(*flags, "--mmproj", "a:latest=/p").model_sources
    assert (first.model, first.projector) == (Path("/x.gguf"), Path("/p"))
    assert (name, second) == ("me/b:7b", ModelSource(model=OllamaName("me/b:7b")))
    with pytest.raises(ConfigError, match="there is no --model c:latest"):
        load(*flags, "--mmproj", "c=/p").model_sources  # noqa: B018


def test_the_command_exits_with_2() -> None:
    """A bad value ends the process with code 2 and one line on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "serve", "--slots", "none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--slots: 'none' is not a number" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("slot = 2", "unknown key 'slot'; did you mean slots"),
        ("slots = [1, 2]", "one value is wanted"),
        ("slots = ", "Invalid value"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, content: str, says: str) -> None:
    """Unknown keys, wrong types and broken syntax are named."""
    file = tmp_path / "kvbus.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        load("--config", str(file))


def test_a_missing_file_is_one_clear_line() -> None:
    """A file that is not there is named."""
    with pytest.raises(ConfigError, match="No such file"):
        load("--config", "/does/not/exist.toml")


def test_sizes() -> None:
    """Sizes are given as people write them."""
    sizes = {"3G": 3 << 30, "512MiB": 512 << 20, "1.5k": 1536, "100": 100}
    assert {text: parse_size(text) for text in sizes} == sizes


def test_types() -> None:
    """Values arrive as what they are."""
    options = load(
        "--model", "a=/x.gguf", "--model", "b:7b=/y.gguf", "--restore", "never"
    )
    assert options.model == (("a", Path("/x.gguf")), ("b:7b", Path("/y.gguf")))
    assert options.restore is RestoreMode.NEVER
    assert options.listen == ("127.0.0.1", 11435)
    assert load("--store", "none").store_options() is None
    store = load("--store", "disk:/tmp/x", "--store-size", "1G").store_options()
    assert store is not None
    assert (store.kind, store.disk_size_bytes) == ("disk", 1 << 30)


def test_several_values_in_the_environment() -> None:
    """Semicolons and line ends separate values; blanks within them are kept."""
    text = " a=/my models/a.gguf ;b=/b.gguf;\nc:1b=/c d.gguf\r\n"
    options = load(KVBUS_MODEL=text, KVBUS_ORIGINS="", KVBUS_UPSTREAM="")
    assert options.model == (
        ("a", Path("/my models/a.gguf")),
        ("b", Path("/b.gguf")),
        ("c:1b", Path("/c d.gguf")),
    )
    assert (options.origins, options.upstream) == ((), ())
    options = load(KVBUS_UPSTREAM="http://[::1]:1#slot-dir=/a b;http://h:2")
    assert [upstream.url for upstream in options.upstream] == [
        "http://[::1]:1",
        "http://h:2",
    ]


def test_a_store_takes_its_own_settings_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kvbus store` offers what tells stores apart or sizes them, and no more."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["store", "--help"])
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    names = {setting.name for setting in config.SETTINGS if setting.is_of_store}
    offered = set(re.findall(r"^  --([\w-]+)", help_text, re.MULTILINE))
    assert offered == {*names, "config"}
    with pytest.raises(SystemExit) as caught:
        cli.main(["store", "--listen", ":1"])
    assert caught.value.code == 2
    assert "--listen" in capsys.readouterr().err


def test_the_settings_of_a_store_are_all_that_it_reads(tmp_path: Path) -> None:
    """Each setting that changes what a store is told is one that it offers."""
    flags = [f"--runtime-dir={tmp_path}", "--store-size=2G"]
    base = load(*flags).store_options()
    other = {
        "store": f"disk:{tmp_path}",
        "store-size": "1G",
        "store-disk": "1G",
        "store-expose": "true",
        "cache-dir": "/other",
        "runtime-dir": "/other",
        "listen": ":1",
        "model": "a=/a.gguf",
        "mmproj": "a=/b.gguf",
        "keep-alive": "1h",
        "stall-timeout": "1h",
        "upstream": "http://h:1",
        "kv-type": "q8_0",
        "flash-attn": "off",
        "restore": "never",
        "response-headers": "true",
        "opaque": "true",
        "origins": "*",
        "slot-dir": "/other",
        "log-level": "debug",
    }
    for setting in config.SETTINGS:
        value = other.get(setting.name, "32")
        changed = load(*flags, f"--{setting.name}={value}").store_options()
        assert (changed != base) == setting.is_of_store, setting.name
