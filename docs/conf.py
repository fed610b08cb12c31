"""Sphinx configuration. Nothing is fetched: the build needs no network."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "celery-lease"
author = "celery-lease contributors"
copyright = author  # noqa: A001 - Sphinx's name for it
release = version_of("celery-lease")
version = ".".join(release.split(".")[:2])

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "lease_docs",
]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore = [
    # In signatures of testing helpers; nobody has to make one.
    ("py:class", "celery_lease.stamp.Stamp"),
    ("py:class", "celery_lease.stores.leases.SQLLeaseStore"),
]
nitpick_ignore_regex = [
    # Names of other projects and of the standard library: their inventories would have
    # to be fetched. Names of this package are all checked.
    (r"py:.*", r"(?!celery_lease\b).*"),
]

default_role = None
highlight_language = "none"
pygments_style = "default"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "celery-lease"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
