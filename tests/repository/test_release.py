"""A release: versions, locked requirements, checks, workflows, bill of materials."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bapo_kernels import __version__

yaml = pytest.importorskip("yaml")

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def jobs(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]


def test_core_suite_runs_on_the_oldest_and_the_newest():
    matrix = jobs("tests")["core"]["strategy"]["matrix"]["include"]
    (python, packages), newest = matrix[0].values(), matrix[-1]["packages"]
    assert f"VERSIONS ?= python{python},{packages} " in (ROOT / "Makefile").read_text()
    torch, triton = (name.replace("==", ">=").removesuffix(".0") for name in packages.split(","))
    project = PYPROJECT["project"]
    assert project["dependencies"] == [torch]
    assert project["optional-dependencies"]["triton"] == [triton]
    assert project["requires-python"] == f">={python}"
    number = torch.removeprefix("torch>=").replace(".", ", ")
    assert f"TORCH = ({number})" in (ROOT / "setup.py").read_text()
    assert newest == "torch,triton"


def test_nothing_is_published_unchecked():
    release = jobs("release")
    assert release["publish"]["needs"] == ["wheels", "tests"]
    assert all(release[name]["needs"] == "check" for name in ("wheels", "tests"))
    assert ".github/check_release.sh" in release["check"]["steps"][-1]["run"]


@pytest.mark.parametrize(
    ("tag", "heading", "message"),
    [
        ("v1.2.3", "1.2.3 (2026-11-23)", ""),
        ("v1.2.4", "1.2.3 (2026-11-23)", "the tag must be v1.2.3"),
        ("v1.2.3", "1.2.3 (unreleased)", "the heading '## 1.2.3 (YYYY-MM-DD)'"),
        ("v1.2.3", "1.243 (2026-11-23)", "the heading '## 1.2.3 (YYYY-MM-DD)'"),
    ],
)
def test_check_of_a_release(tmp_path, tag, heading, message):
    for folder in (".github", "bapo_kernels"):
        (tmp_path / folder).mkdir()
    script = shutil.copy(ROOT / ".github" / "check_release.sh", tmp_path / ".github")
    (tmp_path / "bapo_kernels" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n- A change.\n")
    result = subprocess.run(["bash", script, tag], capture_output=True, text=True)
    assert (result.returncode == 0) == (message == "")
    assert message in result.stderr


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    makefile = (ROOT / "Makefile").read_text()
    torch = re.search(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)[1]
    assert f"pip install torch=={torch}" in PYPROJECT["tool"]["cibuildwheel"]["before-build"]


PIN = re.compile(r"^([\w.-]+)(?:==([^ ;\\\n]+))?", re.MULTILINE)


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.in")), ids=lambda p: p.stem)
def test_locked_requirements(path):
    """All that is asked for is locked, everything locked has a hash, and torch is not among it."""
    locked = path.with_suffix(".txt").read_text()
    pins = PIN.findall(locked)
    names = {name for name, _ in pins}
    asked = [(name, version) for name, version in PIN.findall(path.read_text()) if name[0] != "-"]
    assert asked
    for name, version in asked:
        assert (name, version) in pins if version else name in names
    assert "torch" not in names
    entries = re.split(r"^(?=[\w.-]+==)", locked, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in locked  # no index, which may be another elsewhere


@pytest.mark.parametrize("name", ["demo", "test"])
def test_small_environments_have_the_versions_of_the_large_one(name):
    folder = ROOT / "requirements"
    small, large = (dict(PIN.findall((folder / f"{n}.txt").read_text())) for n in (name, "all"))
    assert len(small) >= 4
    assert small.items() <= large.items()


def test_bill_of_materials_names_what_is_in_the_library():
    pytest.importorskip("cyclonedx", reason="needs requirements/all.txt")
    from release import materials

    compiler, cuda = "g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "13.0 for sm_80, sm_90"
    report = {"compiler": compiler, "torch": "2.13.0+cpu", "cuda": cuda}
    text = materials.bill("0.1.0", report)
    assert text == materials.bill("0.1.0", report)
    bom = json.loads(text)
    versions = {part["name"]: part["version"] for part in bom["components"]}
    expected = {"libstdc++": "12.2.0", "libgcc": "12.2.0", "torch": "2.13.0"}
    assert versions.items() > expected.items()
    assert all(part["licenses"] for part in bom["components"])
    licences = (ROOT / "release" / "licenses" / "THIRD_PARTY.md").read_text()
    rows = re.findall(r"^\| (`[^:]*)", licences, re.MULTILINE)
    assert {name for row in rows for name in re.findall("`([^`]+)`", row)} == versions.keys()
