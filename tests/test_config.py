import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, get_config
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import lingrok.tasks  # noqa: F401  registers the tasks
from lingrok import analysis, config, train
from lingrok.config import ConfigError
from lingrok.tasks import bigrams


def variants():
    """'recall.py:smoke' and so on: every variant of every file in configs/."""
    import importlib.util

    for path in sorted((ROOT / 'configs').glob('*.py')):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield from (f'{path.name}:{variant}' for variant in module.VARIANTS)


def build(changes=None) -> config.Config:
    """The config of recall.py:smoke with 'section.key' changed."""
    tree = get_config('recall.py:smoke').to_dict()
    for place, value in (changes or {}).items():
        *sections, last = place.split('.')
        node = tree
        for section in sections:
            node = node[section]
        node[last] = value
    return config.from_dict(tree)


@pytest.mark.parametrize('name', list(variants()))
def test_round_trip_of_every_variant(name):
    tree = get_config(name)
    cfg = config.from_config_dict(tree)
    stored = config.to_dict(cfg)
    again = config.from_dict(json.loads(json.dumps(stored)))
    assert again == cfg
    assert config.to_dict(again) == stored
    assert config.run_id(again) == config.run_id(cfg)
    # What the file says is what the config holds.
    for section in ('task', 'optim', 'train', 'eval', 'seed'):
        for key, value in tree[section].to_dict().items():
            held = cfg.task.NAME if (section, key) == ('task', 'name') else getattr(getattr(cfg, section), key)
            named = value == 'plays' and Path(held).name.startswith('plays-')  # the corpus becomes a file
            assert held == value or named, (section, key)
    assert tree.is_locked


def test_defaults_hold_every_key_and_are_valid():
    tree = config.defaults('recall')
    cfg = config.from_config_dict(tree)
    assert cfg.num_replicas == 1 and cfg.name == 'recall'
    assert set(tree.to_dict()) | {'format_version'} == set(config.to_dict(cfg))
    for section, cls in {**config.SECTIONS, 'task': config.TASKS['recall']}.items():
        fields = {field.name for field in dataclasses.fields(cls)}
        assert set(tree[section]) - {'name'} == fields
        assert all(field.metadata['doc'] for field in dataclasses.fields(cls))
    with pytest.raises(AttributeError):
        tree.model.num_layer = 3


def test_absent_keys_take_their_defaults():
    assert config.from_dict({'name': 'recall', 'task': {'name': 'recall'}}) == config.from_config_dict(
        config.defaults('recall'))


def test_derived_model_keys():
    cfg = build({'model.mlp_kind': ('mlp',), 'model.num_heads': 2, 'task.noise_token': 'extra'})
    assert cfg.model.mlp_kind == ('mlp', 'mlp') and cfg.model.d_head == 8 and cfg.model.num_kv_heads == 2
    assert cfg.model.vocab_size == cfg.task.vocab_size == cfg.task.table_vocab + 1
    assert cfg.model.max_len == cfg.task.seq_len == 16
    larger = build({'model.vocab_size': 100, 'model.max_len': 17}).model
    assert (larger.vocab_size, larger.max_len) == (100, 17)


