"""What the README says about the code is true."""

import re

from conftest import ROOT, get_config

from lingrok import run
from lingrok.config import from_config_dict

README = (ROOT / 'README.md').read_text()


def test_the_look_into_a_run_works(tmp_path):
    finished = run.execute(from_config_dict(get_config('recall.py:smoke')), tmp_path / 'run')
    section = README.split('## Look into a run')[1].split('\n## ')[0]
    code = '\n'.join(line[4:] for line in section.splitlines() if line.startswith('    '))
    code = code.replace("'runs/recall_demo-ID'", repr(str(finished.path)))
    code = code.replace('step=106, replica=2', f'step={finished.steps[-2]}, replica=1')
    found = {}
    exec(code, found)
    assert found['logits'].shape == (8, 16, 62)
    assert set(found['acts']) == {'blocks.0.attn.pattern', 'blocks.1.attn.pattern'}
    assert found['series'].values.shape == (3, 2)
    assert (found['edited']['blocks_1']['mlp_in'] != found['params']['blocks_1']['mlp_in']).any()


def test_files_and_configs_it_names_exist():
    for path in re.findall(r'`?((?:lingrok|experiments|configs|tests|docs)/[\w/]+\.(?:py|md|png))', README):
        assert (ROOT / path).exists(), path
    for file, variant in re.findall(r'configs/(\w+\.py):(\w+)', README):
        from_config_dict(get_config(f'{file}:{variant}'))


def test_it_is_short():
    assert len(README.splitlines()) < 150
