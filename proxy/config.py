"""Every setting of `kvbus serve`: flags > environment > file > defaults.

One table (`SETTINGS`) makes the flags, the KVBUS_* variables, the keys of the TOML
file and the help. Rules:
1. A wrong value is one clear line (`ConfigError`) that names where it came from.
2. An unknown key in the file is an error with the nearest known name.
3. In the environment several values are separated by `;` or line ends: paths may have
   blanks, and URLs have colons.
"""

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.errors import ConfigError
from proxy.llamacpp.attached import AttachedOptions
from proxy.memory import SEGMENT_BYTES, default_store_bytes
from proxy.model_files import default_cache_dir
from proxy.model_sources import ModelSource
from proxy.ollama_folder import OllamaName
from proxy.reuse.models import full_name
from proxy.reuse.plan import RestoreMode
from proxy.runtime import default_runtime_dir, default_slot_root
from proxy.setting_values import (
    parse_block_size,
    parse_count,
    parse_flag,
    parse_keep_alive,
    parse_listen,
    parse_model,
    parse_path,
    parse_projector,
    parse_size,
    parse_store,
    parse_word,
)
from proxy.store.options import MIN_SEGMENT_BYTES, StoreOptions

KV_TYPES = ("f16", "q8_0", "q4_0")
FLASH_ATTENTION = ("on", "off", "auto")
DEFAULT_DISK_BYTES = 8 << 30
STORE_LINGER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: a name as on the command line, without the dashes."""

    name: str
    parse: Callable[[str], Any]
    default: str | None
    metavar: str
    help: str
    repeatable: bool = False
    is_of_store: bool = False
    """Whether `kvbus store` has it too."""

    @property
    def attribute(self) -> str:
        """Its name in `ServeOptions`, and in upper case after KVBUS_."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"KVBUS_{self.attribute.upper()}"


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "listen",
        parse_listen,
        "127.0.0.1:11435",
        "HOST:PORT",
        "where clients connect",
    ),
    Setting(
        "model",
        parse_model,
        None,
        "NAME=PATH.gguf|ollama:NAME:TAG",
        "serve this model file, or this model of Ollama's folder, with runners of our"
        " own; may be repeated",
        repeatable=True,
    ),
    Setting(
        "mmproj",
        parse_projector,
        None,
        "NAME=PATH.gguf",
        "the projector for the images of a --model; may be repeated",
        repeatable=True,
    ),
    Setting(
        "upstream",
        AttachedOptions.parse,
        None,
        "URL[#slot-dir=DIR]",
        "use this running llama-server; may be repeated",
        repeatable=True,
    ),
    Setting(
        "runners", parse_count(1), "1", "N", "llama-server processes for each --model"
    ),
    Setting("slots", parse_count(1), "1", "N", "slots of each runner"),
    Setting(
        "ctx",
        parse_count(16),
        None,
        "N",
        "context of each slot in tokens (default: 8192, or the model's limit)",
    ),
    Setting(
        "kv-type", parse_word(*KV_TYPES), "f16", "|".join(KV_TYPES), "type of K and V"
    ),
    Setting(
        "flash-attn",
        parse_word(*FLASH_ATTENTION),
        "auto",
        "|".join(FLASH_ATTENTION),
        "flash attention",
    ),
    Setting(
        "threads",
        parse_count(1),
        None,
        "N",
        "CPU threads of each runner (default: all cores, shared out among --runners)",
    ),
    Setting(
        "cache-ram",
        parse_count(0),
        None,
        "MIB",
        "the engine's own RAM cache (default: the engine's)",
    ),
    Setting(
        "keep-alive",
        parse_keep_alive,
        "5m",
        "DURATION",
        "how long a model stays loaded without a request, as 5m or 1h30m; 0: not at"
        " all, negative: for ever",
    ),
    Setting(
        "block-size",
        parse_block_size,
        "auto",
        "auto|N",
        "tokens of a KV block in the store",
    ),
    Setting(
        "opaque",
        parse_flag,
        "false",
        "true|false",
        "store whole slot files where their layout is not understood",
    ),
    Setting(
        "store",
        parse_store,
        "embedded",
        "embedded|mooncake://HOST:PORT|disk:DIR|none",
        "where KV blocks live",
        is_of_store=True,
    ),
    Setting(
        "store-size",
        parse_size,
        None,
        "SIZE",
        "memory of the store, or of a disk store its size (default: a quarter of"
        " the free memory, at most 4G; disk: 8G)",
        is_of_store=True,
    ),
    Setting(
        "store-disk",
        parse_size,
        "0",
        "SIZE",
        "size of a disk tier below the memory; 0: none",
        is_of_store=True,
    ),
    Setting(
        "store-expose",
        parse_flag,
        "false",
        "true|false",
        "allow an embedded store that others on the network can read and write",
        is_of_store=True,
    ),
    Setting(
        "restore",
        lambda text: RestoreMode(parse_word(*RestoreMode)(text)),
        "auto",
        "auto|always|never",
        "restore stored KV when that is cheaper, always, or never",
    ),
    Setting(
        "response-headers",
        parse_flag,
        "false",
        "true|false",
        "tell decision and restored tokens in X-KVBus-* response headers",
    ),
    Setting(
        "stall-timeout",
        parse_keep_alive,
        "10m",
        "DURATION",
        "how long a client may take none of what is sent to it before it is taken for"
        " gone, as 30s or 10m; 0 or negative: as long as the system allows",
    ),
    Setting(
        "origins",
        lambda text: tuple(filter(None, (part.strip() for part in text.split(",")))),
        "",
        "LIST",
        "further browser origins to allow, comma separated (as OLLAMA_ORIGINS)",
    ),
    Setting(
        "cache-dir",
        parse_path,
        None,
        "DIR",
        "models and disk blocks (default: user's cache)",
        is_of_store=True,
    ),
    Setting(
        "runtime-dir",
        parse_path,
        None,
        "DIR",
        "sockets and locks (default: user's own)",
        is_of_store=True,
    ),
    Setting(
        "slot-dir",
        parse_path,
        None,
        "DIR",
        "slot files (default: in /dev/shm, if there)",
    ),
    Setting(
        "log-level",
        parse_word("debug", "info", "warning", "error"),
        "info",
        "LEVEL",
        "what is logged to stderr",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The settings in force; each field is one row of `SETTINGS`."""

    listen: tuple[str, int]
    model: tuple[tuple[str, Path | OllamaName], ...]
    mmproj: tuple[tuple[str, Path], ...]
    upstream: tuple[AttachedOptions, ...]
    runners: int
    slots: int
    ctx: int | None
    kv_type: str
    flash_attn: str
    threads: int | None
    cache_ram: int | None
    keep_alive: float
    block_size: int | None
    opaque: bool
    store: str
    store_size: int | None
    store_disk: int
    store_expose: bool
    restore: RestoreMode
    response_headers: bool
    stall_timeout: float
    origins: tuple[str, ...]
    cache_dir: Path | None
    runtime_dir: Path | None
    slot_dir: Path | None
    log_level: str
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each setting that is not a default came from."""

    def __post_init__(self) -> None:
        if self.kv_type != "f16" and self.flash_attn == "off":
            raise ConfigError(
                f"--kv-type {self.kv_type} needs flash attention: not --flash-attn off"
            )

    @property
    def model_sources(self) -> list[tuple[str, ModelSource]]:
        """Each --model by its name, with its projector.

        Raises ConfigError for a projector of no model.
        """
        projectors = {full_name(name): path for name, path in self.mmproj}
        sources = [
            (
                name,
                ModelSource(
                    model=model, projector=projectors.pop(full_name(name), None)
                ),
            )
            for name, model in self.model
        ]
        for name in projectors:
            raise ConfigError(f"--mmproj: there is no --model {name}")
        return sources

    @property
    def cache(self) -> Path:
        """The directory of models, facts and disk blocks."""
        return self.cache_dir or default_cache_dir()

    @property
    def runtime(self) -> Path:
        """The directory of sockets and locks."""
        return self.runtime_dir or default_runtime_dir()

    @property
    def slot_root(self) -> Path:
        """The directory below which slot files live."""
        return self.slot_dir or default_slot_root()

    def store_options(self) -> StoreOptions | None:
        """Return what the store process is told; None for no store."""
        if self.store == "none":
            return None
        common: dict[str, Any] = {
            "runtime_dir": self.runtime,
            "linger_seconds": STORE_LINGER_SECONDS,
        }
        if self.store.startswith("disk:"):
            return StoreOptions(
                kind="disk",
                disk_dir=Path(self.store.removeprefix("disk:")).expanduser(),
                disk_size_bytes=self.store_size or DEFAULT_DISK_BYTES,
                **common,
            )
        size = self.store_size or default_store_bytes()
        common |= {
            "ram_size_bytes": max(size, MIN_SEGMENT_BYTES),
            "segment_bytes": SEGMENT_BYTES
            if size >= SEGMENT_BYTES
            else MIN_SEGMENT_BYTES,
            "disk_dir": self.cache / "blocks",
            "disk_size_bytes": self.store_disk,
            "expose": self.store_expose,
        }
        if self.store == "embedded":
            return StoreOptions(kind="embedded", **common)
        host, port = parse_listen(self.store.removeprefix("mooncake://"))
        return StoreOptions(
            kind="mooncake", master_host=host, master_port=port, **common
        )


def add_arguments(
    parser: argparse.ArgumentParser, *, is_for_store: bool = False
) -> None:
    """Add --config, and a flag for each setting, or for those of a store alone."""
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        help="read settings from this file [KVBUS_CONFIG]",
    )
    for setting in SETTINGS:
        if is_for_store and not setting.is_of_store:
            continue
        default = f" (default: {setting.default})" if setting.default else ""
        several = ", separated by ;" if setting.repeatable else ""
        parser.add_argument(
            f"--{setting.name}",
            metavar=setting.metavar,
            action="append" if setting.repeatable else "store",
            help=f"{setting.help}{default} [{setting.variable}{several}]".replace(
                "%", "%%"
            ),
        )


