"""Pages outside of docs/ become pages of the site, and links between all of them work in both places.

A link is written as GitHub reads it, relative to its file in the repository: `../CONTRIBUTING.md` in docs/guide.md. The
site has the files of docs/ at its top, next to `OUTSIDE`, so this link becomes `CONTRIBUTING.md`. A file
that is in neither fails the build, as links are checked strictly.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("*.md", "examples/*", "examples/ci/*", "examples/launch/*", "benchmarks/results/gpu.md", "mpctl/*/README.md")
LINK = re.compile(r"\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern) if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = Path(page.file.abs_src_path).relative_to(ROOT).parent.as_posix()
    start = posixpath.dirname(page.file.src_uri) or "."

    def on_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[1])).removeprefix("docs/")
        return f"]({posixpath.relpath(target, start)}{match[2] or ''})"

    return LINK.sub(on_site, markdown)
