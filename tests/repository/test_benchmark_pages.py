"""Pages and figures of benchmarks: their numbers are those of records."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("pandas")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

import pandas as pd
from matplotlib.text import Text

from benchmarks import frames, plot, records, report, tables
from benchmarks.cases import DISTILLATION, HEAD, SAMPLING_MASK, WHOLE_VOCABULARY, Case, gpu_suite
from benchmarks.floor import floor
from benchmarks.methods import methods
from benchmarks.tables import number


def test_figures_and_tables_of_a_gpu(monkeypatch, tmp_path):
    """Made as if a GPU had the records of the CPU, and a failure."""
    lines = [
        record | {"method": record["method"].replace("bapo_kernels cpu", "bapo_kernels cuda")}
        for record in records.load(records.RESULTS / "cpu.jsonl")
    ]
    lines.append(lines[0] | {"method": "QuACK cross entropy", "status": "failed", "why": "no code"})
    of_cpu = records.load
    monkeypatch.setattr(frames, "load", lambda path: lines if path.stem == "cuda" else of_cpu(path))
    save, texts = plot.save, []

    def saved(figure, path):
        texts.append([text.get_text() for text in figure.findobj(Text)])
        return save(figure, path)

    monkeypatch.setattr(plot, "save", saved)
    drawn = plot.plot("cuda", tmp_path)
    assert len(drawn) == 5
    assert all(path.stat().st_size > 5_000 for path in drawn)
    assert all(any("bapo_kernels cuda" in text for text in of_figure) for of_figure in texts)
    assert report.readme_block().count("Loss and gradients from") == 2 * len(["cuda", "cpu"])
    frame = frames.latest("cuda")
    shown = frames.plain_losses(frame[frame.sweep.isna() & (frame.model == "Qwen3-0.6B")])
    ours = shown[shown.method.str.startswith("bapo")]
    assert len(ours) > 5
    on_gpu = report.blocks()["gpu"]
    assert all(number(ms) in on_gpu for ms in ours.ms)
    assert "| QuACK cross entropy" in on_gpu
    assert "no code" in on_gpu


def test_every_method_of_the_figures_has_a_style():
    plain = "loss", "dense", "stale", "bfloat16"
    for case in gpu_suite():
        if (case.task, case.layout, case.data, case.dtype) == plain and case.sweep in (None, "N"):
            assert {method.name for method in methods() if method.takes(case)} <= plot.STYLES.keys()


def test_a_table_has_a_column_per_group_and_the_fastest_first():
    slow, fast = ("slow", "A", 250.0, 2**20), ("bapo_kernels cpu", "A", 12.34, 3 * 2**20)
    again = "bapo_kernels cpu", "B", 1.234, None
    frame = pd.DataFrame([slow, fast, again], columns=["method", "column", "ms", "peak_bytes"])
    lines = tables.by_column(frame, "Losses, ms", frame[frame.column == "A"]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [cells[0], *cells[2:]] == [
        ["Losses, ms", "A", "B", "MiB, A"],
        ["**bapo_kernels cpu**", "12.3", "1.23", "3.00"],
        ["slow", "250", "", "1.00"],
    ]


def test_tables_have_every_record_and_no_other():
    blocks, heads = report.blocks(), frames.measured_in("cpu", HEAD)
    plain = frames.plain_losses(frames.latest("cpu"))
    plain = plain[plain.sweep.isna() & ~plain.method.str.startswith("PyTorch reference")]
    masks = frames.measured_in("cpu", SAMPLING_MASK, WHOLE_VOCABULARY)
    whole = masks.method.str.startswith("bapo") & (masks.sweep == WHOLE_VOCABULARY)
    shown = {
        "losses": plain[plain.model.isin(["Qwen3-0.6B", "Gemma-3-1B", "DeepSeek-V3"])],
        "head": heads[heads["dtype"] == "bfloat16"],
        "masks": masks[whole | (masks.sweep == SAMPLING_MASK)],
    }
    for block, frame in shown.items():
        assert len(frame) > 20
        assert all(f" {number(ms)} |" in blocks[block] for ms in frame.ms), block
    assert "four chunks" not in blocks["losses"] + blocks["masks"]
    assert "masked_fill" not in blocks["losses"] + blocks["head"]
    steps = [r for r in records.load(records.RESULTS / "trl.jsonl") if r["device"] == "cpu"]
    for record in {record["case"]: record for record in steps}.values():  # the last of each
        numbers = [number(record[name]) for name in ("step_ms", "ms", "peak_MiB")]
        assert " | ".join(numbers) in re.sub(" +", " ", blocks["training"])


def test_tables_of_distillation(monkeypatch):
    """Of made-up records of every case on a GPU: each time stands in a table, on its own."""
    cases = [case for case in gpu_suite() if case.sweep == DISTILLATION]
    facts = dict(status="measured", version=None, machine="a GPU", threads=1, torch="2", date="now")
    facts |= {"commit": "none", "peak_bytes": 2**20, "method": "bapo_kernels cuda"}
    made = [facts | case.fields() | {"ms": 1_000 + i} for i, case in enumerate(cases)]
    monkeypatch.setattr(frames, "load", lambda path: made if path.stem == "cuda" else [])
    text = "\n".join(report.distilled("cuda"))
    assert len(cases) > 20
    assert all(text.count(f" {number(record['ms'])} |") == 1 for record in made)
    assert "frozen head, " in text
    assert "whole vocabulary" in text
    assert frames.latest("cuda").empty
    assert list(report.distilled("cpu")) == []


def test_the_floor():
    """Of 32 rows 24 are read, 4 of them twice, and 16 have a gradient."""
    case, size = Case("logits", "loss", "any", 32, 100, 8), 100 * 2
    shares = dict(unmasked=0.75, active=0.5, undecided=0.125, gradient=0.5)
    assert floor(case, shares) == ((24 + 4 + 32) * size, 0)
    assert floor(case, shares, live=True) == ((16 + 4 + 32) * size, 0)
    assert floor(replace(case, task="log_probs"), shares) == (24 * size, 0)
    hidden = replace(case, level="hidden")
    assert floor(hidden, shares).flops == (2 * 24 + 4 * 16) * 100 * 8
    assert floor(replace(hidden, frozen=True), shares).flops == (2 * 24 + 2 * 16) * 100 * 8


def test_the_floor_of_sampling_masks():
    """24 rows of 10 ids on average: 18 of them are read, 12 have a gradient."""
    case = Case("logits", "loss", "any", 24, 100, 8, sweep=SAMPLING_MASK)
    shares = dict(unmasked=0.75, gradient=0.5, undecided=0.1, allowed=0.1)
    assert floor(case, shares) == (24 * 100 * 2 + 64 * (180 + 120), 0)
    assert floor(replace(case, task="log_probs"), shares) == (64 * 180, 0)
    hidden = replace(case, level="hidden")
    trained = (180 + 120 + 100) * 8 * 2, (2 * 180 + 4 * 120) * 8
    assert floor(hidden, shares) == trained
    assert floor(replace(hidden, frozen=True), shares) == (180 * 8 * 2, (2 * 180 + 2 * 120) * 8)
    assert floor(replace(hidden, task="log_probs"), shares) == (180 * 8 * 2, 2 * 180 * 8)


@pytest.mark.parametrize(
    ("page", "blocks"),
    [
        (report.README, lambda: {"records": report.readme_block()}),
        (report.PAGE, report.blocks),
    ],
    ids=["README", "benchmarks"],
)
def test_pages_match_the_committed_records(page, blocks):
    text, blocks = page.read_text(), blocks()
    assert text == tables.filled(text, blocks)
    assert all(f"<!-- {name} -->" in text for name in blocks)
    assert tables.filled("<!-- x -->\nold\n<!-- /x -->", {"x": "\\1"}) == (
        "<!-- x -->\n\\1\n\n<!-- /x -->"
    )


def test_pages_say_what_was_measured():
    measured = not frames.latest("cuda").empty
    assert ("No GPU has been" in report.PAGE.read_text()) != measured
    every = frames.latest("cpu")
    shown = frames.plain_losses(every[every.sweep.isna() & every.model.str.startswith("Qwen3")])
    for page, frame in ((report.README, shown), (report.PAGE, every)):
        assert all(f"commit {commit}" in page.read_text() for commit in set(frame["commit"]))