def load(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ServeOptions:
    """Put the settings together. Raises ConfigError."""
    file = _read_file(arguments.config or environment.get("KVBUS_CONFIG"))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in SETTINGS:
        raw, source = _find(setting, arguments, environment, file)
        if source:
            sources[setting.name] = source
        values[setting.attribute] = _parse(setting, raw, source or "the default")
    return ServeOptions(**values, sources=sources)


def _find(
    setting: Setting,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    file: Mapping[str, Any],
) -> tuple[Sequence[str], str]:
    """Return the raw values of a setting and where they came from."""
    given = getattr(arguments, setting.attribute, None)
    if given is not None:
        return (given if setting.repeatable else [given]), f"--{setting.name}"
    if setting.variable in environment:
        text = environment[setting.variable]
        return (_several(text) if setting.repeatable else [text]), setting.variable
    if setting.name in file:
        value = file[setting.name]
        many = value if isinstance(value, list) else [value]
        texts = [str(v).lower() if isinstance(v, bool) else str(v) for v in many]
        return texts, f"{setting.name} in the file"
    return ([] if setting.default is None else [setting.default]), ""


def _several(text: str) -> list[str]:
    """Split the value of a variable (rule 3)."""
    return [part for part in map(str.strip, re.split(r"[;\r\n]", text)) if part]


def _parse(setting: Setting, raw: Sequence[str], source: str) -> Any:  # noqa: ANN401
    try:
        parsed = [setting.parse(text) for text in raw]
    except (ValueError, ConfigError) as exc:
        raise ConfigError(f"{source}: {exc}") from exc
    if setting.repeatable:
        return tuple(parsed)
    if len(parsed) > 1:
        raise ConfigError(f"{source}: one value is wanted, not {len(parsed)}")
    return parsed[0] if parsed else None


def _read_file(path: str | None) -> Mapping[str, Any]:
    if not path:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text())
    except OSError as exc:
        raise ConfigError(f"--config {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--config {path}: {exc}") from exc
    known = [setting.name for setting in SETTINGS]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--config {path}: unknown key {key!r}{hint}")
    return content
