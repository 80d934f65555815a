"""Copies of users' modules: which files count, when they are kept, and notes about changes."""

import importlib
import json
import pickle
import subprocess
import sys

import pytest

from podracer_jit import parts
from podracer_jit.play import agent as agent_lib
from podracer_jit.workdir import sources
from tests.play.test_agent import OWN_ENVS, untrained


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Makes a folder on PYTHONPATH with modules of a user."""
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(parts, '_contents', {})
  texts = {
      'own_part.py': 'import json\nimport own_helper, own_pkg.deep\nfrom own_pkg import near\n'
                     'from podracer_jit import options\nX = 1\n',
      'own_helper.py': 'def late():\n  import own_late\n',
      'own_late.py': 'import own_part\n',
      'own_unused.py': '',
      'own_pkg/__init__.py': 'from . import near\n',
      'own_pkg/near.py': 'Z = 2\n',
      'own_pkg/deep.py': 'from .sub.leaf import W\nY = W\n',
      'own_pkg/sub/leaf.py': 'W = 3\n',
      'json.py': 'raise RuntimeError("another json")\n',
      'podracer_jit/options.py': '',
  }
  for name, text in texts.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  importlib.invalidate_caches()
  yield tmp_path
  for name in list(sys.modules):
    if name.startswith('own_'):
      del sys.modules[name]


@pytest.mark.quick
def test_a_module_has_the_files_beside_it_that_it_imports(folder):
  assert parts.find('x', 'own_part:X', {}) == 1
  files = parts.sources_of('own_part')
  assert set(files) == {'own_part.py', 'own_helper.py', 'own_late.py', 'own_pkg/__init__.py',
                        'own_pkg/near.py', 'own_pkg/deep.py', 'own_pkg/sub/leaf.py'}
  # The files are those that were imported; later edits do not count.
  (folder / 'own_helper.py').write_text('changed')
  assert parts.sources_of('own_part')['own_helper.py'].startswith(b'def late')
  # A module that was not imported is read without running it.
  (folder / 'own_bad.py').write_text('raise RuntimeError\n')
  assert parts.sources_of('own_bad') == {'own_bad.py': b'raise RuntimeError\n'}
  assert parts.sources_of('own_pkg.deep').keys() == {
      'own_pkg/__init__.py', 'own_pkg/near.py', 'own_pkg/deep.py', 'own_pkg/sub/leaf.py'}
  assert parts.sources_of('math') == parts.sources_of('nowhere') == {}


def test_only_its_own_modules_count_for_an_installed_package(folder, monkeypatch):
  installed = folder / 'site-packages'
  (installed / 'own_installed').mkdir(parents=True)
  (installed / 'own_installed' / '__init__.py').write_text('from own_installed import a\n')
  (installed / 'own_installed' / 'a.py').write_text('import own_other\n')
  (installed / 'own_other.py').write_text('')
  monkeypatch.syspath_prepend(installed)
  importlib.invalidate_caches()
  assert parts.sources_of('own_installed').keys() == {
      'own_installed/__init__.py', 'own_installed/a.py'}


WORKER = """
import importlib.resources, pickle, pkgutil, sys
from podracer_jit import parts
sys.path.append(sys.argv[2])
parts.set_search(pickle.loads(bytes.fromhex(sys.argv[1])))
import own_pkg.deep, own_part
print(own_pkg.deep.Y, own_part.X, own_pkg.__spec__.submodule_search_locations is not None)
print(importlib.resources.files('own_pkg').joinpath('data.txt').read_text(),
      pkgutil.get_data('own_pkg', 'data.txt').decode())
