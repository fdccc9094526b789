"""The documentation site builds without a warning; its links, commands and names are right."""

import ast
import re
import subprocess
import sys
from functools import cache
from urllib.parse import urlsplit

import pytest
from commands import check, commands
from pages import ROOT, Html, Markdown, dead_links

import bapo_kernels
from bapo_kernels import reference
from bapo_kernels.tools import cli

DOCS = ROOT / "docs"
if not DOCS.exists():
    pytest.skip("the documentation is in the repository only", allow_module_level=True)

FOLDERS = [DOCS, ROOT / ".github", ROOT / "release"]
SOURCES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
MARKDOWN = {page.relative_to(ROOT).as_posix(): Markdown(page) for page in sorted(SOURCES)}
pytestmark = pytest.mark.xdist_group("docs")  # one worker builds the site


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site."""
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", DOCS, out]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def html(site):
    """The pages of the site, without the sources of modules."""
    files = [file for file in site.rglob("*.html") if "_modules" not in file.parts]
    return {file.relative_to(site).as_posix(): Html(file) for file in files}


def test_every_page_is_in_the_navigation(html):
    """Of the site, and of a reader of the repository, who sees the visible list."""
    pages = {name.removeprefix("docs/") for name in MARKDOWN if name.startswith("docs/")}
    of_site = {name.replace(".html", ".md") for name in html["index.html"].navigation}
    listed = (DOCS / "index.md").read_text().partition("```{toctree}")[0]
    listed = set(re.findall(r"\]\(([^.#)]+\.md)\)", listed))
    of_modules = {name for name in pages - listed if name.startswith("api/")}
    assert pages == {*of_site, "index.md"} == {*listed, *of_modules, "index.md"}


def test_links_of_the_site(site, html):
    """They lead to pages and names that exist, and nothing is loaded from another host."""
    by_file = {site / name: page for name, page in html.items()}

    def anchors(file):
        if file not in by_file and file.suffix == ".html":
            by_file[file] = Html(file)
        return by_file[file].ids if file in by_file else None

    for name, page in html.items():
        assert not dead_links(page.path, page.links + page.loads, anchors), name
        assert [target for target in page.loads if urlsplit(target).netloc] == [], name
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", text), sheet.name
    links = html["guide.html"].links
    assert "api/losses.html#bapo_kernels.bapo_loss" in links
    assert not [link for link in links if link.endswith("#bapo_kernels.log_probs")]


@cache
def anchors_in_a_forge(file):
    return Markdown(file).anchors() if file.suffix == ".md" else None


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


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_and_code_of_a_page(name):
    """``test_doctests.py`` runs the Python."""
    page = MARKDOWN[name]
    assert not dead_links(page.path, page.links(), anchors_in_a_forge)
    for language, code, line in page.fences():
        try:
            check_fence(language, code)
        except Exception as error:
            pytest.fail(f"{name}:{line}: {error}")
    for code in page.codes():
        if re.match(r"(make|pip|pytest|python) [\w.'-]", code) and "..." not in code:
            for command in commands(code):
                check(command)


@pytest.mark.parametrize("module", [bapo_kernels, reference], ids=["public", "reference"])
def test_every_public_name_is_documented_once(html, module):
    found = [id for name, page in html.items() if name.startswith("api/") for id in page.ids]
    for name in module.__all__:
        full = f"{module.__name__}.{name}"
        assert found.count(full) + found.count(f"module-{full}") == 1, full


def test_command_line_page():
    """Its table has the options of the command."""
    text = (DOCS / "api/command_line.md").read_text()
    names = cli.validate.__annotations__.keys() - {"return"}
    assert set(re.findall(r"^\| `--(\w+)`", text, re.MULTILINE)) == names


@pytest.mark.parametrize(
    ("module", "name"), [("trl_config", "BAPOTrainerConfig"), ("verl", "BAPOPolicyLossConfig")]
)
def test_signatures_of_adapters(module, name):
    """They are written out on the page, where the frameworks are not imported."""
    source = (ROOT / f"bapo_kernels/integrations/{module}.py").read_text()
    (definition,) = [n for n in ast.parse(source).body if getattr(n, "name", None) == name]
    fields = [n.target.id for n in definition.body if isinstance(n, ast.AnnAssign)]
    page = (DOCS / "api/integrations.md").read_text()
    (signature,) = re.findall(rf"autoclass:: {name}\(\*, (.*), \*\*\w+\)", page)
    assert [option.partition("=")[0] for option in signature.split(", ")] == fields
