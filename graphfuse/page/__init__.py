"""The report as one page of HTML: no network, light and dark, for a reader who asks what became of each reduction.

    Report ─► data.py (layers, folds, advice, measured times) ─► JSON in page.html.jinja ─► page/*.js draw it

Everything that comes from a model (module paths, reasons, notes) travels as JSON in an inert script element, and the
scripts write it as text, never as markup. A content security policy forbids every other script, and the network.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from graphfuse.page.data import page_data

if TYPE_CHECKING:
    from graphfuse.report import Report

SCRIPTS = ("dom.js", "savings.js", "picture.js", "details.js", "column.js", "page.js")


def render(report: Report, title: str = "graphfuse report") -> str:
    """The page, whole."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("graphfuse.page", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(
        title=title, data=page_data(report, title), script=script, style=_read("page.css"), script_digest=digest
    )


@functools.cache
def _script() -> str:
    """The scripts as one function, so that their names are nobody else's."""
    return "(() => {\n'use strict';\n" + "\n".join(map(_read, SCRIPTS)) + "})();\n"


def _read(name: str) -> str:
    return (resources.files("graphfuse.page") / name).read_text(encoding="utf-8")
