"""What the site needs so that its pages read well on GitHub too. There a page links to files beside docs/, and to
sections of README.md and CONTRIBUTING.md; the site has neither. So:

- A paragraph that is nothing but a link to a section of a file beside docs/ becomes that section.
- ARCHITECTURE.md is a page of the site. Links to the other two lead to the pages that have their sections.
- Other files beside docs/ that a page links to are copied into the site.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("ARCHITECTURE.md",)
STANDS_IN = {"CONTRIBUTING.md": "writing-a-rule.md", "README.md": "quick-start.md"}
COPIED = "files"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
SECTION = re.compile(r"^\[[^\]\n]+\]\((\.\./[A-Z]+\.md)#([\w-]+)\)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    pages = [file for file in files if file.is_documentation_page()]
    for target in sorted({path for page in pages for path in _outside(page)}):
        files.append(File.generated(config, f"{COPIED}/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    place = _folder(page.file)
    return _linked(_with_sections(markdown), place)


def _outside(file: Any) -> set[str]:
    """Files beside docs/ that a page links to, by their path from the root."""
    text = _with_sections(Path(file.abs_src_path).read_text(encoding="utf-8"))
    found = {_resolved(_folder(file), target) for _, target, *_ in LINK.findall(text)}
    return {path for path in found if path and not path.startswith("docs/") and path not in (*PAGES, *STANDS_IN)}


def _folder(file: Any) -> PurePosixPath:
    """Where a page stands in the repository."""
    return PurePosixPath("." if file.src_uri in PAGES else "docs")


def _resolved(folder: PurePosixPath, target: str) -> str | None:
    """A link's file from the root; None if it is elsewhere, or none."""
    if ":" in target:
        return None
    parts: list[str] = []
    for part in (folder / target).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    path = "/".join(parts)
    return path if (ROOT / path).is_file() else None


def _linked(text: str, folder: PurePosixPath) -> str:
    """Links as they lead somewhere from a page of the site, all of which stand in one folder."""

    def changed(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        path = _resolved(folder, target)
        if path is None:
            return match[0]
        if path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif path in STANDS_IN:
            path, anchor = STANDS_IN[path], ""
        elif path not in PAGES:
            path, anchor = f"{COPIED}/{path}", ""
        return f"{before}{path}{anchor or ''}{after}"

    return _outside_fences(text, lambda part: LINK.sub(changed, part))


def _with_sections(text: str) -> str:
    return _outside_fences(text, lambda part: SECTION.sub(lambda m: section(m[1].removeprefix("../"), m[2]), part))


def section(name: str, anchor: str) -> str:
    """The text of a section up to the next heading, its links as a page of docs/ has them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    hidden = FENCE.sub(lambda m: re.sub(r"[^\n]", "x", m[0]), text)  # a comment in code is no heading
    headings = list(re.finditer(r"^#+ (.+)$", hidden, re.MULTILINE))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        if slug(heading[1]) == anchor:
            body = text[heading.end() : following.start() if following else len(text)].strip()
            return _outside_fences(body, lambda part: LINK.sub(_from_docs, part))
    raise ValueError(f"{name} has no section #{anchor}")


def _from_docs(match: re.Match[str]) -> str:
    before, target, anchor, after = match.groups()
    return match[0] if ":" in target else f"{before}../{target}{anchor or ''}{after}"


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _outside_fences(text: str, change: Any) -> str:
    """Text with everything but its code blocks changed."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
