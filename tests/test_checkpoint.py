import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from lingrok.checkpoint import CheckpointError, Checkpoints, content_hash
from lingrok.train import State

pytestmark = pytest.mark.filterwarnings('error')  # what orbax and tensorstore print besides their errors


def arrays(seed: int = 0):
    """(params, the rest of a state) of two replicas, with every dtype and shape that training makes."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    params = {
        'embed': draw(2, 8, 16),
        'blocks_0': {'q': draw(2, 16, 16), 'norm_scale': np.ones((2, 16), np.float32)},
        'blocks_1': {'mlp_in': draw(2, 16, 32).astype(jnp.bfloat16)},
    }
    everything = jax.tree.map(lambda _: True, params)
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1, everything), optax.trace(0.9))
    form = jax.eval_shape(jax.vmap(optimizer.init), params)
    opt_state = jax.tree.map(lambda x: (10 * draw(*x.shape)).astype(x.dtype), form)
    return params, State((), opt_state, np.array([7, 7], np.int32), np.array([-1, 3], np.int32))


def save(directory, *steps: int, seed: int = 0) -> Checkpoints:
    checkpoints = Checkpoints(directory)
    for step in steps:
        checkpoints.save(step, *arrays(seed), {'run_id': 'abc', 'scheduled': True})
    return checkpoints


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert isinstance(y, np.ndarray) and x.dtype == y.dtype and x.shape == y.shape
        same = x.tobytes() == y.tobytes()  # pytest would compute a diff of the bytes
        assert same


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob('*') if path.is_file())


def check_message(caught, path) -> None:
    message = str(caught.value)
    assert '\n' not in message and str(path) in message


def test_round_trip(tmp_path):
    checkpoints = save(tmp_path / 'checkpoints', 20, 3, 0)
    params, train = arrays()
    assert checkpoints.steps() == [0, 3, 20]
    assert_same(params, checkpoints.params(3))
    assert_same(train, checkpoints.train(3, train))
    meta = checkpoints.meta(3)
    assert (meta['step'], meta['run_id'], meta['scheduled']) == (3, 'abc', True)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), train)
    assert_same(train, checkpoints.train(3, shapes))


def test_missing(tmp_path):
    checkpoints = Checkpoints(tmp_path / 'none')
    assert checkpoints.steps() == []
    with pytest.raises(CheckpointError, match=r'no checkpoint of step 4; it has \[\]') as caught:
        checkpoints.params(4)
    check_message(caught, tmp_path / 'none')


def test_state_of_another_optimiser(tmp_path):
    checkpoints = save(tmp_path, 0)
    params, train = arrays()
    with pytest.raises(CheckpointError, match='another optimiser state') as caught:
        checkpoints.train(0, train._replace(opt_state=jax.eval_shape(optax.sgd(0.1, 0.9).init, params)))
    check_message(caught, tmp_path / '0')


def restored(checkpoints, item: str, like):
    return checkpoints.params(5) if item == 'params' else checkpoints.train(5, like)


@pytest.mark.parametrize('item', ['params', 'train'])
def test_every_flipped_byte_is_found_or_does_no_harm(tmp_path, item):
    checkpoints = save(tmp_path, 5)
    params, train = arrays()
    expected, place = {'params': params, 'train': train}[item], tmp_path / '5' / item
    found = dict.fromkeys(files_of(place), 0)
    random = np.random.default_rng(0)
    for path in found:
        content = path.read_bytes()
        if not content:
            continue
        for position in random.integers(0, len(content), 2):
            flipped = bytearray(content)
            flipped[position] ^= 1 << int(random.integers(8))
            path.write_bytes(flipped)
            try:
                # A byte that the reader never looks at, such as a time stamp, may change; a number may not.
                assert_same(expected, restored(checkpoints, item, train))
            except CheckpointError as error:
                assert '\n' not in str(error) and str(tmp_path / '5') in str(error)
                found[path] += 1
        path.write_bytes(content)
    assert_same(expected, restored(checkpoints, item, train))
    assert sum(found.values()) >= 4, found


def test_every_lost_or_shortened_file(tmp_path):
    checkpoints = save(tmp_path, 5)
    params, train = arrays()
    caught = 0
    for number, path in enumerate(files_of(tmp_path / '5')):
        content = path.read_bytes()
        path.unlink() if number % 2 else path.write_bytes(content[: len(content) // 2])
        try:
            assert_same(params, checkpoints.params(5))
            assert_same(train, checkpoints.train(5, train))
        except CheckpointError as error:
            assert '\n' not in str(error) and str(tmp_path / '5') in str(error)
            caught += 1
        path.write_bytes(content)
    assert caught >= 6
    assert_same(params, checkpoints.params(5))


@pytest.mark.parametrize('name', ['params', 'train', 'meta'])
def test_lost_directory(tmp_path, name):
    checkpoints = save(tmp_path, 5)
    (tmp_path / '5' / name).rename(tmp_path / 'elsewhere')
    with pytest.raises(CheckpointError, match='no optimiser state' if name == 'train' else 'damaged') as caught:
        checkpoints.train(5, arrays()[1]) if name == 'train' else checkpoints.params(5)
    check_message(caught, tmp_path / '5')


def test_parameters_without_the_optimiser_state(tmp_path):
    checkpoints = save(tmp_path, 5)
    assert checkpoints.can_resume(5)
    checkpoints.drop_train(5)
    checkpoints.drop_train(5)
    assert not checkpoints.can_resume(5) and checkpoints.check(5)['step'] == 5
    assert_same(arrays()[0], checkpoints.params(5))
    with pytest.raises(CheckpointError, match='5 has no optimiser state'):
        checkpoints.train(5, arrays()[1])


def test_empty_directory(tmp_path):
    (tmp_path / '5').mkdir()
    with pytest.raises(CheckpointError, match='damaged') as caught:
        Checkpoints(tmp_path).params(5)
    check_message(caught, tmp_path / '5')


def set_in(tree: dict, value, *path: str) -> None:
    for name in path[:-1]:
        tree = tree[name]
    tree[path[-1]] = value


@pytest.mark.parametrize('path, value', [
    (('step',), 6), (('scheduled',), False), (('run_id',), 'other'), (('hash', 'params'), '0' * 64), (('hash',), None),
    (('hash',), {}), (('extra',), 1),
])
def test_changed_meta(tmp_path, path, value):
    checkpoints = save(tmp_path, 5)
    file = tmp_path / '5' / 'meta' / 'metadata'
    meta = json.loads(file.read_text())
    set_in(meta, value, *path)
    file.write_text(json.dumps(meta))
    for read in (checkpoints.params, checkpoints.meta):
        with pytest.raises(CheckpointError, match='damaged') as caught:
            read(5)
        check_message(caught, tmp_path / '5')


@pytest.mark.parametrize('content', ['', '{', '[]', '3', 'null', '{"step": 5}'])
def test_meta_that_is_not_meta(tmp_path, content):
    checkpoints = save(tmp_path, 5)
    (tmp_path / '5' / 'meta' / 'metadata').write_text(content)
    with pytest.raises(CheckpointError, match='damaged') as caught:
        checkpoints.params(5)
    check_message(caught, tmp_path / '5')


def test_a_checkpoint_of_another_step_under_this_name(tmp_path):
    checkpoints = save(tmp_path, 5)
    (tmp_path / '5').rename(tmp_path / '6')
    with pytest.raises(CheckpointError, match='damaged'):
        checkpoints.params(6)


def test_interrupted_save_is_not_offered(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CompositeCheckpointHandler, 'finalize', stop)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, *arrays(), {})
    left = [path.name for path in tmp_path.iterdir() if path.name != '1']
    assert left and files_of(tmp_path / left[0])
    (tmp_path / 'stray').touch()
    again = Checkpoints(tmp_path)
    assert again.steps() == [1]
    again.clean()
    assert [path.name for path in tmp_path.iterdir()] == ['1']
    again.save(2, *arrays(), {})
    assert_same(arrays()[0], again.params(2))


@pytest.mark.parametrize('error', [ValueError('RESOURCE_EXHAUSTED: a\nb'), OSError(5, 'input/output error')])
def test_a_save_that_fails_is_an_os_error_in_one_line(tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(ocp.Checkpointer, 'save', fail)
    with pytest.raises(OSError, match='checkpoint not written') as caught:
        save(tmp_path, 3)
    assert caught.value.filename == str(tmp_path / '3')
    check_message(caught, tmp_path / '3')


def test_a_full_disk_is_asked_before_it_is_met(tmp_path, monkeypatch):
    monkeypatch.setattr('shutil.disk_usage', lambda path: type('Usage', (), {'free': 1000})())
    with pytest.raises(OSError, match='disk full.* 1,000 are free') as caught:
        save(tmp_path, 3)
    assert caught.value.filename == str(tmp_path / '3') and not list(tmp_path.iterdir())


def test_set_aside_and_remove(tmp_path):
    checkpoints = save(tmp_path / 'checkpoints', 1, 2)
    before = {path.name: path.read_bytes() for path in files_of(tmp_path / 'checkpoints' / '2')}
    place = checkpoints.set_aside(2)
    assert checkpoints.steps() == [1] and Path(place) == tmp_path / 'damaged' / '2-0'
    assert {path.name: path.read_bytes() for path in files_of(Path(place))} == before
    save(tmp_path / 'checkpoints', 2)
    assert Path(checkpoints.set_aside(2)) == tmp_path / 'damaged' / '2-1'
    checkpoints.remove(1)
    assert checkpoints.steps() == []


def test_hash_sees_names_types_shapes_and_bytes():
    base = {'a': np.zeros((2, 3), np.float32), 'b': np.ones(4, np.int32)}
    others = [
        {**base, 'a': np.zeros((3, 2), np.float32)},
        {**base, 'a': np.zeros((2, 3), np.int32)},
        {**base, 'a': -base['a']},  # -0.0: another sign bit
        {'c': base['a'], 'b': base['b']},
        {'a': base['a']},
    ]
    assert len({content_hash(item) for item in (base, *others)}) == 6
    assert content_hash(base) == content_hash(dict(reversed(base.items())))
    assert content_hash({'a': np.asfortranarray(np.eye(3)[:, :2])}) == content_hash({'a': np.eye(3)[:, :2]})