# Each: changes, what the message must name as found, what as allowed, and what to try (or None).
ERRORS = {
    'unknown key': ({'model.num_layer': 3}, "'num_layer'", 'num_layers', "did you mean 'num_layers'?"),
    'unknown section': ({'modle': {}}, "'modle'", 'task, model', "did you mean 'model'?"),
    'unknown task': ({'task.name': 'recal'}, "'recal'", 'recall', "did you mean 'recall'?"),
    'no task': ({'task.name': None}, 'task.name=None', 'recall', None),
    'list as task': ({'task.name': ['recall']}, "['recall']", 'recall', None),
    'unknown choice': ({'model.position': 'rotary'}, "model.position='rotary'", 'rope', None),
    'unknown choice in a tuple': ({'model.mlp_kind': ('mlp', 'lineer')}, "'lineer'", 'linear_act', "'linear'"),
    'text as number': ({'optim.learning_rate': '0.1'}, 'type str', 'float', None),
    'number as text': ({'model.norm': 1}, 'type int', 'str', None),
    'float as int': ({'model.d_model': 16.0}, 'type float', 'int', None),
    'bool as int': ({'model.num_layers': True}, 'type bool', 'int', None),
    'bool as float': ({'task.noise_prob': True}, 'type bool', 'float', None),
    'int as bool': ({'model.tied': 1}, 'type int', 'bool', None),
    'none': ({'train.num_steps': None}, 'type NoneType', 'int', None),
    'scalar as tuple': ({'optim.frozen': 'embed'}, "optim.frozen='embed'", 'tuple', "try ('embed',)"),
    'wrong item of a tuple': ({'train.save_steps': (1, 2.5)}, 'train.save_steps[1]=2.5', 'int', None),
    'not a group': ({'model': 3}, 'model=3', 'group of keys', None),
    'infinite': ({'optim.learning_rate': math.inf}, 'optim.learning_rate=inf', 'finite', None),
    'nan': ({'task.noise_prob': math.nan}, 'task.noise_prob=nan', 'finite', None),
    'beyond all floats': ({'optim.learning_rate': 10**400}, 'optim.learning_rate=inf', 'finite', None),
    'negative probability': ({'task.noise_prob': -0.1}, 'task.noise_prob=-0.1', 'from 0.0 to 1.0', None),
    'probability above one': ({'task.noise_prob': 1.1}, 'task.noise_prob=1.1', 'from 0.0 to 1.0', None),
    'length zero': ({'task.length': 0}, 'task.length=0', 'at least 1', None),
    'negative rate': ({'optim.learning_rate': -1.0}, 'optim.learning_rate=-1.0', 'at least 0', None),
    'negative seed': ({'seed.init': -1}, 'seed.init=-1', 'from 0 to 2147483647', None),
    'large seed': ({'seed.init': 2**31}, 'seed.init=2147483648', 'from 0 to 2147483647', None),
    'heads': ({'model.num_heads': 3}, 'num_heads=3', 'divisor', 'try 2'),
    'kv heads': ({'model.num_heads': 4, 'model.num_kv_heads': 3}, 'num_kv_heads=3', 'divisor', 'try 2'),
    'per layer': ({'model.parallel': (True, False, True)}, '3 entries', '1 or num_layers=2', None),
    'identity query': ({'model.d_head': 3}, '1 * 3 and 16', 'num_heads * d_head = d_model', 'try model.query=full'),
    'merged and grouped': ({'model.value_output': 'merged', 'model.num_heads': 2, 'model.num_kv_heads': 1},
                           'found 1, 2, False', 'num_kv_heads = num_heads', 'try model.value_output=factored'),
    'merged and bias': ({'model.value_output': 'merged', 'model.bias': True}, 'True', 'bias=False', 'try'),
    'odd rotation': ({'model.position': 'rope', 'model.rope_fraction': 0.3}, 'rotates 5', 'positive even', 'try'),
    'no rotation': ({'model.position': 'rope', 'model.rope_fraction': 0.0}, 'rotates 0', 'positive even', 'try'),
    'rope factors': ({'model.position': 'rope', 'model.rope_factors': (1.0,)}, '1 entries', 'none, or one for each of '
                     'the 8 frequencies', None),
    'no rope factor': ({'model.rope_factors': (0.0,)}, 'rope_factors=0.0', 'at least', None),
    'rope layer': ({'model.rope_layers': (2,)}, 'layer 2', '0 to 1', None),
    'small vocabulary': ({'model.vocab_size': 10}, 'model.vocab_size=10', 'at least 62', '0 (the task decides)'),
    'short table': ({'model.max_len': 15}, 'model.max_len=15', 'at least 16', '0 (the task decides)'),
    'too many triggers': ({'task.num_triggers': 61}, 'task.num_triggers=61', '1 to 60', 'try a larger table'),
    'too many triggers after skipping': ({'task.num_triggers': 56, 'task.trigger_offset': 5}, 'task.num_triggers=56',
                                         '1 to 55', 'try a larger table'),
    'nothing left after skipping': ({'task.trigger_offset': 200}, 'task.trigger_offset=200', '0 to 59',
                                    'try a larger table'),
    'table of two': ({'task.table': 'uniform', 'task.table_size': 2, 'task.noise_token': '0'}, '2 tokens', 'at least 3',
                     'try a larger table'),
    'noise is the trigger': ({'task.noise_token': ' '}, "task.noise_token=' '", 'any other symbol', 'try extra'),
    'noise is a trigger': ({'task.noise_token': 'e', 'task.num_triggers': 3}, "'e'", 'any other symbol', 'try extra'),
    'unknown noise': ({'task.noise_token': '€'}, "task.noise_token='€'", "Allowed: extra, '\\n', ' ', !", None),
    'noise of a uniform table': ({'task.table': 'uniform'}, "task.noise_token='!'", 'Allowed: extra, 0, 1', None),
    'missing table': ({'task.table': 'shakespear'}, "'shakespear'", "['shakespeare']", 'try making it'),
    'save steps': ({'train.save': 'listed', 'train.save_steps': (5, 21)}, '[21]', 'num_steps=20', 'drop them'),
    'truncation without layer': ({'eval.truncations': ('mlp_in@0.1',)}, "'mlp_in@0.1'", 'blocks.<layer>.<role>@',
                                 "'blocks.1.mlp_in@0.1'"),
    'truncation without fraction': ({'eval.truncations': ('blocks.1.mlp_in',)}, "'blocks.1.mlp_in'", '[0, 1]', None),
    'truncation of neither end': ({'eval.truncations': ('blocks.1.mlp_in@0.5@middle',)}, '@middle', '@bottom',
                                  None),
    'freezing without steps': ({'optim.freeze_schedule': ('blocks.0.k',)}, "'blocks.0.k'",
                               '<parameters>@<step>-', None),
    'freezing after the end': ({'optim.freeze_schedule': ('blocks.0.k@5000-',)}, 'begins at step 5000',
                               'before train.num_steps', None),
    'freezing backwards': ({'optim.freeze_schedule': ('blocks.0.k@9-3',)}, '@9-3', '<later step>', None),
    'truncation beyond one': ({'eval.truncations': ('blocks.1.mlp_in@1.5',)}, '@1.5', 'fraction in [0, 1]', None),
    'truncation by nan': ({'eval.truncations': ('blocks.1.mlp_in@nan',)}, '@nan', 'fraction in [0, 1]', None),
    'truncation of a layer': ({'eval.truncations': ('blocks.2.mlp_in@0',)}, 'layer 2', '0 to 1', None),
    'truncation of a role': ({'eval.truncations': ('blocks.1.mlp_inn@0',)}, "'mlp_inn'", 'mlp_out', "'mlp_in'"),
    'truncation of no query': ({'eval.truncations': ('blocks.1.q@0',)}, "'q'", 'k, v, o', None),
    'truncation of no feed-forward': ({'eval.truncations': ('blocks.1.mlp_in@0',), 'model.mlp_kind': ('mlp', 'none')},
                                      "'mlp_in'", 'k, v, o, ov', None),
    'truncation of shared values': ({'eval.truncations': ('blocks.1.ov@0.5',), 'model.num_heads': 2,
                                     'model.num_kv_heads': 1}, "'ov'", 'k, v, o, mlp_in', None),
    'vary of unequal lengths': ({'vary.seed.all': (1, 2, 3), 'vary.optim.learning_rate': (0.1, 0.2)},
                                "'optim.learning_rate': 2, 'seed': 3", 'same length', 'one value a replica'),
    'vary of what has a shape': ({'vary.model': {'d_model': (1, 2)}}, "'model'", 'seed, optim, task', None),
    'vary of an unknown key': ({'vary.optim': {'learning_rat': (1.0,)}}, "'learning_rat'", 'momentum',
                               "did you mean 'learning_rate'?"),
    'vary of one value': ({'vary.task.noise_prob': 0.5}, 'vary.task.noise_prob=0.5', 'tuple', 'try (0.5,)'),
    'vary out of range': ({'vary.task.noise_prob': (0.5, 2.0)}, 'task.noise_prob=2.0', 'from 0.0 to 1.0', None),
    'vary of a wrong type': ({'vary.seed.all': (0, 1.5)}, '=1.5', 'int', None),
    'name': ({'name': 'a/b'}, "name='a/b'", 'letters, digits', None),
    'format': ({'format_version': 2}, 'version 2', 'reads 1', None),
}


