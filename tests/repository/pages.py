"""Markdown pages as a forge shows them."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]


class Page:
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

    def dead_links(self):
        """Relative links and images that lead to no file, or to no heading of a page."""
        links = [span.attrs.get("href") or span.attrs.get("src") for span in self.spans]
        relative = [link for link in links if link and not urlsplit(link).scheme]
        return [link for link in relative if self._is_dead(link)]

    def _is_dead(self, link):
        parts = urlsplit(link)
        file = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
        if parts.fragment and file.suffix == ".md" and file.exists():
            return unquote(parts.fragment) not in page(file).anchors()
        return not file.exists()


page = cache(Page)
