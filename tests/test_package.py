"""Wheel and sdist without the repository, the lock files, and the versions that were tried."""

import configparser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from podracer_jit.cli import main
from podracer_jit.runtime import tried
from tests import made

ROOT = pathlib.Path(__file__).resolve().parents[1]


def _run(*command, cwd, **kwargs):
  env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
  env |= {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
  # Users do not have the settings of the tests, such as eight CPU devices.
  env.pop("XLA_FLAGS", None)
  done = subprocess.run(
    [str(c) for c in command],
    cwd=cwd,
    env=env,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    **kwargs,
  )
  assert done.returncode == 0, f"{command} failed:\n{done.stdout[-8000:]}"
  return done.stdout


def test_the_citation_is_of_this_version():
  parser = configparser.ConfigParser()
  parser.read(ROOT / "setup.cfg")
  citation = (ROOT / "CITATION.cff").read_text()
  assert f'version: {parser["metadata"]["version"]}\n' in citation
  assert f'license: {parser["metadata"]["license"]}\n' in citation


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  (built,) = made.once(tmp_path_factory, "wheel", _build).glob("podracer_jit-*.whl")
  return built


def _build(tmp):
  # Build from a copy: setuptools builds in the source tree, and would add leftovers of earlier
  # builds to the wheel.
  source = tmp / "source"
  ignore = shutil.ignore_patterns("__pycache__")
  shutil.copytree(ROOT / "podracer_jit", source / "podracer_jit", ignore=ignore)
  for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  make_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp)!r})"
  _run(sys.executable, "-c", make_sdist, cwd=source)
  _make_wheel(source, tmp)


def _make_wheel(source, folder):
  options = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
  _run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
  """Returns the bin/ of a virtual environment with the wheel and nothing of the repository.

  It uses the third-party packages of the running tests, because installing them again would take
  minutes and gigabytes.
  """
  home = tmp_path_factory.mktemp("installed") / "venv"
  venv.create(home, with_pip=False, symlinks=True)
  python = home / "bin" / "python"
  options = ("--no-deps", "--no-index")
  pip = (sys.executable, "-m", "pip", "--python", python)
  _run(*pip, "install", *options, wheel, cwd=home)
  # Directories in a .pth file come after the environment's own, and Python does not read .pth files
  # inside them. An editable podracer_jit among the third-party packages therefore stays hidden.
  (site,) = home.glob("lib/python*/site-packages")
  third_party = [p for p in sys.path if pathlib.Path(p).name in ("site-packages", "dist-packages")]
  (site / "third_party.pth").write_text("".join(f"{p}\n" for p in third_party))
  return home / "bin"


def test_wheel_has_every_module_and_data_file(wheel):
  package = ROOT / "podracer_jit"
  data = [*package.glob("data/*.csv"), *package.glob("report/*.html"), package / "py.typed"]
  expected = [*package.rglob("*.py"), *data]
  missing = {str(p.relative_to(ROOT)) for p in expected} - set(zipfile.ZipFile(wheel).namelist())
  assert not missing


def test_the_sdist_makes_the_same_wheel(wheel, tmp_path):
  (sdist,) = wheel.parent.glob("podracer_jit-*.tar.gz")
  _make_wheel(sdist, tmp_path)
  (again,) = tmp_path.glob("podracer_jit-*.whl")

  def contents(path):
    return {info.filename: info.CRC for info in zipfile.ZipFile(path).infolist()}

  assert contents(again) == contents(wheel)


@pytest.mark.full
def test_all_verbs_of_the_wheel_work_away_from_the_repository(installed, tmp_path):
  where = "import podracer_jit; print(podracer_jit.__file__)"
  imported = _run(installed / "python", "-c", where, cwd=tmp_path).strip().splitlines()[-1]
  home = installed.parent.resolve()
  assert pathlib.Path(imported).resolve().is_relative_to(home)

  workdir = tmp_path / "run"
  args = ("--config=configs/impala_catch.py:smoke", f"--workdir={workdir}")
  _run(installed / "podracer_jit", *args, cwd=tmp_path, timeout=600)
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  assert lines
  assert all(isinstance(json.loads(line), dict) for line in lines)

  # The other verbs do not need the repository either.
  config = "--config=impala_catch:smoke"
  outputs = {
    "evaluate --workdir=run --num_episodes=2": "2 episodes",
    "export --workdir=run --out=exported": "exported",
    "compare run run": "identical: ",
    "report run --out=report": "report",
    "rerun --workdir=run --update=2": "update_2.npz",
    f"sweep {config} --seeds=3:3 --out=sweep": "sweep",
    f"launch -n 1 -- {config} --workdir=launched": "finished at update",
    f"train {config} --workdir=trained": "finished at update",
    "configs": "impala_catch",
    "envs catch": "Catch-v0",
    "metrics sps": "charts/SPS",
  }
  assert {command.split()[0] for command in outputs} == set(main.VERBS)
  for command, output in outputs.items():
    printed = _run(installed / "podracer_jit", *command.split(), cwd=tmp_path, timeout=600)
    assert output in printed, (command, printed)


