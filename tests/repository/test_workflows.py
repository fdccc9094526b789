"""What the workflows, hooks and locked requirements name exists, and stands once or agrees."""

import re
import shlex
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
WORKFLOWS = {path.stem: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()
SETUP = (ROOT / "setup.py").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def jobs(name):
    return yaml.safe_load(WORKFLOWS[name].read_text())["jobs"]


def script(job):
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


def recipe(target):
    """The commands of a target as words, without ``$(BIN)/``."""
    lines = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    commands = lines.replace("\\\n", " ").splitlines()
    return [shlex.split(command.replace("$(BIN)/", "")) for command in commands]


def expand(pattern):
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.is_file()}
    assert found, f"{pattern} matches no file"
    return found


def is_file(word):
    return "/" in word or word.endswith(".cff")


def linters_of_make():
    """Each command of ``make lint`` with the files that it reads, or the folder."""
    for words in recipe("lint"):
        files = [word for word in words if is_file(word)]
        command = [word for word in words if word not in files]
        if files:
            yield " ".join(command), frozenset(set.union(*map(expand, files)))
        else:
            yield " ".join(command), None


def linters_of_hooks():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    files = listed.stdout.decode().splitlines()
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]:
        words = [*shlex.split(hook["entry"]), *hook.get("args", [])]
        command = " ".join(words).removeprefix(".venv/bin/")
        if hook.get("pass_filenames", True):
            yield command, frozenset(filter(re.compile(hook["files"]).search, files))
        else:
            assert "files" not in hook or any(map(re.compile(hook["files"]).search, files))
            yield command, None


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of tracked files")
def test_pre_commit_has_the_linters_of_make():
    """The same commands, on the same files where they take files."""
    assert set(linters_of_hooks()) == set(linters_of_make())


def test_makes_targets_in_workflows_exist():
    for name in WORKFLOWS:
        for job in jobs(name).values():
            for target in re.findall(r"\bmake (\S+)", script(job) if "steps" in job else ""):
                assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), target


def test_core_suite_runs_on_the_oldest_and_the_newest():
    matrix = jobs("tests")["core"]["strategy"]["matrix"]["include"]
    oldest, newest = matrix[0], matrix[-1]
    assert f"TORCH = ({oldest['torch'].replace('.', ', ').removesuffix(', 0')})" in SETUP
    assert PYPROJECT["project"]["dependencies"] == [f"torch>={oldest['torch'].removesuffix('.0')}"]
    (triton,) = PYPROJECT["project"]["optional-dependencies"]["triton"]
    assert triton == oldest["triton"].replace("==", ">=").removesuffix(".0")
    assert PYPROJECT["project"]["requires-python"] == f">={oldest['python']}"
    assert (newest["torch"], newest["triton"]) == ("newest", "triton")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_stages_on_the_gpu_exist():
    command = script(jobs("gpu")["suite"])
    (stages,) = re.findall(r"--only (\S+)", command)
    suite = [str(ROOT / "benchmarks" / "gpu_suite.sh"), "--list"]
    listed = subprocess.run(suite, check=True, capture_output=True, text=True).stdout
    assert set(stages.split(",")) <= {line.split()[0] for line in listed.splitlines() if line}


@pytest.fixture
def release(tmp_path):
    """Runs the check of a release on a package of version 1.2.3 and a changelog."""

    def check(tag, changelog):
        for folder in (".github", "bapo_kernels"):
            (tmp_path / folder).mkdir()
        shutil.copy(ROOT / ".github" / "check_release.sh", tmp_path / ".github")
        (tmp_path / "bapo_kernels" / "__init__.py").write_text('__version__ = "1.2.3"\n')
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}\n\n- A change.\n")
        command = ["bash", tmp_path / ".github" / "check_release.sh", tag]
        return subprocess.run(command, capture_output=True, text=True)

    return check


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v1.2.3", "## 1.2.3 (2026-11-23)", None),
        ("v1.2.4", "## 1.2.3 (2026-11-23)", "the tag must be v1.2.3"),
        ("1.2.3", "## 1.2.3 (2026-11-23)", "the tag must be v1.2.3"),
        ("v1.2.3", "## 1.2.3 (unreleased)", "the heading '## 1.2.3 (YYYY-MM-DD)'"),
        ("v1.2.3", "## 1.243 (2026-11-23)", "the heading '## 1.2.3 (YYYY-MM-DD)'"),
    ],
)
def test_check_of_a_release(release, tag, changelog, message):
    result = release(tag, changelog)
    assert (result.returncode == 0) == (message is None)
    assert (message or "") in result.stderr


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    torch = re.search(r"^TORCH \?= (\S+)$", MAKEFILE, re.MULTILINE)[1]
    assert f"pip install torch=={torch}" in PYPROJECT["tool"]["cibuildwheel"]["before-build"]


def test_citation_names_the_authors_of_the_paper():
    (paper,) = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    authors = [f"{one['family-names']}, {one['given-names']}" for one in paper["authors"]]
    readme = " ".join((ROOT / "README.md").read_text().split())
    named = re.search(r"author = \{(.*?) and others\}", readme)[1].split(" and ")
    assert authors[: len(named)] == named


LOCKED = sorted((ROOT / "requirements").glob("*.in"))
PIN = re.compile(r"^([\w.-]+)(?:==([^ ;\\\n]+))?", re.MULTILINE)


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
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


def test_locked_requirements_are_named_as_they_are():
    texts = [MAKEFILE, (ROOT / "pyproject.toml").read_text()]
    texts += [path.read_text() for path in WORKFLOWS.values()]
    named = {
        name for text in texts for name in re.findall(r"requirements[\w/-]+\.(?:in|txt)", text)
    }
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["demo", "test"])
def test_small_environments_have_the_versions_of_the_large_one(name):
    folder = ROOT / "requirements"
    small, large = (set(PIN.findall((folder / f"{n}.txt").read_text())) for n in (name, "all"))
    assert len(small) > 10
    assert small <= large
