"""The documentation site (``make docs``): pages are Markdown, docstrings reStructuredText."""

import sys
from pathlib import Path
from types import SimpleNamespace

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

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
    "site_links",
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
autodoc_mock_imports = ["megatron", "trl", "verl"]
integrations.require_version = lambda package, oldest: SimpleNamespace(__version__=oldest)

nitpick_ignore_regex = [
    # Of other projects, whose inventories would have to be downloaded.
    ("py:class", r"(torch|dist|collections\.abc)\..+|Tensor"),
    # Names of types, where an annotation is only a string.
    ("py:class", r"GivenBounds|(Loss|Row|Softmax)Options|Statistics"),
]
