"""The documentation site builds without a warning; its links, commands and names are right."""

import ast
import json
import re
import subprocess
import sys
from functools import cache

import pytest
from commands import check, commands
from pages import ROOT, Html, Markdown, dead_links, of_other_hosts

import bapo_kernels
from bapo_kernels import reference
from bapo_kernels.tools import cli

DOCS = ROOT / "docs"
if not DOCS.exists():
    pytest.skip("the documentation is in the repository only", allow_module_level=True)

FOLDERS = [DOCS, ROOT / "fuzz", ROOT / ".github", ROOT / "release"]
SOURCES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
MARKDOWN = {page.relative_to(ROOT).as_posix(): Markdown(page) for page in sorted(SOURCES)}
OF_A_PAGE = pytest.mark.parametrize("page", MARKDOWN)
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
    pages = {name for name in MARKDOWN if name.startswith("docs/")}
    pages = {name.removeprefix("docs/").replace(".md", ".html") for name in pages}
    assert pages == {*html["index.html"].navigation, "index.html"}
    assert not pages & {"search.html", "genindex.html"}, "Sphinx writes its own page there"


@cache
def anchors_in_a_forge(file):
    return Markdown(file).anchors() if file.suffix == ".md" else None


@OF_A_PAGE
def test_links_in_a_forge(page):
    page = MARKDOWN[page]
    assert not dead_links(page.path, page.links(), anchors_in_a_forge)


def test_links_of_the_site(site, html):
    by_file = {site / name: page for name, page in html.items()}

    def anchors(file):
        if file not in by_file and file.suffix == ".html":
            by_file[file] = Html(file)
        return by_file[file].ids if file in by_file else None

    for name, page in html.items():
        assert not dead_links(page.path, page.links + page.loads, anchors), name


def test_the_site_loads_nothing_from_other_hosts(site, html):
    for name, page in html.items():
        assert not of_other_hosts(page.loads), name
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", text), sheet.name


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
    elif language == "toml":
        import tomllib

        tomllib.loads(code)
    elif language == "json":
        json.loads(code)


def test_names_lead_to_the_reference(html):
    links = html["guide.html"].links
    assert "api/losses.html#bapo_kernels.bapo_loss" in links
    assert not [link for link in links if link.endswith("#bapo_kernels.log_probs")]


@OF_A_PAGE
def test_code_blocks(page):
    """``test_doctests.py`` runs the Python."""
    for language, code, line in MARKDOWN[page].fences():
        try:
            check_fence(language, code)
        except Exception as error:
            pytest.fail(f"{page}:{line}: {error}")


@OF_A_PAGE
def test_lines_of_code_fit_a_page(page):
    """The site shows this many columns at 1,280 pixels."""
    for language, code, line in MARKDOWN[page].fences():
        if not language.startswith("{"):  # a directive is no code
            for number, text in enumerate(code.splitlines(), line + 1):
                assert len(text) <= 88, f"{page}:{number} has {len(text)} columns"


@OF_A_PAGE
def test_commands_in_the_text(page):
    for code in MARKDOWN[page].codes():
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
    """Its tables have the options of the commands."""
    text = (DOCS / "api/command_line.md").read_text()
    for command in (cli.validate, cli.profile):
        section = text.partition(f"## {command.__name__}\n")[2].partition("\n## ")[0]
        names = command.__annotations__.keys() - {"return"}
        assert set(re.findall(r"^\| `--(\w+)`", section, re.MULTILINE)) == names


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


@pytest.mark.parametrize(
    ("language", "code", "message"),
    [
        ("", "x", "needs a language"),
        ("python", "f(", "never closed"),
        ("sh", "if true", "syntax error"),
        ("sh", "make tset", "no target 'tset'"),
        ("sh", "make -C fuzz test  # the folder has none", "no target 'test'"),
        ("sh", "A=1 python -m bapo_kernels validat", "no command 'validat'"),
        ("sh", "python -m bapo_kernels \\\n  validate --dtypes float16", "[Nn]o such option"),
        ("sh", "python -m bapo_kernels validate --dtype int8 | tee log", "int8"),
        ("sh", "cd x && python -m benchmarks.numeric", "no benchmarks.numeric"),
        ("sh", "pytest tests/test_nothing.py", "does not exist"),
        ("sh", "pip install '.[cli,clo]'", "clo"),
        ("yaml", "a: [", "expected"),
        ("toml", "a =", "Invalid"),
        ("json", "{a: 1}", "Expecting"),
    ],
)
def test_broken_code_is_found(language, code, message):
    with pytest.raises(Exception, match=message):
        check_fence(language, code)


def test_broken_links_are_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# The `code`, twice\n\n# The code twice\n")
    page.write_text(
        "[a](other.md#the-code-twice) [b](other.md#the-code-twice-1) [c](https://x.org) [d](#no)\n"
        "[e](other.md#the-code) [f](gone.md) ![g](gone.png) [h](other.md)\n"
    )
    links = Markdown(page).links()
    assert dead_links(page, links, anchors_in_a_forge) == [
        "#no",
        "other.md#the-code",
        "gone.md",
        "gone.png",
    ]


def test_other_hosts_are_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<link href="https://a.org/x.css"><script src="//b.org/x.js"></script>'
        '<a href="https://c.org">c</a><img src="d.png">'
    )
    assert of_other_hosts(Html(page).loads) == ["https://a.org/x.css", "//b.org/x.js"]
