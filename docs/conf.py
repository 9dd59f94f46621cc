"""How ``make docs`` builds the site: Sphinx with MyST and Furo, from the Markdown beside this file.

The pages stay plain Markdown, as a forge shows it: what only the site needs is added here.
"""

import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

project = html_title = "celery_leases"
release = metadata.version("celery-leases")
extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]
nitpicky = True
myst_heading_anchors = 4  # with the names that a forge gives them
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_permalinks_icon = "#"

PAGES = Path(__file__).parent
SUMMARY = (
    "Celery tasks that are safe to run twice: leases decide who may run, records what is done."
)
PARTS = ("Tutorial", "How-to", "Explanation", "Reference")
TOCTREE = """
```{{toctree}}
:hidden:
:caption: {}

{}
```
"""


def pages_of(part: str) -> list[str]:
    """The pages of a part, in the order in which the first page lists them."""
    listed = (PAGES / "index.md").read_text()
    found = [f"{part.lower()}/{path.stem}" for path in (PAGES / part.lower()).glob("*.md")]
    return sorted(found, key=lambda name: listed.index(f"({name}.md)"))


def for_the_site(app: Sphinx, name: str, source: list[str]) -> None:
    """Show a diagram, and a link to a file that is not in the site, as text; list all pages."""
    here = (PAGES / f"{name}.md").parent

    def in_site(link: re.Match[str]) -> str:
        path = link[2].partition("#")[0]
        return link[0] if not path or PAGES in (here / path).resolve().parents else link[1]

    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)\s]+)\)", in_site, source[0])
    # Pygments knows the quotes of PostgreSQL under its name only.
    text = text.replace("```mermaid", "```text").replace("```sql", "```postgresql")
    if name == "index":
        text += "".join(TOCTREE.format(part, "\n".join(pages_of(part))) for part in PARTS)
    source[0] = text


def put_markdown_beside(app: Sphinx, error: Exception | None) -> None:
    """Each page also as Markdown, and ``llms.txt`` with all of them (https://llmstxt.org)."""
    if error or app.builder.format != "html":
        return
    lines = [f"# {project}", "", f"> {SUMMARY}"]
    for part in PARTS:
        lines += ["", f"## {part}", ""]
        for name in pages_of(part):
            title = (PAGES / f"{name}.md").read_text().partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title}]({name}.md)")
    (app.outdir / "llms.txt").write_text("\n".join(lines) + "\n")
    for path in PAGES.rglob("*.md"):
        copy = app.outdir / path.relative_to(PAGES)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    shutil.copytree(PAGES / "pictures", app.outdir / "pictures", dirs_exist_ok=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the two."""
    app.connect("source-read", for_the_site)
    app.connect("build-finished", put_markdown_beside)
    return {"parallel_read_safe": True}
