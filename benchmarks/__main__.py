"""`python -m benchmarks`: all benchmarks, one after the other, and one table.

Each runs as a process of its own and writes a JSON file of its own. The exit code is
1 where one of them failed; a goal that is missed is no failure.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from benchmarks.results import RESULTS_DIR, ROOT, Headline, at_most, summary_table

QUICK_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "exactness": ("--prompts", "2", "--tokens", "16"),
    "agents": ("--quick",),
    "overhead": ("--quick",),
    "v1_overhead": ("--quick",),
    "dedup": ("--quick",),
    "restore_path": ("--quick",),
    "store_transfer": ("--mib", "128", "--rounds", "2", "--threads", "2"),
}
"""The benchmarks in their order, and what makes each of them short."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--results", type=Path, default=RESULTS_DIR, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a short look at each")
    arguments = parser.parse_args(argv)
    arguments.results.mkdir(parents=True, exist_ok=True)
    headlines: list[Mapping[str, Any]] = []
    is_failed = False
    for name, quick in QUICK_ARGUMENTS.items():
        print(f"\n== {name} ==", flush=True)
        path = (arguments.results / f"{name}.json").absolute()
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
        command += quick if arguments.quick else ()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        is_failed |= code != 0
        headlines += read_headlines(name, path, code)
    print(f"\n{summary_table('all benchmarks', headlines)}")
    return int(is_failed)


def read_headlines(name: str, path: Path, code: int) -> list[Mapping[str, Any]]:
    """Return the figures of a benchmark that matter, and a failure in front."""
    report = orjson.loads(path.read_bytes()) if path.exists() else {}
    found = list(report.get("summary", ()))
    if name == "exactness" and report:
        found = [asdict(line) for line in _exactness(report)]
    if name == "store_transfer" and report:
        found = [asdict(line) for line in _store_transfer(report)]
    if code:
        failure = at_most(f"{name}: exit code", code, "", goal=0)
        found.insert(0, asdict(failure))
    return found


def _exactness(report: Mapping[str, Any]) -> list[Headline]:
    return [
        at_most(
            f"exactness, {kv_type} KV: tokens that differ",
            sum(one["num_decoded_tokens"] - one["num_equal_tokens"] for one in trials),
            "tokens",
            goal=0,
        )
        for kv_type, trials in report["trials"].items()
    ]


def _store_transfer(report: Mapping[str, Any]) -> list[Headline]:
    return [
        Headline(
            what=f"store transfer: {name}", value=statistics.median(rates), unit="GB/s"
        )
        for name, rates in report["gigabytes_per_second"].items()
    ]


if __name__ == "__main__":
    sys.exit(main())
