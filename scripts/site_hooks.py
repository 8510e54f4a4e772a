"""What the site's builder (mkdocs.yml) does to a page: the same Markdown reads well in a repository's browser and on
the site."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)+(?:infsample_rl|tests|configs|scripts|launch|README|SECURITY|CONTRIBUTING)[^)]*\)"
)
# the one script that the theme takes from outside
ELSEWHERE = re.compile(r'<script src="?https://unpkg\.com/iframe-worker/shim"?></script>')
LIST_OR_TABLE = re.compile(r"\s*([-*] |\d+\. |\|.*\|\s*$)")
FOLDER_LINK = re.compile(r'href="(\.\.?)"')  # the logo's: a folder that is opened as a file is a listing


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files that are not pages become their text, and lists and tables are set apart from the paragraph above,
    as the builder wants them."""
    lines: list[str] = []
    in_fence = False
    for line in OUTSIDE.sub(r"\1", markdown).split("\n"):
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
        before = lines[-1] if lines else ""
        starts = LIST_OR_TABLE.match(line) and not in_fence
        if starts and before.strip() and not LIST_OR_TABLE.match(before) and not before.startswith((" ", "\t")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """On a page that is opened as a file the search runs by a script of ours, docs/site_search.js, and the logo leads
    to a page."""
    output = FOLDER_LINK.sub(r'href="\1/index.html"', output)
    return ELSEWHERE.sub(f'<script src="{"../" * page.url.count("/")}site_search.js"></script>', output)


def on_post_template(output_content: str, **_: Any) -> str:
    """The page for wrong addresses has no search to offer."""
    return ELSEWHERE.sub("", output_content)
