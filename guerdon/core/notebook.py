"""What notebooks show of an object: `_repr_html_`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """A small table, one row for each entry."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<b>{escape(title)}</b><table>{cells}</table>"


def html_frame(page: str, height: int = 640) -> str:
    """A whole HTML page in a frame, so that its styles do not change the notebook."""
    return f'<iframe srcdoc="{escape(page)}" width="100%" height="{height}" frameborder="0"></iframe>'
