"""Generated tables are those of the committed results; a GPU's results will fill theirs."""

from itertools import zip_longest

import pytest
from pages import ROOT

pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from benchmarks import plot, report
from benchmarks.reading import plain_losses, results
from benchmarks.records import load
from benchmarks.tables import filled, number
from study.__main__ import DOCS, OF_HEAD, RESULTS
from study.compare import frame
from study.page import tables as of_study


def check_lines(got, expected, where, command):
    """Tells the first line that differs."""
    lines = zip_longest(got.splitlines(), expected.splitlines())
    for n, (is_there, made) in enumerate(lines, 1):
        if is_there != made:
            told = f"{where}:{n} is {is_there!r}, the results make it {made!r}: {command}"
            pytest.fail(told, pytrace=False)


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.stem)
def test_pages_match_the_committed_results(page):
    text, tables = page.read_text(), report.PAGES[page]()
    assert [name for name in tables if f"<!-- {name} -->" not in text] == []
    expected = filled(text, tables)
    check_lines(text, expected, page.relative_to(ROOT), "python -m benchmarks.report")


def test_the_study_has_the_tables_of_its_records():
    text, tables = (
        (page := DOCS / "internals" / "study.md").read_text(),
        of_study(frame(RESULTS), load(OF_HEAD)),
    )
    assert [name for name in tables if f"<!-- {name} -->" not in text] == []
    check_lines(text, filled(text, tables), page.relative_to(ROOT), "python -m study report")


def test_pages_say_whether_a_gpu_was_measured():
    page = ROOT / "docs/internals/benchmarks.md"
    assert ("No GPU has been" in " ".join(page.read_text().split())) == results("cuda").empty


def test_figures_and_tables_of_a_gpu(monkeypatch, tmp_path):
    """Made as if a GPU had the results of the CPU."""
    frame = results("cpu")
    frame["method"] = frame.method.str.replace("bapo_kernels cpu", "bapo_kernels cuda")
    for module in (plot, report):
        monkeypatch.setattr(
            module, "results", lambda kind: frame if kind == "cuda" else results(kind)
        )
    drawn = list(plot.plot("cuda", tmp_path))
    assert len(drawn) == 5
    assert all(path.stat().st_size > 5_000 for path in drawn)
    shown = plain_losses(frame[frame.sweep.isna() & (frame.model == "Qwen3-0.6B")])
    ours, on_gpu = shown[shown.method.str.startswith("bapo")], "\n".join(report.page()["gpu"])
    assert len(ours) > 5
    assert all(number(ms) in on_gpu for ms in ours.ms)
