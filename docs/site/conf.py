"""How Sphinx makes the site from docs/. `make docs` builds it; docs/architecture.md says why it is made so."""

import functools
import gc
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]  # the API of this clone, whatever is installed

from sphinx.errors import PycodeError  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402
from sphinx.search.en import SearchEnglish  # noqa: E402

from stepscope import __version__  # noqa: E402

gc.set_threshold(200_000, 10, 50)  # a page is thousands of nodes: to look through them again and again is a tenth

project = "stepscope"
version = release = __version__
html_title = "stepscope"
html_domain_indices = False
html_show_copyright = html_show_sphinx = html_copy_source = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "parts.access",
    "parts.blocks",
    "parts.docstrings",
    "parts.gallery",
    "parts.links",
    "parts.navigation",
]
exclude_patterns = ["site/static"]

# The anchors that a code host gives to headings: links hold here as they hold there.
myst_heading_anchors = 6
myst_links_external_new_tab = True

autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # for the callbacks: imported, they take seconds
for name in (*autodoc_mock_imports, "accelerate.tracking", "lightning.pytorch"):
    # Else autodoc imports them after all, for the source of a callback's base.
    ModuleAnalyzer.cache["module", name] = PycodeError(f"{name} is mocked")
autodoc_default_options = {"undoc-members": True, "exclude-members": "__init__"}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 90
add_module_names = False
# Each page asks for the stems of its words anew, which are those of other pages.
SearchEnglish.stem = functools.cache(SearchEnglish.stem)
toc_object_entries = False  # copied for the navigation of every page, they take a fifth of the build

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("from-disk.js", {"priority": 900})]
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
highlight_language = "text"
