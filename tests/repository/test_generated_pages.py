"""Generated tables are those of the committed records; a GPU's records will fill theirs."""

from itertools import zip_longest

import pytest
from pages import ROOT

pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from benchmarks import frames, plot, records, report
from benchmarks.tables import filled, markdown, number
from study import compare
from study.__main__ import DOCS, RESULTS

PAGES = {report.README: lambda: {"records": report.readme_block()}, report.PAGE: report.blocks}


def check_lines(got, expected, where, command):
    """Tells the first line that differs."""
    lines = zip_longest(got.splitlines(), expected.splitlines())
    for n, (is_there, made) in enumerate(lines, 1):
        if is_there != made:
            told = f"{where}:{n} is {is_there!r}, the records make it {made!r}: {command}"
            pytest.fail(told, pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_match_the_committed_records(page):
    text, blocks = page.read_text(), PAGES[page]()
    assert [name for name in blocks if f"<!-- {name} -->" not in text] == []
    expected = filled(text, blocks)
    check_lines(text, expected, page.relative_to(ROOT), "python -m benchmarks report")


def test_the_study_has_the_rewards_of_its_records():
    expected = markdown(compare.end_points(compare.frame(RESULTS)))
    lines = (DOCS / "internals" / "study.md").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("|"))
    table = "\n".join(lines[first : first + len(expected.splitlines())])
    check_lines(table, expected, "the first table of study.md, line", "python -m study report")


def test_pages_say_whether_a_gpu_was_measured():
    words = "No GPU has been" in " ".join(report.PAGE.read_text().split())
    assert words == frames.latest("cuda").empty


def test_figures_and_tables_of_a_gpu(monkeypatch, tmp_path):
    """Made as if a GPU had the records of the CPU, and a failure."""
    lines = [
        record | {"method": record["method"].replace("bapo_kernels cpu", "bapo_kernels cuda")}
        for record in records.load(records.RESULTS / "cpu.jsonl")
    ]
    lines.append(lines[0] | {"method": "QuACK cross entropy", "status": "failed", "why": "no code"})
    load = records.load
    monkeypatch.setattr(frames, "load", lambda path: lines if path.stem == "cuda" else load(path))
    assert all(path.stat().st_size > 5_000 for path in plot.plot("cuda", tmp_path))
    frame = frames.latest("cuda")
    shown = frames.plain_losses(frame[frame.sweep.isna() & (frame.model == "Qwen3-0.6B")])
    ours, on_gpu = shown[shown.method.str.startswith("bapo")], report.blocks()["gpu"]
    assert len(ours) > 5
    assert all(number(ms) in on_gpu for ms in ours.ms)
    assert "no code" in on_gpu
