"""Sphinx's configuration: `make docs` builds the site."""

import re

import revdeq

project, version, copyright = "revdeq", revdeq.__version__, "2026, the revdeq maintainers"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"]
html_theme, html_title = "furo", f"revdeq {version}"
myst_enable_extensions, myst_heading_anchors = ["attrs_inline"], 3
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable/", (None, "torch.inv"))}
autodoc_member_order, autodoc_typehints, default_role = "bysource", "none", "code"
smartquotes = False  # options are strings

PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="(.+?)">\s*<img alt="(.+?)" src="(.+?)">\s*</picture>')


def pictures(app, page, source):
    """GitHub chooses between a light and a dark picture by HTML; furo, which has a switch for readers, by classes."""
    source[0] = PICTURE.sub(r"![\2](\3){.only-light}\n![\2](\1){.only-dark}", source[0])


def plain_text(app, what, name, thing, options, lines):
    """Docstrings have `code` and plain text, in which *, | and _ mean themselves."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[i] = re.sub(r"(`[^`]*`)|[*|]|_\b", lambda found: found[1] or "\\" + found[0], line)


def setup(app):
    app.connect("source-read", pictures)
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # before napoleon
