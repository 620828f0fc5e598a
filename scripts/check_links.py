"""Finds dead links: every relative link of every Markdown file must lead to a file, and its #anchor to a heading.

Example: python scripts/check_links.py
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"\[[^\]\[]*\]\(([^)]+)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SKIPPED = {".venv", "build", "dist", "runs", "node_modules"}


def list_anchors(text: str) -> set[str]:
    """List the anchors of a Markdown page, as GitHub makes them."""
    headings = (re.sub(r"[`*]", "", heading).lower() for heading in HEADING.findall(FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def find_dead_links(page: Path, root: Path) -> list[str]:
    """Yield a line for each dead link of a page."""
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            dead.append(f"{page.relative_to(root)}: {link} leads to no file")
        elif anchor and target.suffix == ".md" and anchor not in list_anchors(target.read_text(encoding="utf-8")):
            dead.append(f"{page.relative_to(root)}: {link} leads to no heading")
    return dead


def main() -> int:
    """Check every page below the repository's root."""
    root = Path(__file__).resolve().parent.parent
    pages = [page for page in sorted(root.rglob("*.md")) if not SKIPPED & set(page.relative_to(root).parts)]
    dead = [line for page in pages for line in find_dead_links(page, root)]
    print("\n".join([*dead, f"{len(pages)} pages, {len(dead)} dead links"]))
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
