"""Settings of the site; `make docs` builds it.

The site shows the pages in their places in the repository (docs/, colabs/ and kernels/README.md),
so that the same links work on the site and in the repository. Notebooks are shown with their stored
outputs; docstrings are the API reference.
"""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.transforms.post_transforms import SphinxPostTransform

import rope_jax

project = "rope_jax"
author = "The rope_jax authors"
version = release = rope_jax.__version__

# Relative to the repository's root, which is the source folder.
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**.md", "colabs/*.ipynb", "kernels/README.md"]
exclude_patterns = [".*", "build", "runs", "tests"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

nb_execution_mode = "off"
smartquotes_action = "D"  # dashes only
myst_heading_anchors = 3

# Docstrings: one backquote is code, and signatures have one line for each argument.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_attr_annotations = False

html_theme = "furo"
html_title = f"rope_jax {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["html"]  # index.html of the site's root, which leads to docs/index.html
html_copy_source = False
html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True


class ArxivLinks(SphinxPostTransform):
    """Makes links of "arXiv 2403.13298" in the text of pages and docstrings."""

    default_priority = 200
    number = re.compile(r"(arXiv \d{4}\.\d{5})")

    def run(self, **kwargs: object) -> None:
        """Replaces these texts outside code and links."""
        del kwargs
        for text in list(self.document.findall(nodes.Text)):
            if isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.reference):
                continue
            parts = self.number.split(text)
            if len(parts) > 1:
                text.parent.replace(text, [self.part(part) for part in parts if part])

    def part(self, text: str) -> nodes.Node:
        """A link for the name of a paper, the text itself for any other."""
        if not self.number.fullmatch(text):
            return nodes.Text(text)
        address = f"https://arxiv.org/abs/{text.removeprefix('arXiv ')}"
        return nodes.reference(text, text, refuri=address, internal=False)


def setup(app: Sphinx) -> None:
    """Registers the links to papers, and the docstrings' own heading for attributes."""
    app.add_post_transform(ArxivLinks)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
