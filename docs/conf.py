"""Settings of Sphinx for these pages; `scripts/docs` builds them into docs/_build/html."""

import configparser
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The package as it is in this checkout, its examples, and the extension beside this file.
sys.path[:0] = [str(ROOT), str(ROOT / 'examples'), str(ROOT / 'docs')]
_setup = configparser.ConfigParser(interpolation=None)
_setup.read(ROOT / 'setup.cfg')

project = _setup['metadata']['name']
author = _setup['metadata']['author']
project_copyright = author
version = release = _setup['metadata']['version']

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.doctest', 'sphinx.ext.napoleon',
              'from_code']
exclude_patterns = ['_build']
smartquotes = False  # --config must not become a dash
# Single backticks are code in our docstrings, as in Markdown.
default_role = 'literal'
nitpicky = True
# Other packages' pages are elsewhere: without a network, their names lead nowhere.
nitpick_ignore_regex = [('py:.*', r'(?!podracer_jit).*')]

myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 4

autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # the docstrings have them
napoleon_numpy_docstring = False
doctest_global_setup = 'import podracer_jit as pj'

html_theme = 'furo'
html_title = f'{project} {version}'
html_static_path = ['_static']
html_css_files = ['pages.css']
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_math_renderer = 'mathml'