"""


def in_worker(where, path):
  """Returns what a worker prints that has imported the user's modules."""
  done = subprocess.run([sys.executable, '-P', '-c', WORKER, pickle.dumps(where).hex(), str(path)],
                        capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


def test_a_worker_imports_modules_as_the_run_has_imported_them(folder, tmp_path_factory):
  (folder / 'own_pkg' / 'data.txt').write_text('data')
  parts.find('x', 'own_part:X', {})
  where = parts.search()
  for name, text in (('own_part.py', 'X = "edited"'), ('own_pkg/sub/leaf.py', 'W = "edited"')):
    (folder / name).write_text(text)
  linked = tmp_path_factory.mktemp('link') / 'folder'
  linked.symlink_to(folder)
  for path in (folder, linked):
    assert in_worker(where, path) == ['3 1 True', 'data data']


def test_a_reload_and_a_file_that_only_workers_import_are_read_again(folder):
  parts.find('x', 'own_part:X', {})
  path = folder / 'own_part.py'
  path.write_text('import own_late\nX = 5\n')
  (folder / 'own_late.py').write_text('LATE = 1\n')
  assert parts.sources_of('own_part')['own_part.py'].startswith(b'import json')
  assert parts.sources_of('own_part')['own_late.py'] == b'LATE = 1\n'  # not imported here
  importlib.reload(sys.modules['own_part'])
  assert parts.sources_of('own_part')['own_part.py'].endswith(b'X = 5\n')


def entries(workdir):
  return [(entry.first_update, sorted(entry.files)) for entry in sources.read(workdir)]


def test_changed_sources_are_kept_with_their_first_update(tmp_path):
  before = {'m.py': b'1', 'n/m.py': b'1'}
  after = {'m.py': b'2', 'n/m.py': b'1'}
  assert sources.keep(tmp_path, {}, 1) == [] and not (tmp_path / 'sources').exists()
  assert sources.keep(tmp_path, before, 1) == [] == sources.keep(tmp_path, before, 1)
  assert sources.keep(tmp_path, before, 9) == []
  (line,) = sources.keep(tmp_path, after, 9)
  assert line.startswith('the source of m.py has changed since update 8: the run goes on')
  assert (tmp_path / 'sources' / '9' / 'm.py').read_bytes() == b'2'
  assert (tmp_path / 'sources' / '1' / 'm.py').read_bytes() == b'1'
  assert entries(tmp_path) == [(1, ['m.py', 'n/m.py']), (9, ['m.py', 'n/m.py'])]
  # Without a checkpoint after update 8 the note is repeated.
  assert sources.keep(tmp_path, after, 9) == [line]
  assert sources.keep(tmp_path, after, 12) == []
  # The updates were lost and get other source, so the earlier copy is set aside.
  sources.keep(tmp_path, {'m.py': b'3'}, 9)
  assert (tmp_path / 'broken' / '9' / 'm.py').read_bytes() == b'2'
  assert entries(tmp_path) == [(1, ['m.py', 'n/m.py']), (9, ['m.py'])]
  assert sources.keep(tmp_path, before, 9) == [] and entries(tmp_path) == [(1, ['m.py', 'n/m.py'])]
  # Before update 1 no update used another source.
  assert sources.keep(tmp_path, after, 1) == [] and len(entries(tmp_path)) == 1
  assert sources.copy_of(tmp_path, 'n.m') == str(tmp_path / 'sources' / '1' / 'n' / 'm.py')
  assert sources.copy_of(tmp_path, 'nothing') == ''


def test_another_source_than_that_of_an_update_is_reported(tmp_path):
  assert sources.change_since(tmp_path, {'m.py': b'1'}, 3) == ''  # no copies are kept
  before, after = {'m.py': b'1', 'n/m.py': b'1'}, {'m.py': b'2', 'n/m.py': b'1'}
  sources.keep(tmp_path, before, 1)
  sources.keep(tmp_path, after, 9)
  for update in (0, 1, 8):
    assert sources.change_since(tmp_path, before, update) == ''
    line = sources.change_since(tmp_path, after, update)
    assert line.startswith(f'the source of m.py is not that of update {update}: results may differ')
    assert line.endswith(str(tmp_path / 'sources' / '1'))
  assert sources.change_since(tmp_path, after, 9) == ''
  assert sources.change_since(tmp_path, before, 9).endswith(str(tmp_path / 'sources' / '9'))


@pytest.mark.parametrize('text', ['{', '[1]', '[{"first_update": "x", "files": {}}]',
                                  '[{"first_update": 1, "files": 3}]'])
def test_a_garbled_index_is_set_aside(text, tmp_path):
  sources.keep(tmp_path, {'m.py': b'1'}, 1)
  (tmp_path / 'sources' / 'index.json').write_text(text)
  with pytest.raises(ValueError, match='index.json is garbled'):
    sources.read(tmp_path)
  assert sources.change_since(tmp_path, {'m.py': b'1'}, 1).endswith('index.json is garbled')
  (line,) = sources.keep(tmp_path, {'m.py': b'1'}, 4)
  assert 'is garbled; sources is now' in line and '\n' not in line
  assert (tmp_path / 'broken' / 'sources' / '1' / 'm.py').exists()
  assert entries(tmp_path) == [(4, ['m.py'])]


def test_differences_of_the_sources_of_two_runs_are_reported(tmp_path):
  of_one = tmp_path / 'one'
  of_two = tmp_path / 'two'
  sources.keep(of_one, {'m.py': b'1', 'n.py': b'1'}, 1)
  sources.keep(of_two, {'m.py': b'1', 'n.py': b'2'}, 1)
  assert sources.differences(sources.read(of_one), sources.read(of_one)) == []
  sources.keep(of_two, {'m.py': b'3', 'n.py': b'2', 'evil\x1b.py': b''}, 5)
  assert sources.differences(sources.read(of_one), sources.read(of_two)) == [
      'source: n.py differs in A and B, from the first update on',
      r'source: evil\x1b.py, m.py of B changed before update 5']


def test_a_saved_agent_keeps_the_source_of_its_task(tmp_path):
  untrained(OWN_ENVS['Sizes']).save(tmp_path / 'agent')
  copy = tmp_path / 'agent' / 'sources' / '1' / 'tests' / 'play' / 'test_agent.py'
  assert 'class Sizes(' in copy.read_text()
  files = json.loads((tmp_path / 'agent' / 'manifest.json').read_text())['files']
  assert 'sources/1/tests/runs.py' in files  # which that file imports
  assert not any('podracer_jit' in name for name in files)
  copy.write_text('')
  with pytest.raises(ValueError, match='sources/1/tests/play/test_agent.py has 0 bytes'):
    agent_lib.load_saved(tmp_path / 'agent', allow_modules=['tests.play.test_agent'])
