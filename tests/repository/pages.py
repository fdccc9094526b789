"""Pages as their readers see them: Markdown in a forge, HTML in a browser."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
LOADS = {"src", "srcset", "data", "poster", "action", "href"}


class Markdown:
    """A page in GitHub's Markdown."""

    def __init__(self, path):
        self.path = path
        self.blocks = MarkdownIt("commonmark").enable("table").parse(path.read_text())
        self.spans = [span for block in self.blocks for span in block.children or ()]

    def fences(self):
        """Language, code and first line of each block of code."""
        blocks = [block for block in self.blocks if block.type == "fence"]
        return [(block.info.strip(), block.content, block.map[0] + 1) for block in blocks]

    def codes(self):
        """The code in the text."""
        return [span.content for span in self.spans if span.type == "code_inline"]

    def links(self):
        """Relative links and images."""
        found = [span.attrs.get("href") or span.attrs.get("src") for span in self.spans]
        return relative(link for link in found if link)

    def anchors(self):
        """Of the headings, by GitHub's rules."""
        found, seen = set(), Counter()
        for mark, heading in zip(self.blocks, self.blocks[1:], strict=False):
            if mark.type == "heading_open":
                words = "".join(span.content for span in heading.children)
                slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
                found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
                seen[slug] += 1
        return found


class Html(HTMLParser):
    """A page of the site: its ids, its relative links, those of the sidebar, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.path, self.ids, self.links, self.loads, self.navigation = path, set(), [], [], []
        self.before = {}  # the attributes of the tag before
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            elif tag == "a" and name == "href":
                self.links += relative([value])
                if "toctree-l" in self.before.get("class", ""):
                    self.navigation.append(value)
            elif name in LOADS and value:
                self.loads.append(value)
        self.before = dict(attrs)


def relative(links):
    return [link for link in links if not urlsplit(link).scheme]


def dead_links(page, links, anchors_of):
    """Those that lead to no file, or to an anchor that ``anchors_of(file)``, if any, lacks."""
    dead = []
    for link in links:
        parts = urlsplit(link)
        file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        anchors = anchors_of(file) if file.exists() and parts.fragment else None
        if not file.exists() or (anchors is not None and unquote(parts.fragment) not in anchors):
            dead.append(link)
    return dead
