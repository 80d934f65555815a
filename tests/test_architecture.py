"""The picture of the rooms, and what an import of the package loads; see also `tests.lint`."""

import subprocess
import sys

from tests import rooms


def test_all_arrows_of_the_picture_point_down():
  graph = rooms.imports_between_rooms()
  assert set(graph) == set(rooms.PLAN)
  for upper, lowers in graph.items():
    for lower in lowers:
      assert rooms.box_of(upper).bottom < rooms.box_of(lower).top, f'{upper} imports {lower}'


def test_the_picture_leaves_out_only_imports_that_its_arrows_imply():
  graph = {'a': {'b', 'c', 'd'}, 'b': {'c'}, 'c': {'d'}, 'd': set()}
  assert rooms.arrows(graph) == [('a', 'b'), ('b', 'c'), ('c', 'd')]


def test_a_run_without_a_cluster_does_not_load_ray():
  script = ('import sys\nfrom podracer_jit.cli import train\n'
            'from podracer_jit import api\nfrom podracer_jit.training import crew, opening\n'
            'from podracer_jit import configs\nimport podracer_jit as pj\n'
            'config = pj.load_config("impala_catch")\n'
            'with crew.joined(config.to_dict()) as cluster: assert cluster is None\n'
            'assert "ray" not in sys.modules')
  subprocess.run([sys.executable, '-c', script], check=True)


def test_configs_and_parts_do_not_load_envpool():
  script = ('import sys\nfrom podracer_jit import losses\nfrom podracer_jit.configs import '
            'impala_atari\nimpala_atari.get_config()\nassert "envpool" not in sys.modules')
  subprocess.run([sys.executable, '-c', script], check=True)
