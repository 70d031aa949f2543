"""The benchmarks run, and write what the documentation says; how fast is not tested."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.__main__ import read_headlines
from benchmarks.agents import prefill_bound, shared_tokens
from benchmarks.contenders import Asked
from benchmarks.results import Spread, at_least, at_most, summary_table

ROOT = Path(__file__).parents[1]
QUICK_SECONDS = 120
HEADLINE_KEYS = {"what", "value", "unit", "goal", "is_met"}
ENVIRONMENT_KEYS = {
    "commit", "cpu", "cpus", "memory", "system", "python", "packages", "time_utc",
    "uncommitted_changes", "load_average_before", "load_average_after",
    "duration_seconds", "quick",
}  # fmt: skip


def check_spread(spread: Mapping[str, float]) -> None:
    """Assert that a distribution is one, of at least one value."""
    assert spread["count"] >= 1
    ordered = [spread[key] for key in ("minimum", "p25", "median", "p75", "maximum")]
    assert ordered == sorted(ordered)


def check_agents(report: Mapping[str, Any]) -> None:
    """Assert that kvbus prefilled least, within its bound, and restored something.

    An agent for whom a busy machine's store was late pays the prefix once more.
    """
    one = report["results"]["rounds"][0]
    asked = one["kvbus"]["requests"]
    decisions = [request["decision"] for request in asked]
    late = decisions.count("recompute") - 1
    longest = max(request["num_prompt_tokens"] for request in asked)
    assert 0 <= late < len(asked) - 1
    bound = one["kvbus_bound_tokens"] + late * longest
    assert one["kvbus"]["prefilled_tokens"] <= bound
    is_restored = one["kvbus"]["restored_tokens"] > 0
    assert is_restored == ("restore" in decisions)
    if not late:
        assert one["kvbus"]["prefilled_tokens"] < one["stock"]["prefilled_tokens"]
    cold = one["no reuse"]["requests"]
    assert all(r["num_prefilled_tokens"] == r["num_prompt_tokens"] for r in cold)
    for name in ("no reuse", "stock", "kvbus"):
        assert 0 < one[name]["ttft_mean_seconds"] <= one[name]["ttft_max_seconds"]
        assert len(one[name]["requests"]) == report["settings"]["agents"]
    check_spread(report["results"]["prefilled_tokens_stock_over_kvbus"])


def check_overhead(report: Mapping[str, Any]) -> None:
    """Assert that everybody was measured as often, and replied at some rate."""
    tiny = report["results"]["tiny"]
    assert 60 < tiny["ttft"]["prompt_tokens"] < 160
    counts = set()
    for name in ("direct", "again", "kvbus", "embedded", "busy"):
        check_spread(tiny["ttft"][name]["ttft_seconds"])
        check_spread(tiny["ttft"][name]["paired_difference_seconds"])
        counts.add(tiny["ttft"][name]["ttft_seconds"]["count"])
    assert len(counts) == 1
    assert tiny["ttft"]["direct"]["p50_over_direct_seconds"] == 0.0
    for name in ("direct", "kvbus"):
        assert tiny["streaming"][name]["tokens_per_second"]["minimum"] > 0
        check_spread(tiny["streaming"][name]["ratio_to_direct"])
    assert tiny["cpu"]["cpu_per_token_seconds"] > 0
    assert tiny["cpu"]["cpu_per_token_seconds"] < tiny["cpu"]["cpu_per_request_seconds"]


def check_v1_overhead(report: Mapping[str, Any]) -> None:
    """Assert the same, and that bookkeeping is told apart from the relay."""
    check_overhead(report)
    shown = "".join(line["what"] for line in report["summary"])
    assert f"{report['settings']['store']} store" in shown
    assert "no store" in shown


def check_dedup(report: Mapping[str, Any]) -> None:
    """Assert that the bytes are those of the tokens."""
    found = report["results"]
    assert found["shared_tokens"] >= 800
    assert found["snapshot_bytes"] > 5 * found["store_bytes"] > 0
    assert found["files_over_store"] == pytest.approx(
        found["snapshot_bytes"] / found["store_bytes"]
    )
    block_bytes = found["store_bytes"] / found["store_blocks"]
    token_bytes = found["snapshot_bytes"] / found["prompt_tokens"]
    block_size = report["settings"]["block_size"]
    assert block_bytes == pytest.approx(block_size * token_bytes, rel=0.2)


def check_restore_path(report: Mapping[str, Any]) -> None:
    """Assert that the stages add up."""
    found, settings = report["results"], report["settings"]
    assert settings["file_bytes"] > (
        settings["num_tokens"] * settings["kv_bytes_per_token"]
    )
    assert found["file_seconds"]["count"] == settings["rounds"]
    first = found["first_store_seconds"]
    parts = sum(first[name] for name in ("file", "fetch", "engine"))
    assert parts == pytest.approx(first["total"])
    for name in ("file", "fetch", "engine", "total"):
        check_spread(found["store_seconds"][name])
    check_spread(found["store_over_file"])


CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "agents": check_agents,
    "overhead": check_overhead,
    "v1_overhead": check_v1_overhead,
    "dedup": check_dedup,
    "restore_path": check_restore_path,
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_quick_run_writes_what_is_documented(name: str, tmp_path: Path) -> None:
    """A benchmark ends with 0, and its JSON has the keys and sane values."""
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(path)],
        cwd=ROOT,
        env=os.environ | {"KVBUS_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=QUICK_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    report = orjson.loads(path.read_bytes())
    assert report["benchmark"] == name
    assert set(report["environment"]) >= ENVIRONMENT_KEYS
    assert report["environment"]["quick"] is True
    assert report["settings"]
    assert report["summary"]
    for line in report["summary"]:
        assert set(line) == HEADLINE_KEYS
        assert line["what"] in done.stdout
    CHECKS[name](report)


def test_the_bound_counts_prefix_tails_and_partial_blocks() -> None:
    """One prefix, what is not shared of each prompt, and 15 tokens per restore."""
    asked = [
        Asked(
            agent=agent,
            ttft_seconds=0.1,
            total_seconds=0.2,
            num_prompt_tokens=100 + agent,
            num_prefilled_tokens=0,
            decision=decision,
        )
        for agent, decision in enumerate(("recompute", "restore", "keep_slot"))
    ]
    assert prefill_bound(asked, prefix=90, block_size=16) == 90 + 10 + 11 + 12 + 15


def test_shared_tokens_end_at_the_first_difference() -> None:
    """Only what all begin with counts, however long the shortest is."""
    assert shared_tokens([[1, 2, 3, 4], [1, 2, 9, 4], [1, 2, 3]]) == 2
    assert shared_tokens([[1, 2], [1, 2, 3]]) == 2


def test_a_spread_is_of_the_values() -> None:
    """Median, quartiles and extremes are those of the sorted values."""
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.count, spread.minimum, spread.maximum) == (5, 1.0, 5.0)
    assert (spread.p25, spread.median, spread.p75) == (2.0, 3.0, 4.0)
    assert spread.p99 == pytest.approx(4.96)


def test_a_missed_goal_is_said_to_be_missed() -> None:
    """Goals work in both directions and stand in the table."""
    assert at_most("a", 3.0, "ms", goal=3.0).is_met
    assert at_least("b", 0.96, "x", goal=0.97).is_met is False
    line = {"what": "b", "value": 0.96, "unit": "x", "goal": ">= 0.97 x"}
    text = summary_table("title", [{**line, "is_met": False}])
    words = text.splitlines()[-1].split()
    assert words == ["b", "0.96", "x", ">=", "0.97", "x", "MISSED"]


def test_headlines_of_all_benchmarks_become_one_table(tmp_path: Path) -> None:
    """Figures are read from each form of file; a failure comes first."""
    path = tmp_path / "report.json"
    assert read_headlines("agents", path, 1)[0]["is_met"] is False
    trial = {"num_decoded_tokens": 64, "num_equal_tokens": 63}
    path.write_bytes(orjson.dumps({"trials": {"f16": [trial, trial]}}))
    (line,) = read_headlines("exactness", path, 0)
    assert (line["value"], line["is_met"]) == (2, False)
    path.write_bytes(orjson.dumps({"gigabytes_per_second": {"put": [1.0, 3.0, 2.0]}}))
    (line,) = read_headlines("store_transfer", path, 0)
    assert (line["value"], line["unit"]) == (2.0, "GB/s")
