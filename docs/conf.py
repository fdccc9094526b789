"""The documentation site (``make docs``): pages are Markdown, docstrings reStructuredText."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

from sphinx.addnodes import pending_xref

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bapo_kernels  # noqa: E402
from bapo_kernels import integrations  # noqa: E402

project = "bapo_kernels"
version = release = bapo_kernels.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 4

maximum_signature_line_length = 88
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# Adapters are documented without their frameworks, which take a minute to import.
autodoc_mock_imports = ["trl", "verl"]
integrations.require_version = lambda package, oldest: SimpleNamespace(__version__=oldest)

nitpick_ignore_regex = [
    # Of other projects, whose inventories would have to be downloaded.
    ("py:class", r"(torch|dist|collections\.abc)\..+|Tensor"),
    # Names of types, where an annotation is only a string.
    ("py:class", r"GivenBounds|LossOptions|Statistics"),
]

# Pages of the site that are files outside of docs/, where a forge looks for them.
OUTSIDE = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "fuzzing": "fuzz/README.md",
}
PAGES = {str((ROOT / file).with_suffix("")): page for page, file in OUTSIDE.items()}
RELATIVE_LINK = re.compile(r"\]\((?!\w+:|#)")


def read_outside(app, page, source):
    """Puts the text of the file in the place of the link to it."""
    if page in OUTSIDE:
        file = Path(OUTSIDE[page])
        source[0] = RELATIVE_LINK.sub(f"](../{file.parent}/", (ROOT / file).read_text())
        app.env.note_dependency(str(ROOT / file))


def link_to_page(app, doctree):
    """Links to such a file lead to its page."""
    for link in doctree.findall(pending_xref):
        link["reftarget"] = PAGES.get(link["reftarget"], link["reftarget"])


def setup(app):
    app.connect("source-read", read_outside)
    app.connect("doctree-read", link_to_page)
