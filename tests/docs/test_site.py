"""The site is whole and needs no network to be read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FROM_ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)[^>]*\s(?:src|href)="?(?:https?:)?//[^"\s>]*')
IN_STYLES = re.compile(r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^)\"']*")


def navigation() -> list[str]:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return [page for section in config["nav"] for pages in section.values() for page in pages]


def test_every_page_has_one_place_in_the_navigation():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    named = navigation()
    assert len(named) == len(set(named)) and set(named) == pages


def test_a_tag_that_loads_from_elsewhere_is_found():
    assert FROM_ELSEWHERE.search('<script defer src="https://a.example/x.js">') and FROM_ELSEWHERE.search(
        "<link rel=x href=//a.example/x.css>"
    )
    assert not FROM_ELSEWHERE.search('<a href="https://a.example">') and IN_STYLES.search(
        "a{b:url(https://a.example/x)}"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_make_docs_builds_pages_that_load_nothing_from_elsewhere():
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    site = ROOT / "build" / "docs"
    built = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {page.replace(".md", ".html") for page in navigation()} <= set(built)
    assert {name: found[0] for name, text in built.items() if (found := FROM_ELSEWHERE.search(text))} == {}
    assert {path.name: found[0] for path in site.rglob("*.css") if (found := IN_STYLES.search(path.read_text()))} == {}
