"""The pages: what they link to is there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    for link in links:
        if link.startswith("#"):
            headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
            anchors = {
                re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings
            }
            assert link[1:] in anchors
        elif not link.startswith("https://"):
            assert (page.parent / link.split("#")[0]).exists(), link


def test_there_are_pages():
    assert {page.name for page in PAGES} >= {"README.md", "WORKSPACE.md"}