@pytest.mark.parametrize('case', ERRORS)
def test_an_impossible_config_is_refused_in_one_line(case):
    changes, found, allowed, advice = ERRORS[case]
    with pytest.raises(ConfigError) as error:
        build(changes)
    message = str(error.value)
    assert message.isprintable()  # one line
    assert found in message and allowed in message and (advice or '') in message


@pytest.mark.parametrize('case', ['unknown key', 'unknown choice', 'float as int', 'negative rate'])
def test_an_error_about_a_key_names_the_page_of_all_keys(case):
    with pytest.raises(ConfigError, match='; docs/config.md explains every key$'):
        build(ERRORS[case][0])
    assert (ROOT / 'docs' / 'config.md').is_file()


def test_unknown_variant_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="no variant 'smok'; did you mean 'smoke'") as error:
        get_config('recall.py:smok')
    assert '\n' not in str(error.value) and 'demo, all, smoke, official' in str(error.value)


# run_id ---------------------------------------------------------------------------------------------------------------


def another(field, value):
    """Another value of a field, or None if one is hard to guess."""
    choices, high = field.metadata['choices'], field.metadata['high']
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.25 if high is None or value + 0.25 <= high else value - 0.25
    if isinstance(value, str) and choices:
        return next(x for x in choices if x != value)
    return None


