"""Where model files come from. Signatures first; the bodies follow."""

from collections.abc import Callable
from pathlib import Path

DEFAULT_MODEL_NAME = "smollm2:135m"


def default_cache_dir() -> Path:
    """Give $KVBUS_CACHE_DIR, else $XDG_CACHE_HOME/kvbus, else ~/.cache/kvbus."""
    raise NotImplementedError


def default_model_path(cache_dir: Path) -> Path:
    """Tell where the default model is (to be) kept."""
    raise NotImplementedError


def ensure_default_model(cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Fetch the default model unless it is there (blocking). Raises ConfigError."""
    raise NotImplementedError


def list_models(cache_dir: Path) -> list[Path]:
    """List the GGUF files kept below `cache_dir`, by name."""
    raise NotImplementedError
