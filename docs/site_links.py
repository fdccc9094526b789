"""Links of the site that plain Markdown does not have."""

import re
from operator import attrgetter
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref

import bapo_kernels

ROOT = Path(__file__).resolve().parent.parent

# Pages of the site whose text is a file outside of docs/, where a forge looks for it.
OUTSIDE = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
PAGES = {str((ROOT / file).with_suffix("")): page for page, file in OUTSIDE.items()}
RELATIVE_LINK = re.compile(r"\]\((?!\w+:|#)")
NAME = re.compile(r"(?:bapo_kernels\.)?(?P<name>[A-Za-z][\w.]*)(?:\(\))?")
AMBIGUOUS = "log_probs"  # also an argument and an output


def read_outside(app, page, source):
    """Puts the text of the file in the place of the link to it, the first line."""
    if page in OUTSIDE:
        file, rest = Path(OUTSIDE[page]), source[0].partition("\n")[2]
        text = RELATIVE_LINK.sub(f"](../{file.parent}/", (ROOT / file).read_text())
        source[0] = text.replace("](.././docs/", "](") + "\n" + rest
        app.env.note_dependency(str(ROOT / file))


def link_to_page(app, doctree):
    """Links to such a file lead to its page."""
    for link in doctree.findall(pending_xref):
        link["reftarget"] = PAGES.get(link["reftarget"], link["reftarget"])


def link_names(app, doctree):
    """The first mention of a public name in a section leads to the API reference."""
    page, seen = app.env.docname, set()
    for literal in [] if page.startswith("api/") else list(doctree.findall(nodes.literal)):
        match = NAME.fullmatch(literal.astext())
        in_text = isinstance(literal.parent, nodes.paragraph)
        if not (match and in_text and is_public(match["name"])):
            continue
        mention = section_of(literal), match["name"]
        if mention not in seen:
            target = f"bapo_kernels.{match['name']}"
            link = pending_xref(refdomain="py", reftype="obj", reftarget=target, refdoc=page)
            literal.replace_self(link)
            link += literal
        seen.add(mention)


def is_public(name):
    if name == AMBIGUOUS or name.partition(".")[0] not in bapo_kernels.__all__:
        return False
    try:
        return callable(attrgetter(name)(bapo_kernels))
    except AttributeError:
        return False


def section_of(node):
    while not isinstance(node, nodes.section):
        node = node.parent
    return node


def setup(app):
    app.connect("source-read", read_outside)
    app.connect("doctree-read", link_to_page)
    app.connect("doctree-read", link_names)