def test_run_id_changes_with_every_number_and_nothing_else():
    base = build()
    seen = {config.run_id(base): 'base'}
    for section, cls in {**config.SECTIONS, 'task': config.TASKS['recall']}.items():
        for field in dataclasses.fields(cls):
            value = another(field, getattr(getattr(base, section), field.name))
            place = f'{section}.{field.name}'
            if value is None:
                continue
            try:
                cfg = build({place: value})
            except ConfigError:  # not possible alone
                continue
            run_id = config.run_id(cfg)
            if section == 'slurm' or (section == 'train' and field.name in config.NOT_HASHED):
                assert run_id == config.run_id(base)
            else:
                assert run_id not in seen, (place, seen[run_id])
                seen[run_id] = place
    # All numbers of the sections but for a few that are not possible alone.
    assert len(seen) > 55
    assert {'optim.momentum', 'train.eval_every', 'seed.eval', 'task.noise_prob'} <= set(seen.values())
    for place, value in {'vary.seed.all': (0, 2), 'vary.optim.learning_rate': (0.1, 0.2),
                         'task.targets_exclude': (), 'optim.frozen': ('embed',), 'eval.truncations': ()}.items():
        assert config.run_id(build({place: value})) not in seen
    assert config.run_id(build({'name': 'other'})) == config.run_id(base)
    # 0 stands for the number that follows from other keys.
    assert config.run_id(build({'model.d_head': 16, 'model.vocab_size': 62})) == config.run_id(base)
    assert len(config.run_id(base)) == 8 and {'layout'} <= set(config.NOT_HASHED)


def test_run_id_follows_the_content_of_a_table_and_not_its_path(tmp_path):
    paths = [str(tmp_path / name) for name in ('a.json', 'b.json', 'c.json')]
    for path, text in zip(paths, ('abcab!', 'abcab!', 'abcabb!'), strict=True):
        bigrams.save_table(bigrams.count(text), path)
    ids = [config.run_id(build({'task.table': path})) for path in paths]
    assert ids[0] == ids[1] != ids[2]


# Replicas -------------------------------------------------------------------------------------------------------------


def test_coordinates():
    cfg = build({'vary.seed.all': (4, 5, 6), 'vary.seed.task': (7, 7, 7), 'vary.task.noise_prob': (0, 0.5, 1)})
    table = cfg.coordinates()
    assert cfg.num_replicas == 3
    assert table['seed.init'] == table['seed.batch'] == table['seed.eval'] == (4, 5, 6)
    assert table['seed.task'] == (7, 7, 7)
    assert table['task.noise_prob'] == (0.0, 0.5, 1.0)
    assert table['optim.learning_rate'] == (0.06,) * 3
    assert set(table) == {*(f'seed.{stream}' for stream in config.SEED_STREAMS),
                          *(f'optim.{name}' for name in config.VARIABLE_OPTIM), 'task.noise_prob'}
    assert all(len(values) == 3 for values in table.values())


def test_suggest_names_the_nearest():
    assert config.suggest('wrod', ('word', 'other')) == "did you mean 'word'? Allowed: word, other"
    assert config.suggest('xyz', ('word', '\n', ' ', ',')) == "Allowed: word, '\\n', ' ', ','"


# Random configs -------------------------------------------------------------------------------------------------------


def per_layer(item):
    return st.lists(item, min_size=1, max_size=3).map(tuple)


