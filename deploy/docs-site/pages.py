"""Hooks of mkdocs: pages from outside of docs/, the navigation, and links to files that are not pages."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {"README.md": "index.md", "deploy/docs-site/tour.md": "tour.md"}
OUTSIDE |= {name: name for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the patterns of the navigation by their pages."""
    config.nav = [_expand(entry) for entry in config.nav or ()]
    return config


def _expand(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {title: _expand_pages(pages) if isinstance(pages, list) else pages for title, pages in entry.items()}


def _expand_pages(pages: list[str]) -> list[str]:
    found: list[str] = []
    for page in pages:
        is_pattern = "*" in page
        found += sorted(str(path.relative_to(DOCS)) for path in DOCS.glob(f"{page}.md")) if is_pattern else [page]
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point the links of a page at the pages of the site. A file that is no page becomes plain text."""
    target = page.file.src_uri
    source = next((name for name, new in OUTSIDE.items() if new == target), f"docs/{target}")

    def replace(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        place = normpath(PurePosixPath(source).parent / path)
        if not (ROOT / place).exists():
            raise PluginError(f"{source}: the link to {path} leads nowhere")
        new = OUTSIDE.get(place, place.removeprefix("docs/") if place.startswith("docs/") else None)
        if new is None or files.get_file_from_path(new) is None:
            return text if text.strip("`") in place else f"{text} (`{place}`)"
        up = "../" * target.count("/")
        return f"[{text}]({up}{new}{anchor or ''})"

    return _LINK.sub(replace, markdown)
