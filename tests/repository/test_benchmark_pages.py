"""Pages and figures of benchmarks: their numbers are those of records and of models."""

import random
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("pandas")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from helpers import needs_native
from matplotlib.text import Text

from bapo_kernels import reference
from benchmarks import frames, plot, records, report, scaling, tables
from benchmarks.cases import (
    HEAD,
    SAMPLING_MASK,
    WHOLE_VOCABULARY,
    Batch,
    Case,
    cpu_suite,
    gpu_suite,
)
from benchmarks.floor import floor
from benchmarks.methods import methods


def made_up(device, cases):
    """Random times of every method on every case, and a failure per case."""
    random.seed(0)
    machine = records.environment()
    for case in cases:
        work = case.N * case.V * (case.H if case.level == "hidden" else 100)
        yardstick = plot.YARDSTICKS.get(case.level)
        names = [yardstick, *(p.name for p in methods() if p.takes(case) and device in p.devices)]
        if case.sweep == HEAD:
            names.append(f"{yardstick}, four chunks")
        if case.sweep == SAMPLING_MASK:
            names[0] = "copy"
            names += ["zeros"] if case.level == "logits" else []
        for name in filter(None, names):
            yield (
                machine
                | case.fields()
                | {
                    "method": name,
                    "status": "measured",
                    "version": None if "bapo" in name else "1.0",
                    "ms": work * 1e-8 * random.uniform(1, 20),
                    "peak_bytes": 2**24,
                    "gradient_bytes": 2**22,
                    "product_flops": 6 * work,
                    "shares": {"allowed": 1e-3},
                    "bytes": 1e6 * random.randint(1, 99),
                    "flops": 1e9 * random.randint(1, 99),
                    "share": random.random(),
                    **{"GB_per_s": 1.0, "TFLOP_per_s": 1.0},
                    **{"value_error": 1e-6, "gradient_error": 1e-3},
                }
            )
        failed = {"method": "QuACK cross entropy", "status": "failed", "why": "no kernel"}
        yield machine | case.fields() | failed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The pages are made of its records: those of the CPU's suite."""
    records.append(tmp_path / "cpu.jsonl", list(made_up("cpu", cpu_suite())))
    for module in (plot, report, scaling):
        monkeypatch.setattr(module, "latest", partial(frames.latest, folder=tmp_path))
    for of_sweep in (frames.forms_of_the_head, frames.sampling_masks):
        monkeypatch.setattr(report, of_sweep.__name__, partial(of_sweep, folder=tmp_path))
    return tmp_path


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_figures_and_readme_are_made_of_records_alone(folder, where):
    if where == "cuda":
        records.append(folder / "cuda.jsonl", list(made_up("cuda", gpu_suite())))
        frame = frames.latest("cuda", folder)
        shown = frames.plain_losses(frame[frame.sweep.isna()])
        shown = shown[shown.model.isin(["Qwen3-8B", "Gemma-3-12B"])]
        ours = shown[shown.method.str.startswith("bapo")]
        assert len(ours) > 10
        on_gpu = report.blocks()["gpu"]
        assert all(tables.number(ms) in on_gpu for ms in ours.ms)
    drawn = plot.plot(where, folder)
    assert len(drawn) == 5
    assert all(path.stat().st_size > 5_000 for path in drawn)
    for _, figure in plot.figures(frames.latest(where, folder)):
        texts = [text.get_text() for text in figure.findobj(Text)]
        assert any(f"bapo_kernels {where}" in text for text in texts)
    devices = 2 if where == "cuda" else 1
    assert report.readme_block().count("Loss and gradients from") == 2 * devices