VALUES = {
    'task.table': st.sampled_from(['shakespeare', 'uniform', 'synthetic']),
    'task.table_size': st.sampled_from([2, 3, 5, 9]),
    'task.length': st.integers(1, 5),
    'task.num_triggers': st.integers(1, 6),
    'task.trigger_mode': st.sampled_from(['fixed', 'random']),
    'task.trigger_offset': st.integers(0, 4),
    'task.target_law': st.sampled_from(['uniform', 'bigram']),
    'task.targets_exclude': st.lists(st.sampled_from(['triggers', 'own_trigger', 'noise']), max_size=3).map(tuple),
    'task.noise_token': st.sampled_from(['extra', '!', '0', '2']),
    'task.noise_prob': st.sampled_from([0, 0.5, 1.0]),
    'task.loss_on': st.sampled_from(['repeated', 'visible', 'all']),
    'model.num_layers': st.integers(1, 3),
    'model.d_model': st.sampled_from([1, 4, 6, 8]),
    'model.num_heads': st.integers(1, 4),
    'model.num_kv_heads': st.integers(0, 3),
    'model.d_head': st.integers(0, 4),
    'model.vocab_size': st.sampled_from([0, 0, 70]),
    'model.max_len': st.sampled_from([0, 0, 7]),
    'model.query': st.sampled_from(['full', 'identity']),
    'model.value_output': st.sampled_from(['factored', 'merged']),
    'model.scale_scores': st.booleans(),
    'model.mlp_kind': per_layer(st.sampled_from(['mlp', 'gated', 'linear', 'linear_act', 'none'])),
    'model.activation': per_layer(st.sampled_from(['relu', 'gelu', 'silu'])),
    'model.parallel': per_layer(st.booleans()),
    'model.attn_residual': per_layer(st.booleans()),
    'model.position': st.sampled_from(['learned', 'sinusoidal', 'rope', 'none']),
    'model.rope_layers': st.lists(st.integers(0, 2), max_size=2).map(tuple),
    'model.rope_fraction': st.sampled_from([1.0, 0.5, 0.0]),
    'model.rope_interleaved': st.booleans(),
    'model.norm': st.sampled_from(['layernorm', 'rmsnorm', 'none']),
    'model.norm_position': st.sampled_from(['pre', 'post']),
    'model.bias': st.booleans(),
    'model.tied': st.booleans(),
    'model.num_types': st.sampled_from([0, 1, 3, 9]),
    'model.conv_width': st.sampled_from([0, 1, 9]),
    'model.init_depth_scaled': st.sampled_from([(), ('o',), ('mlp_out', 'o')]),
    'model.dtype': st.sampled_from(['float32', 'bfloat16']),
    'optim.optimizer': st.sampled_from(['sgd', 'adamw']),
    'optim.decay': st.sampled_from([(), ('*',), ('blocks.*.mlp_in',), ('*.o', '*.v')]),
    'optim.frozen': st.sampled_from([(), ('embed',), ('pos', 'embed'), ('blocks.*', '*embed'), ('*',)]),
    'optim.schedule': st.sampled_from(['constant', 'cosine']),
    'optim.warmup_steps': st.sampled_from([0, 3, 40]),
    'train.batch_size': st.integers(1, 3),
    'eval.batch_size': st.integers(1, 6),
    'eval.truncations': st.lists(
        st.sampled_from([f'blocks.{layer}.{role}@{fraction}' for layer in (0, 1) for fraction in (0, 0.5, 1)
                         for role in ('q', 'v', 'ov', 'mlp_in', 'mlp_linear')]), max_size=2).map(tuple),
    'train.layout': st.sampled_from(['map', 'vmap']),
    'vary.seed.all': st.sampled_from([(), (1, 2)]),
    'vary.task.noise_prob': st.sampled_from([(), (0.1, 0.9)]),
}
SMALL = {'task.table': 'uniform', 'task.table_size': 5, 'task.noise_token': 'extra', 'task.length': 4,
         'model.d_model': 4, 'model.query': 'full', 'eval.truncations': (), 'optim.frozen': (), 'train.batch_size': 2,
         'vary.seed.all': ()}


def trace(cfg: config.Config) -> None:
    """Traces everything that a run compiles."""
    programs = train.Programs(cfg, capacity=2, **analysis.evaluation(cfg.task.NAME))
    try:
        state = jax.eval_shape(programs.init, programs.settings)
    except ConfigError as error:  # names of parameters are first known here
        assert str(error).startswith(('optim.decay', 'optim.frozen')) and str(error).isprintable()
        return
    task_state = jax.eval_shape(programs.init_task, programs.settings)
    trained, losses = jax.eval_shape(programs.train_chunk, state, task_state, programs.settings, np.int32(1))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), trained) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert losses.shape[1:] == (2,) and losses.dtype == jnp.float32
    measured = jax.eval_shape(programs.evaluate, state.params, task_state, programs.settings)
    assert set(cfg.task.headline) <= set(measured)
    assert {f'clean/loss/{name}' for name in cfg.eval.truncations} <= set(measured)


@settings(deadline=None, max_examples=20, derandomize=True, database=None, phases=[Phase.generate])
@given(st.data())
def test_random_configs_are_refused_or_trace(data):
    chosen = data.draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=12))
    changes = SMALL | {name: data.draw(VALUES[name], label=name) for name in sorted(chosen)}
    try:
        cfg = build(changes)
    except ConfigError as error:
        assert str(error).isprintable()
        return
    trace(cfg)
