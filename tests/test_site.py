"""The site of docs/ builds without a warning, its links lead somewhere, nothing is remote."""

import html.parser
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from podracer_jit import metrics
from podracer_jit.experiment import schema
from podracer_jit.losses import ALGORITHMS
from podracer_jit.options import defaults
from tests import made
from tests.test_metrics import written

pytest.importorskip('furo')  # of the extra docs, which scripts/test installs
pytest.importorskip('myst_parser')

ROOT = Path(__file__).resolve().parents[1]


def build(builder, docs, out):
  """Builds a site as scripts/docs does; returns the finished process."""
  return subprocess.run(
      [sys.executable, '-m', 'sphinx', f'--builder={builder}', '--fail-on-warning', '--keep-going',
       '--nitpicky', '--quiet', f'--doctree-dir={out}/doctrees', docs, f'{out}/{builder}'],
      capture_output=True, text=True, timeout=300, check=False,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)})


def build_all(folder):
  for builder in ('html', 'doctest'):
    done = build(builder, ROOT / 'docs', folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  return made.once(tmp_path_factory, 'site', build_all)


class Page(html.parser.HTMLParser):
  """Collects what a page loads, where it links to, and the targets in it."""

  def __init__(self, path):
    super().__init__()
    self.loads, self.links, self.ids = [], [], set()
    self.feed(path.read_text())

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.ids |= {attrs[name] for name in ('id', 'name') if attrs.get(name)}
    if tag in ('script', 'img', 'source', 'iframe', 'video') and attrs.get('src'):
      self.loads.append(attrs['src'])
    elif tag == 'link' and attrs.get('rel') not in ('search', 'index', 'next', 'prev'):
      self.loads.append(attrs['href'])
    elif tag == 'a' and attrs.get('href'):
      self.links.append(attrs['href'])


@pytest.fixture(scope='module')
def pages(site):
  return {path: Page(path) for path in (site / 'html').rglob('*.html')
          if '_downloads' not in path.parts}


def is_remote(address):
  return re.match(r'([a-z]+:)?//', address) is not None


def test_the_pages_load_only_files_of_the_site(site, pages):
  assert len(pages) > 30
  for path, page in pages.items():
    for address in page.loads:
      assert not is_remote(address), f'{path}: {address}'
      if not address.startswith('data:'):
        assert (path.parent / urllib.parse.urlsplit(address).path).is_file(), f'{path}: {address}'
  for path in (site / 'html' / '_static').rglob('*.css'):
    for address in re.findall(r'(?:url\(|@import )["\']?([^"\')]+)', path.read_text()):
      assert not is_remote(address), f'{path}: {address}'


def test_links_between_pages_lead_to_a_page_and_a_place(pages):
  for path, page in pages.items():
    for address in page.links:
      target = urllib.parse.urlsplit(address)
      if target.scheme or not (target.path or target.fragment):
        continue
      file = (path.parent / urllib.parse.unquote(target.path)).resolve() if target.path else path
      assert file.is_file(), f'{path}: {address}'
      if target.fragment and file in pages:
        assert urllib.parse.unquote(target.fragment) in pages[file].ids, f'{path}: {address}'


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
  docs = tmp_path / 'docs'
  docs.mkdir()
  (docs / 'conf.py').write_text("extensions = ['myst_parser']\nhtml_theme = 'basic'\n")
  (docs / 'index.md').write_text('# Index\n\n[there](missing.md)\n')
  assert build('html', docs, tmp_path / 'out').returncode != 0


def test_the_examples_of_the_docstrings_ran(site):
  summary = (site / 'doctest' / 'output.txt').read_text()
  tests, failures = (int(re.search(rf'(\d+) {what}', summary)[1]) for what in (
      'tests?', 'failures? in tests'))
  assert tests >= 4 and failures == 0


def text_of(site, page):
  """Returns the text of a built page, without tags."""
  return re.sub(r'<[^>]+>', '', (site / 'html' / f'{page}.html').read_text())


def test_the_page_of_fields_has_all_of_them(site):
  text = text_of(site, 'fields')
  for section, part in schema.SECTIONS.items():
    for name in defaults(part):
      assert f'{section}.{name}\n' in text
  for section in ('network', 'optimizer'):
    for part in schema.CHOICES[section].shipped.values():
      assert all(f'{section}.{name}\n' in text for name in defaults(part))
  assert 'whole number from 1 to 10,000\n' in text  # num_epochs
  assert '0.0\nnumber from 0' in text  # optimizer.kl_target


PAGES_OF_ALGORITHMS = {name: f'algorithms/{dict(dqn="apex_dqn", dpg="apex_dpg").get(name, name)}'
                       for name in ALGORITHMS}


@pytest.mark.parametrize('name', ALGORITHMS)
def test_the_page_of_an_algorithm_has_its_options_and_what_it_writes(site, name):
  text = text_of(site, PAGES_OF_ALGORITHMS[name])
  assert all(f'loss.{option}\n' in text for option in defaults(ALGORITHMS[name]))
  terms = {metric for metric in metrics.UPDATES if f'\n{metric}\n' in text}
  common = {'grad_norm', 'param_norm'}
  assert terms == {metric for metric in written(name) if metrics.shown(metric).startswith(
      ('losses/', 'replay/importance_weight'))} - common
