"""What of the client libraries is installed here."""

import json
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

NODE_MODULES = Path(sys.prefix) / "node" / "node_modules"
"""Where `make e2e` lets npm install."""


def library(name: str) -> Any:
    """Import a library; skips the module that asks where it is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def is_installed(package: str) -> bool:
    """Tell whether a Python package is there, without importing it."""
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def installed_version(package: str | Path) -> str:
    """Tell the version of a Python package, or of one of npm's by its folder."""
    if isinstance(package, Path):
        described = json.loads((package / "package.json").read_text())
        return str(described["version"])
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(absent)"
