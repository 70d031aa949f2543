"""`python -m benchmarks`: all benchmarks, one after the other, and one table.

Each runs as a process of its own and writes a JSON file of its own. The exit code is
1 where one of them failed; a goal that is missed is no failure.
"""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson

from benchmarks.results import RESULTS_DIR, ROOT, summary_table

BENCHMARKS = (
    "exactness", "agents", "overhead", "dedup", "restore_path", "store_transfer",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a short look at each")
    arguments = parser.parse_args(argv)
    arguments.results.mkdir(parents=True, exist_ok=True)
    codes: dict[str, int] = {}
    for name in BENCHMARKS:
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            continue
        print(f"\n== {name} ==", flush=True)
        path = arguments.results / f"{name}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
        if arguments.quick:
            command.append("--quick")
        codes[name] = subprocess.run(command, cwd=ROOT, check=False).returncode
    print("\n== summary ==")
    for name, code in codes.items():
        print(f"\n{_summary(name, arguments.results / f'{name}.json', code)}")
    return 1 if any(codes.values()) else 0


def _summary(name: str, path: Path, code: int) -> str:
    """Return the headlines that a benchmark has written, or how it ended."""
    verdict = f"{name}: exit code {code}"
    if code or not path.exists():
        return verdict
    lines = orjson.loads(path.read_bytes()).get("summary")
    return summary_table(name, lines) if lines else verdict


if __name__ == "__main__":
    sys.exit(main())
