"""The site of docs/: it builds without a warning. Every link of every document leads to a file and a heading that are
there; no network is needed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, run

_spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
assert _spec is not None and _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def prose(path: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", hooks.FENCE.sub("", path.read_text()))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", hooks.FENCE.sub("", path.read_text()), re.MULTILINE)
    return {hooks.slug(heading.replace("`", "")) for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_lead_to_files_and_headings(path):
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]+)?\)", prose(path)):
        if "://" in target:
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor[1:] in anchors(file), f"{path.name} links to {target}{anchor}"


def test_every_page_is_a_first_and_only_title():
    for path in DOCUMENTS:
        titles = re.findall(r"^# .+$", hooks.FENCE.sub("", path.read_text()), re.MULTILINE)
        assert len(titles) == 1, path.name


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        run(sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder, folder=ROOT)  # strict: mkdocs.yml
    return folder


def test_it_builds_without_a_warning_and_has_every_page(site):
    pages = {path.stem for path in site.glob("*.html")} - {"404"}
    assert pages == {path.stem for path in (ROOT / "docs").glob("*.md")} | {"ARCHITECTURE"}


def test_sections_of_other_files_stand_in_it(site):
    page = (site / "writing-a-rule.html").read_text()
    assert "all_reduce_scale" in page and "CONTRIBUTING.md" not in page


def test_pictures_are_copied_into_it(site):
    sources = re.findall(r'<img[^>]*src="([^"]+)"', (site / "index.html").read_text())
    assert len(sources) >= 2
    assert all((site / source).is_file() for source in sources)


def test_nothing_is_asked_of_the_network(site):
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not loaded, page.name


def test_a_section_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"README\.md has no section #nothing"):
        hooks.section("README.md", "nothing")
