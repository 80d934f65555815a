"""`scripts/lint` finds what it is for."""

import ast

import pytest

from tests import lint
from tests.rooms import TREES


@pytest.mark.parametrize('check, module, source, complaint', [
    (lint.imports, 'losses.new', 'from podracer_jit.experiment import build', 'of a tier above'),
    (lint.imports, 'actor.new', 'import podracer_jit.learner.new', 'in a cycle'),
    (lint.imports, 'losses.new', 'import time', 'losses.new (maths) imports time'),
    (lint.imports, 'losses.new', 'import envpool', 'only envs.envpool_envs may'),
    (lint.imports, 'training.new', 'import ray', 'only cluster may'),
    (lint.imports, 'play.new', 'from absl import flags', 'imports absl.flags; only '),
    (lint.imports, 'experiment.new', 'import ml_collections', 'ml_collections; only '),
    (lint.imports, 'runtime.new', 'import podracer_jit.numerics.islands',
     'knows nothing of reinforcement learning'),
    (lint.imports, 'new', '', 'in no tier'),
    (lint.names_of_algorithms, 'training.new', "if name == 'ppo': pass", 'the algorithm ppo'),
    (lint.words_of_rl, 'loops', 'def f(reward): pass', 'the word reward'),
    (lint.parameters, 'play.new', 'def f(self, a, b, c, d, e, g): pass', 'f takes 6 parameters'),
    (lint.fields_of_configs, 'schemes.new', "config['seed']", "config['seed']")])
def test_a_planted_fault_is_found(monkeypatch, check, module, source, complaint):
  monkeypatch.setitem(TREES, 'learner.new', ast.parse('import podracer_jit.actor.new'))
  monkeypatch.setitem(TREES, 'actor.new', ast.parse(''))
  assert not [*check(TREES)]
  monkeypatch.setitem(TREES, module, ast.parse(source))
  assert any(complaint in line for line in check(TREES))


@pytest.mark.parametrize('check, text, complaint', [
    (lint.links, '[a](missing.md)', 'no file missing.md'),
    (lint.links, '# One\n[a](#two)', 'no heading #two'),
    (lint.merges, 'one\n<<<<<<< HEAD\n', 'page.md:2: a merge is not finished'),
    (lint.merges, '>>>>>>> other', 'page.md:1: a merge is not finished'),
    (lint.names, 'see podracer_jit/losses/missing.py', 'no file podracer_jit/losses/missing.py'),
    (lint.names, 'train --config=ppo_missing', 'no config ppo_missing'),
    (lint.names, '--config=examples/missing.py', 'no config examples/missing.py'),
    (lint.names, '`podracer_jit missing`', 'no verb missing'),
    (lint.names, 'python -m benchmarks.missing', 'no module benchmarks.missing'),
    (lint.names, '--config.loss.missing=1', 'no field loss.missing'),
    (lint.names, '```sh\nscripts/missing\n```', 'scripts/missing cannot be executed')])
def test_a_text_that_names_what_does_not_exist_is_found(tmp_path, check, text, complaint):
  path = tmp_path / 'page.md'
  path.write_text(text)
  assert any(complaint in line for line in check(path))
