"""The errors of the package, and what the package leaves alone in a program that uses it."""

import inspect
import json
import os
import subprocess
import sys

import pytest

import podracer_jit as pj
from podracer_jit import errors
from tests.rooms import ROOT

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)
         if kind.__module__ == errors.__name__]


@pytest.mark.parametrize('kind', KINDS)
def test_each_error_is_refused_or_failed(kind):
  assert issubclass(kind, errors.PodracerError)
  if kind is errors.Stopped:
    assert [kind(is_saved).code for is_saved in (True, False)] == [
        errors.STOPPED, errors.INTERRUPTED] == [3, 130]
  elif issubclass(kind, errors.Refused):
    assert issubclass(kind, ValueError) and kind.code == errors.REFUSED == 2
  else:
    assert not issubclass(kind, ValueError) and kind.code == errors.FAILED == 1
    assert kind is errors.PodracerError or issubclass(kind, RuntimeError)


def test_errors_have_the_text_that_they_are_made_with():
  assert str(errors.NotSaved('disk full')) == 'disk full'
  assert isinstance(errors.NotSaved('disk full'), OSError)
  assert str(errors.Broken(3, 'no file')) == 'the checkpoint of update 3 is broken: no file'


@pytest.mark.parametrize('error, line', [
    (errors.Refused('seed: is 3'), 'seed: is 3'), (errors.NotSaved('disk full'), 'disk full'),
    (errors.Diverged('update 3'), 'Diverged: update 3'), (KeyError('a'), "KeyError: 'a'"),
    (TimeoutError(), 'TimeoutError'), (errors.WorkerLost('actor 1 died'), 'actor 1 died'),
    (RuntimeError('INTERNAL:\nEnvironmentFailed: it broke\nat the end'), 'it broke')])
def test_the_line_of_an_error_has_its_name_unless_the_text_is_enough(error, line):
  assert errors.line_of(error) == line


def test_a_door_turns_value_errors_alone_into_refusals():
  with pytest.raises(errors.Refused, match='^wrong$') as refused, errors.refusing():
    raise ValueError('wrong')
  assert str(refused.traceback[-1].statement).strip() == "raise ValueError('wrong')"
  with pytest.raises(errors.Refused, match='^KeyError$'), errors.refusing(KeyError):
    raise KeyError
  in_use = errors.InUse('in use')
  with pytest.raises(errors.InUse) as raised, errors.refusing():
    raise in_use
  assert raised.value is in_use
  with pytest.raises(OSError, match='disk'), errors.refusing():
    raise OSError('disk')


@pytest.mark.parametrize('call', [
    lambda: pj.load_config('nothing'), lambda: pj.load('nowhere'),
    lambda: pj.choose(pj.load_config('ppo_cartpole'), 'torso', 'mlp'),
    lambda: pj.train('nothing', 'no'), lambda: pj.train('nothing', 'no', num_seeds=2),
    lambda: pj.train(pj.load_config('ppo_cartpole'), 'no', callbacks=[5]),
    lambda: pj.train(pj.load_config('ppo_cartpole'), 'no', init_partly=True),
    lambda: pj.prepare({'placement': {'xla_threads': 0}})])
def test_functions_refuse_wrong_arguments(call, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(pj.errors.Refused) as refused:
    call()
  assert '\n' not in str(refused.value) and not list(tmp_path.iterdir())
  # What a notebook shows.
  assert refused.value._render_traceback_() == [f'Refused: {refused.value}']


def test_a_notebook_shows_where_a_callback_has_failed():
  def callback():
    return 1 / 0

  with pytest.raises(errors.CallbackFailed) as failed:
    try:
      callback()
    except ZeroDivisionError as error:
      raise errors.CallbackFailed('callback f') from error
  failed.value.add_note('the last good checkpoint is none')
  lines = failed.value._render_traceback_()
  assert '    return 1 / 0' in lines and 'ZeroDivisionError: division by zero' in lines
  assert lines[-2:] == ['CallbackFailed: callback f', 'the last good checkpoint is none']


IMPORTS = '''
import importlib, importlib.util, json, logging, os, pathlib, signal, sys, threading, warnings
import podracer_jit

def state():
  loggers = {name: logger for name, logger in logging.root.manager.loggerDict.items()
             if isinstance(logger, logging.Logger)}
  return {
      'environment': dict(os.environ), 'warnings': list(map(repr, warnings.filters)),
      'path': list(sys.path), 'finders': list(map(repr, sys.meta_path)),
      'hooks': [repr(sys.excepthook), repr(threading.excepthook)],
      'signals': {str(number): repr(signal.getsignal(number)) for number in signal.Signals},
      'loggers': {name: [logger.level, logger.propagate, logger.disabled,
                         *map(repr, [*logger.handlers, *logger.filters])]
                  for name, logger in [('', logging.root), *loggers.items()]}}

def import_all():
  for name in NAMES:
    importlib.import_module(name)

FOLDER = pathlib.Path(podracer_jit.__file__).parent
NAMES = sorted('.'.join(path.relative_to(FOLDER.parent).with_suffix('').parts)
               for path in FOLDER.rglob('*.py') if not path.stem.startswith('__'))
for extra, modules in (('ray', ['cluster']), ('gymnax', ['gymnax']),
                       ('mujoco_playground', ['playground'])):
  if importlib.util.find_spec(extra) is None:
    NAMES = [name for name in NAMES if not any(module in name for module in modules)]
environment = dict(os.environ)
import_all()
# The modules of other packages have changed what they change. Now our own are imported again, and
# find the environment as it was.
for name in [name for name in sys.modules if name.partition('.')[0] == 'podracer_jit']:
  del sys.modules[name]
os.environ.clear()
os.environ.update(environment)
before = state()
import_all()
after = state()
changes = {}
for part in before:
  if isinstance(before[part], dict):
    changes[part] = [name for name in before[part].keys() | after[part].keys()
                     if before[part].get(name, [0, True, False]) != after[part].get(
                         name, [0, True, False])]
  elif before[part] != after[part]:
    changes[part] = [after[part]]
print(json.dumps({part: change for part, change in changes.items() if change}))
'''


def test_an_import_changes_no_global_state():
  # Not what modules may have set in this process.
  env = {name: os.environ[name] for name in ('HOME', 'PATH')}
  done = subprocess.run([sys.executable, '-c', IMPORTS], capture_output=True, text=True, env=env,
                        cwd=ROOT, timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1]) == {}
