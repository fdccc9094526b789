"""The wheel's bill of materials, and the page of compatibility."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("cyclonedx", reason="needs requirements/all.txt")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "release").exists(), reason="not in the repository")
REPORT = {
    "compiler": "g++ (Debian 12.2.0-14+deb12u1) 12.2.0",
    "torch": "2.13.0+cpu",
    "cuda": "13.0 for sm_80, sm_90",
}


@pytest.fixture
def materials():
    from release import materials

    return materials


def test_bill_of_materials_names_what_is_in_the_library(materials):
    bom = json.loads(materials.bill("0.1.0", REPORT))
    versions = {part["name"]: part["version"] for part in bom["components"]}
    assert versions.keys() > {"libstdc++", "libgcc", "torch", "nvidia-cuda-runtime"}
    assert versions["libstdc++"] == "12.2.0"
    assert versions["torch"] == "2.13.0"
    assert all(part["licenses"] for part in bom["components"])
    assert bom["metadata"]["component"]["version"] == "0.1.0"


def test_a_library_without_cuda_has_no_cuda_runtime(materials):
    report = {key: value for key, value in REPORT.items() if key != "cuda"}
    names = {part["name"] for part in json.loads(materials.bill("0.1.0", report))["components"]}
    assert names == {"libstdc++", "libgcc", "torch"}


def test_the_version_of_gcc_is_read_in_containers_too(materials):
    compiler = "g++ (GCC) 14.2.1 20250110 (Red Hat 14.2.1-7)"
    libstdcxx, *_ = materials.components(REPORT | {"compiler": compiler})
    assert libstdcxx.version == "14.2.1"


def test_the_same_build_has_the_same_bill(materials):
    assert materials.bill("0.1.0", REPORT) == materials.bill("0.1.0", REPORT)


def test_bill_and_licences_name_the_same(materials):
    text = (ROOT / "release" / "licenses" / "THIRD_PARTY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row.split(":")[0])}
    assert named == {part.name for part in materials.components(REPORT)}


def test_the_page_of_compatibility_has_the_records():
    from release import compatibility

    records = compatibility.load()
    text = compatibility.PAGE.read_text()
    assert text == compatibility.page_of(records)
    assert [n for n in compatibility.blocks(records) if f"<!-- {n} -->" not in text] == []
    installed = [record for record in records if record["kind"] == "installed"]
    assert all(record["report"]["backend cpu"] == "available" for record in installed)
    assert all(record["loss"] == -0.25 for record in installed)


def test_the_oldest_versions_that_are_allowed_have_been_run():
    from release import compatibility

    project = (ROOT / "pyproject.toml").read_text()
    for name in ("requires-python = ", "torch", "triton"):
        (oldest,) = re.findall(rf'{name}"?>=([\d.]+)"', project)
        assert re.search(rf"\| {re.escape(oldest)}\.\d", compatibility.PAGE.read_text()), name


def test_a_failed_installation_is_shown():
    from release import compatibility

    record = next(r for r in compatibility.load() if r["kind"] == "installed")
    good = compatibility.row_of_install(record)
    record["validate"]["exit status"] = 1
    record["report"]["backend cpu"] = "absent: it does not load"
    del record["report"]["cpu kernels"]
    bad = compatibility.row_of_install(record)
    assert good["checks passed"] == str(record["validate"]["checks"])
    assert bad["checks passed"] == "FAILED, no CPU kernels"
