"""What a benchmark found: figures, their spread, where they were taken, as JSON.

Rules:
1. A report names the commit, the machine and all settings, and how busy the machine
   was before and after: figures of a busy one are not worth much.
2. `summary` holds the few figures that matter, each with its goal if there is one.
3. Seconds, bytes and tokens are plain numbers; the unit is in the name of the key.
"""

import argparse
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).parents[1]
RESULTS_DIR = ROOT / "build" / "benchmarks"

_PACKAGES = ("xllamacpp", "mooncake-transfer-engine-non-cuda", "aiohttp", "httpx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of some measured values, all in one unit."""

    count: int
    median: float
    p25: float
    p75: float
    p99: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize at least one value."""
        ordered = sorted(values)
        return cls(
            count=len(ordered),
            median=statistics.median(ordered),
            p25=quantile(ordered, 0.25),
            p75=quantile(ordered, 0.75),
            p99=quantile(ordered, 0.99),
            minimum=ordered[0],
            maximum=ordered[-1],
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the sorted values lie, interpolated."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One figure that matters."""

    what: str
    value: float
    unit: str
    goal: str = ""
    is_met: bool | None = None
    """None: there is no goal."""


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that one benchmark says."""

    benchmark: str
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    summary: Sequence[Headline]
    environment: dict[str, Any] = field(default_factory=dict)


def at_most(what: str, value: float, unit: str, *, goal: float) -> Headline:
    """Make a figure that should not be above `goal`."""
    text = f"<= {goal:g} {unit}"
    return Headline(what=what, value=value, unit=unit, goal=text, is_met=value <= goal)


def at_least(what: str, value: float, unit: str, *, goal: float) -> Headline:
    """Make a figure that should not be below `goal`."""
    text = f">= {goal:g} {unit}"
    return Headline(what=what, value=value, unit=unit, goal=text, is_met=value >= goal)


def main(
    name: str, run: Callable[[bool], Report], argv: Sequence[str] | None = None
) -> int:
    """Be the command line of one benchmark; `run` is told whether to be quick."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / f"{name}.json")
    parser.add_argument("--quick", action="store_true", help="a look of some seconds")
    arguments = parser.parse_args(argv)
    before = environment() | {"load_average_before": os.getloadavg()}
    started = time.monotonic()
    report = run(arguments.quick)
    report.environment = {
        **before,
        "load_average_after": os.getloadavg(),
        "duration_seconds": round(time.monotonic() - started, 1),
        "quick": arguments.quick,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
    print(f"\n{summary_table(name, [asdict(line) for line in report.summary])}")
    print(f"({report.environment['duration_seconds']} s, written to {arguments.json})")
    return 0


def environment() -> dict[str, Any]:
    """Tell which code ran, on what."""
    return {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "proxy")),
        "cpu": _line_of(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cpus": os.cpu_count(),
        "memory": _line_of(Path("/proc/meminfo"), "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def summary_table(name: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """Lay out headlines as they stand in a report's JSON."""
    verdicts = {True: "met", False: "MISSED", None: ""}
    rows = [
        (
            line["what"],
            f"{line['value']:.4g} {line['unit']}",
            line["goal"],
            verdicts[line["is_met"]],
        )
        for line in lines
    ]
    return table((name, "figure", "goal", ""), rows)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _line_of(path: Path, key: str) -> str:
    """Return what stands behind the colon of the first line that begins with `key`."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(found, "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
