"""Pages stay short, their links hold, and the walk through the code is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = (DOCS / "reference", DOCS / "results" / "gpu.md", DOCS / "results" / "paper_tables.md")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`([\w./]+\.(?:py|sh|cpp|h))`")
WALKED = re.compile(r"^\| `([\w./]+\.py)` \| ([\d,]+) \|", re.MULTILINE)


def words(*paths: Path) -> int:
    """Words as `cat PATHS | wc -w` counts them."""
    return sum(len(path.read_text().split()) for path in paths)


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as the site's builder and repository browsers both make them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_readme_has_at_most_1000_words_and_the_written_pages_20000():
    written = [page for page in DOCS.rglob("*.md") if not any(page.is_relative_to(path) for path in GENERATED)]
    assert words(ROOT / "README.md") <= 1_000
    assert words(*written) <= 20_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading(page):
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


def test_every_file_that_concepts_names_exists():
    places = (ROOT, ROOT / "infsample_rl")
    named = set(NAMED_FILE.findall((DOCS / "concepts.md").read_text()))
    assert named and [name for name in sorted(named) if not any((place / name).is_file() for place in places)] == []


def test_the_walk_is_at_most_25_files_and_5000_lines_and_says_how_long_they_are():
    walk = {name: int(lines.replace(",", "")) for name, lines in WALKED.findall((DOCS / "concepts.md").read_text())}
    real = {name: len((ROOT / "infsample_rl" / name).read_text().splitlines()) for name in walk}
    assert 10 <= len(walk) <= 25 and sum(real.values()) <= 5_000 and sum(walk.values()) <= 5_000
    wrong = {name: (walk[name], real[name]) for name in walk if abs(walk[name] - real[name]) > 0.1 * real[name]}
    assert wrong == {}, "printed and real lines"
