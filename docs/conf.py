"""Settings of the site; `make docs` builds it.

The pages are those of the repository, where they lie: docs/, colabs/ and kernels/README.md, so that
the same links lead through the site and through the repository. Notebooks are shown with their
stored outputs; docstrings are the API reference.
"""

import rope_jax

project = "rope_jax"
author = "The rope_jax authors"
version = release = rope_jax.__version__

# Of the repository's root, which is the source folder.
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**.md", "colabs/*.ipynb", "kernels/README.md"]
exclude_patterns = [".*", "build", "runs", "tests"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

nb_execution_mode = "off"
smartquotes = False
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
html_extra_path = ["html"]  # index.html of the site's root, which leads to docs/index.html
html_copy_source = False
html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