def cells(text):
    """Those of every line of a table."""
    return [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


def test_the_losses_have_times_and_memory_of_three_models(folder):
    """The first model, the largest vocabulary and the widest head; failures are listed."""
    frame = frames.latest("cpu", folder)
    text = "\n".join(report.losses("cpu"))
    measured = frames.plain_losses(frame[frame.sweep.isna()])
    measured = measured[~measured.method.str.startswith("PyTorch reference")]
    shown = measured[measured.model.isin(["Qwen3-0.6B", "Gemma-3-1B", "DeepSeek-V3"])]
    kinds = frame[(frame.task == "clip") & (frame.level == "logits") & (frame.method == "copy")]
    assert len(shown) > 50
    assert all(f" {tables.number(ms)} |" in text for ms in [*shown.ms, *kinds.ms])
    head = next(line for line in cells(text) if "hidden states" in line[0])
    assert head[1] == "Qwen3-0.6B (151,936 x 1,024)"
    assert head[4:] == ["Qwen3-0.6B, float32", *(f"MiB, {m}" for m in shown.model.unique())]
    assert "| QuACK cross entropy" in text
    assert "no kernel" in text


def test_the_forms_of_the_head_have_a_table_of_their_own(folder):
    """Of every record measured in bfloat16; the other sections have none of them."""
    forms = frames.forms_of_the_head("cpu", folder)
    forms = forms[forms["dtype"] == "bfloat16"]
    assert len(forms) > 20
    blocks = report.blocks()
    assert "four chunks" not in blocks["losses"]
    assert all(f"{tables.number(ms)} |" in blocks["head"] for ms in forms.ms)
    assert "QuACK" not in blocks["head"]
    frozen = forms[forms.frozen & (forms.method == "bapo_kernels cpu, chunk_tokens = N/4")]
    head, _, *lines = cells(blocks["head"])
    by_name = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    row = by_name["**bapo_kernels cpu, chunk_tokens = N/4**"]
    assert (row["frozen"], row["MiB, frozen"]) == (tables.number(frozen.ms.iloc[0]), "16.0")
    products = list(by_name["matrix products"].values())
    assert "" not in products[:4], "two with a frozen head, or three"


def test_sampling_masks_have_tables_of_their_own(folder):
    """One per level, of every measured record."""
    masks = frames.sampling_masks("cpu", folder)
    blocks = report.blocks()
    assert "masked_fill" not in blocks["losses"]
    for milliseconds in masks[masks.sweep == SAMPLING_MASK].ms:
        assert f" {tables.number(milliseconds)} |" in blocks["masks"]
    assert blocks["masks"].count("Loss and gradients") == 2
    head, *lines = cells(blocks["masks"].split("\n\n")[2])
    column, peak = head.index("bfloat16, frozen"), head.index("MiB, bfloat16, frozen")
    case = masks.level.eq("hidden") & masks["dtype"].eq("bfloat16") & masks.frozen
    own, whole = (
        masks[case & (masks.method == "bapo_kernels cpu") & (masks.sweep == sweep)].iloc[0]
        for sweep in (SAMPLING_MASK, WHOLE_VOCABULARY)
    )
    shown = {line[0]: (line[column], line[peak]) for line in lines}
    assert shown["**bapo_kernels cpu**"] == (tables.number(own.ms), "12.0")
    assert shown["**bapo_kernels cpu, whole vocabulary**"][0] == tables.number(whole.ms)
    assert shown["floor"] == (tables.number(own.share * own.ms), "")


def test_a_later_record_replaces_an_earlier_one(tmp_path):
    """Records that are older than frozen heads are of trained ones."""
    case = Case.of("logits", "loss", "Qwen3-0.6B", 24).fields()
    old = {key: value for key, value in case.items() if key != "frozen"}
    results = {"status": "failed", "why": "?"}, {"ms": 1.0}, {"ms": 2.0}
    made = zip((case, old, case), results, strict=True)
    lines = [{"method": "x", "status": "measured"} | fields | result for fields, result in made]
    records.append(tmp_path / "cpu.jsonl", lines)
    frame = frames.latest("cpu", tmp_path)
    assert frame[["status", "ms"]].values.tolist() == [["measured", 2.0]]


@needs_native
@pytest.mark.parametrize("layout", ["dense", "padded", "packed", "zero advantage"])
@pytest.mark.parametrize("data", ["on-policy", "stale", "very stale"])
def test_the_floor_counts_rows(layout, data):
    """Against the definition of the classes of rows."""
    batch = Batch(Case("logits", "loss", "any", 256, 50, 128, layout=layout, data=data), "cpu")
    config, mask = batch.case.config, batch.mask
    low, high = reference.find_clip_bounds(batch.logp, batch.old, batch.A, mask, config=config)
    ratio, mask = (batch.logp - batch.old).exp(), batch.A.isfinite() if mask is None else mask
    pos, neg = mask & (batch.A > 0), mask & (batch.A < 0)
    clipped = pos & (ratio > config.ratio_upper_max) | neg & (ratio < config.ratio_lower_start)
    kept = pos & (ratio <= config.ratio_upper_start) | neg & (ratio >= config.ratio_lower_max)
    rows = {
        "unmasked": mask,
        "active": pos | neg,
        "undecided": (pos | neg) & ~clipped & ~kept,
        "gradient": pos & (ratio <= high) | neg & (ratio >= low),
    }
    unmasked, active, undecided, gradient = (of_class.sum().item() for of_class in rows.values())
    shares = batch.shares()
    assert shares == {name: of_class.double().mean().item() for name, of_class in rows.items()}
    size = 256 * 50 * 2
    assert floor(batch.case, shares).bytes == (unmasked + undecided + 256) / 256 * size
    assert floor(batch.case, shares, live=True).bytes == (active + undecided + 256) / 256 * size
    hidden = replace(batch.case, level="hidden")
    assert floor(hidden, shares).flops == (2 * unmasked + 4 * gradient) * 50 * hidden.H
    frozen = replace(hidden, frozen=True)
    assert floor(frozen, shares).flops == (2 * unmasked + 2 * gradient) * 50 * hidden.H
    probs = replace(batch.case, task="log_probs")
    assert floor(probs, shares).bytes == unmasked / 256 * size


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


def training_step(name, device, **others):
    sizes = {"B": 4, "T": 2_048, "V": 151_936, "H": 1_024, "layers": 28, "dtype": "bfloat16"}
    versions = {"trl": "1.16.0", "transformers": "5.17.0", "torch": "2.11.0", "commit": "5eed5eed"}
    times = {"ms": 151.0, "ms_mean": 152.0, "step_ms": 653.0, "peak_MiB": 7_654.0}
    own = {"case": f"TRL micro-batch: {name}", "device": device, "machine": f"some {device}"}
    return sizes | versions | times | own | others


def test_training_steps_of_both_devices_have_a_table_each(tmp_path, monkeypatch):
    made = [
        training_step("TRL's GRPO", "cpu", ms=9_876.0, dtype="float32"),
        training_step("TRL's GRPO", "cuda", ms=1.0),
        training_step("BAPO, fused", "cuda", step_ms=321.0),
        training_step("TRL's GRPO", "cuda"),  # measured again
    ]
    records.append(tmp_path / "trl.jsonl", made)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    gpu, cpu = ("\n".join(report.training(device)) for device in ("cuda", "cpu"))
    assert "some cuda, commit 5eed5eed" in gpu
    assert "4 answers of 1,024 to 2,048 tokens" in gpu
    _, _, *rows = cells(gpu)
    assert rows == [["BAPO, fused", "321", "151", "7,654"], ["TRL's GRPO", "653", "151", "7,654"]]
    assert "float32" in cpu
    assert "9,876" in cpu


@pytest.mark.parametrize(
    ("page", "blocks"),
    [
        (report.README, lambda: {"records": report.readme_block()}),
        (report.PAGE, report.blocks),
        (scaling.PAGE, scaling.blocks),
    ],
    ids=["README", "benchmarks", "scaling"],
)
def test_pages_match_the_committed_records(page, blocks):
    text, blocks = page.read_text(), blocks()
    assert text == tables.filled(text, blocks)
    assert all(f"<!-- {name} -->" in text for name in blocks)
    assert tables.filled("<!-- x -->\nold\n<!-- /x -->", {"x": "\\1"}) == (
        "<!-- x -->\n\\1\n\n<!-- /x -->"
    )


def test_pages_say_what_was_measured_at_which_commit():
    measured = not frames.latest("cuda").empty
    for page, words in ((report.PAGE, "No GPU has been"), (scaling.PAGE, "No kernel has run")):
        assert (words in " ".join(page.read_text().split())) != measured
    commits = set(frames.latest("cpu")["commit"])
    assert len(commits) > 1, "the search was measured later"
    for text in (report.README.read_text(), report.PAGE.read_text()):
        assert all(f"commit {commit}" in text for commit in commits)


def test_the_scaling_page_has_the_numbers_of_the_model():
    text, job = " ".join(scaling.PAGE.read_text().split()), scaling.Job()
    for words in (
        f"{job.tokens:,} active tokens, with V = {job.V:,} and H = {job.H:,}",
        f"micro-batch of {job.micro_batch:,} tokens",
        f"the {job.tensor_parallel} ranks of a node",
        f"{scaling.GRID_POINTS} float64 values per data-parallel rank",
        f"tests {scaling.PROBES} pairs of bounds",
    ):
        assert words in text


def test_the_parts_of_a_step():
    """8,192 rows of an eighth of 151,936 columns, 4 bytes each, at half of 3,000 GB/s."""
    job, machine = scaling.Job(), scaling.Machine()
    ours = scaling.Approach("ours", 4, 0, 4, 8_192, 0.5, 1)
    logits = 8_192 * 18_992
    assert scaling.rows_time(ours, job, machine) == pytest.approx(logits * 4 / 1.5e12)
    products = replace(ours, bytes_per_logit=0, products=3)
    seconds = scaling.rows_time(products, job, machine)
    assert seconds == pytest.approx(6 * logits * 4_096 / 350e12)
    seconds = scaling.tensor_parallel_time(ours, job, machine)
    assert seconds == pytest.approx(15e-6 + 32 * 8_192 * 7 / 450e9)
    assert scaling.tensor_parallel_time(ours, replace(job, tensor_parallel=1), machine) == 0
    one, all_ = (
        scaling.search_time(replace(ours, probes=probes), job, machine, 1_024) for probes in (2, 54)
    )
    assert all_ == pytest.approx(27 * one)
    assert scaling.search_time(ours, job, machine, 1_024) < all_ / 50


def test_predictions_of_a_step():
    """More GPUs take less time and as much memory; measured shares replace stated ones."""
    shares = {"from logits": {"bapo_kernels cuda": 0.25}}
    stated, measured = (
        [
            row
            for row in scaling.predictions(scaling.Job(), scaling.Machine(), given)
            if row["approach"] == "bapo_loss"
        ]
        for given in ({}, shares)
    )
    assert [row["gpus"] for row in stated] == list(scaling.GPUS)
    assert stated[0]["rows"] == pytest.approx(128 * stated[-1]["rows"])
    assert len({row["MiB"] for row in stated}) == 1
    assert measured[0]["rows"] == pytest.approx(stated[0]["rows"] * 4 / 1.05)
