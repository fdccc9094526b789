"""The documentation builds without a warning; links, commands and names of all pages are right."""

import ast
import pickle
import re
import subprocess
import sys

import pytest
from commands import check, commands
from pages import ROOT, page

import bapo_kernels
from bapo_kernels import reference
from bapo_kernels.tools import cli

DOCS = ROOT / "docs"
if not DOCS.exists():
    pytest.skip("the documentation is in the repository only", allow_module_level=True)

FOLDERS = [DOCS, ROOT / ".github", ROOT / "release"]
SOURCES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in SOURCES)


@pytest.mark.exhaustive
def test_the_site_builds_and_has_every_public_name(tmp_path):
    """A page outside of the navigation and a dead link are warnings, which are errors."""
    build = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-b", "dummy"]
    done = subprocess.run([*build, DOCS, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = pickle.loads((tmp_path / ".doctrees" / "environment.pickle").read_bytes())
    domain = environment.domaindata["py"]
    for module in (bapo_kernels, reference):
        names = {f"{module.__name__}.{name}" for name in module.__all__}
        assert names <= domain["objects"].keys() | domain["modules"].keys()


def check_fence(language, code):
    assert language, "a code block needs a language"
    if language == "python":
        compile(code, "<block>", "exec")
    elif language in ("sh", "bash"):
        parsed = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)
        assert parsed.returncode == 0, parsed.stderr
        for command in commands(code):
            check(command)
    elif language == "yaml":
        import yaml

        list(yaml.safe_load_all(code))
    else:
        assert language in ("text", "bibtex") or language.startswith("{"), "not checked"


@pytest.mark.parametrize("name", PAGES)
def test_links_and_code_of_a_page(name):
    """``test_doctests.py`` runs the Python."""
    assert not page(ROOT / name).dead_links()
    for language, code, line in page(ROOT / name).fences():
        try:
            check_fence(language, code)
        except Exception as error:
            pytest.fail(f"{name}:{line}: {error}")
    for code in page(ROOT / name).codes():
        if re.match(r"(make|pip|pytest|python) [\w.'-]", code) and "..." not in code:
            for command in commands(code):
                check(command)


def test_the_install_is_the_same_on_every_page():
    pages = [ROOT / "README.md", DOCS / "getting_started.md", DOCS / "install.md"]
    assert len({next(c for kind, c, _ in page(p).fences() if kind == "sh") for p in pages}) == 1


@pytest.mark.parametrize("command", ["validate", "bench"])
def test_the_options_of_the_command_line(command):
    text = (DOCS / "api/command_line.md").read_text()
    section = text.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    names = getattr(cli, command).__annotations__.keys() - {"return"}
    assert set(re.findall(r"^\| `--(\w+)`", section, re.MULTILINE)) == names


@pytest.mark.parametrize(
    ("module", "name"), [("trl_config", "BAPOTrainerConfig"), ("verl", "BAPOPolicyLossConfig")]
)
def test_signatures_of_adapters(module, name):
    """They are written out on the page, where the frameworks are not imported."""
    source = (ROOT / f"bapo_kernels/integrations/{module}.py").read_text()
    (definition,) = [n for n in ast.parse(source).body if getattr(n, "name", None) == name]
    fields = [n.target.id for n in definition.body if isinstance(n, ast.AnnAssign)]
    text = (DOCS / "api/integrations.md").read_text()
    (signature,) = re.findall(rf"autoclass:: {name}\(\*, (.*), \*\*\w+\)", text)
    assert [option.partition("=")[0] for option in signature.split(", ")] == fields