RIGHT = """
from collections.abc import Mapping
import podracer_jit as pj

def stop(record: Mapping[str, float]) -> object:
  return pj.STOP

config = pj.load_config('ppo_cartpole')
run = pj.train(config, 'runs/x', callbacks=[stop])
if isinstance(run, pj.Trained):
  mean: float = pj.evaluate(run.agent, num_episodes=20).statistics['mean']
  run.agent.save('runs/agent')
try:
  agent = pj.load('runs/agent')
except pj.errors.Refused as error:
  print(error.code + 1)
"""


def test_a_type_checker_knows_the_python_api(tmp_path):
  """Types are found through `py.typed` and the names that `__init__` loads later."""
  pytest.importorskip("mypy")

  def complaints(program):
    (tmp_path / "program.py").write_text(program)
    options = ("--follow-imports=silent", "--no-error-summary", "--ignore-missing-imports")
    return subprocess.run(
      [sys.executable, "-m", "mypy", "--config-file=", *options, "program.py"],
      cwd=tmp_path,
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
      env=os.environ | {"MYPYPATH": str(ROOT)},
    ).stdout.splitlines()

  assert complaints(RIGHT) == []
  wrong = "pj.evaluate('agent')\npj.load(3.5)\npj.missing\nrun.agent.act()\n"
  lines = complaints("import podracer_jit as pj\nrun = pj.Trained()\n" + wrong)
  assert [int(line.split(":")[1]) for line in lines] == [2, 3, 4, 5, 6], lines


def _requirements(lines):
  lines = (line.partition("#")[0].strip() for line in lines.splitlines())
  return [Requirement(line) for line in lines if line]


def _required(*extras):
  setup = configparser.ConfigParser(interpolation=None)
  setup.read(ROOT / "setup.cfg")
  texts = [setup["options"]["install_requires"]]
  texts += [setup["options.extras_require"][extra] for extra in extras]
  return [requirement for text in texts for requirement in _requirements(text)]


@pytest.mark.parametrize("python", tried.JAX)
def test_the_lock_of_each_python_satisfies_setup_cfg(python):
  requirements = _required("test", "docs", "cuda", "tpu")
  assert requirements

  environment = {"python_version": python, "python_full_version": f"{python}.0"}
  locked = _requirements((ROOT / f"requirements-{python}.lock").read_text())
  pins = {}
  for line in locked:
    (pin,) = line.specifier
    assert pin.operator == "==" and "*" not in pin.version, f"{line} is not a pin"
    if line.marker is None or line.marker.evaluate(environment):
      assert pins.setdefault(canonicalize_name(line.name), pin.version) == pin.version, line
  for requirement in requirements:
    version = pins.get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement} is not in the lock"
    assert requirement.specifier.contains(version, prereleases=True), (requirement, version)
  assert pins["jax"] == tried.JAX[python][0]
  assert tried.untried(pins) == ""


def test_locks_are_of_the_pythons_that_the_package_allows():
  assert sorted(path.name for path in ROOT.glob("requirements*")) == [
    f"requirements-{python}.lock" for python in sorted(tried.JAX)
  ]
  setup = (ROOT / "setup.cfg").read_text()
  (allowed,) = re.findall(r"^python_requires = (.*)$", setup, re.MULTILINE)
  pythons = [f"3.{minor}" for minor in range(30) if SpecifierSet(allowed).contains(f"3.{minor}.5")]
  assert pythons == sorted(tried.JAX)


@pytest.mark.parametrize("name", tried.TRIED)
def test_bounds_begin_after_the_newest_version_that_was_tried(name):
  """The next minor version may have changed the private parts that the package uses."""
  for requirement in _required("ray", "test", "cuda", "tpu"):
    if requirement.name == name:
      for version in tried.TRIED[name]:
        assert requirement.specifier.contains(version), (requirement, version)
      major, minor, *_ = tried.order(tried.TRIED[name][1])
      assert not requirement.specifier.contains(f"{major}.{minor + 1}.0"), requirement


def test_untried_versions_are_named():
  newest = {name: high for name, (_, high) in tried.TRIED.items()}
  assert tried.untried(newest | {"numpy": "99"}) == ""
  low, high = tried.TRIED["jax"]
  assert tried.untried(newest | {"jax": "0.99.1rc2", "ray": "1.2"}) == (
    f"untried versions: jax 0.99.1rc2 (tried: {low} to {high}), ray 1.2 (tried: 2.60.0)"
  )
  assert tried.untried({"jax": "0.9.2"}).startswith("untried versions: jax 0.9.2 (")
  assert tried.order("0.12.0.1") > tried.order("0.12.0") > tried.order("0.9.10")
