import json

import numpy as np
import pytest

from lingrok import log
from lingrok.log import MetricsWriter, Progress, read_metrics, write_json


def write(directory, rows: dict, after=None):
    writer = MetricsWriter(directory, after=after)
    for step, values in rows.items():
        writer.write(step, values)
    writer.close()


def lines(directory):
    return [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]


def row(step: int) -> dict:
    return {'train/loss': np.array([step, -step], np.float32)}


def test_round_trip(tmp_path):
    values = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    table = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    write(tmp_path, {
        0: {'a': values[0], 'noisy/by_shot': table},
        10: {'a': values[1], 'b': values[1]},
        20: {'a': values[2], 'noisy/by_shot': table + 1},
    })
    metrics = read_metrics(tmp_path)
    assert list(metrics) == ['a', 'b', 'noisy/by_shot']
    np.testing.assert_array_equal(metrics['a'].steps, [0, 10, 20])
    assert metrics['a'].values.shape == (3, 2) and metrics['b'].values.shape == (1, 2)
    # Seven digits are written: a float32 needs up to nine, and no figure needs more than seven.
    np.testing.assert_allclose(metrics['a'].values, values, rtol=1e-6)
    np.testing.assert_array_equal(metrics['b'].steps, [10])
    np.testing.assert_array_equal(metrics['noisy/by_shot'].steps, [0, 20])
    np.testing.assert_array_equal(metrics['noisy/by_shot'].values, np.stack([table, table + 1]))


def test_one_line_a_step_with_sorted_names(tmp_path):
    write(tmp_path, {0: {'b': np.zeros(2), 'a': np.ones(2)}, 1: row(1)})
    assert [list(line) for line in lines(tmp_path)] == [['step', 'a', 'b'], ['step', 'train/loss']]


def test_nothing_written(tmp_path):
    assert read_metrics(tmp_path) == {}
    write(tmp_path, {})
    assert read_metrics(tmp_path) == {}


def test_what_is_not_finite_is_null_on_disk_and_nan_when_read(tmp_path):
    write(tmp_path, {1: {'x': np.array([np.nan, np.inf, -np.inf, 1.0])}})
    assert lines(tmp_path)[0]['x'] == [None, None, None, 1.0]
    np.testing.assert_array_equal(read_metrics(tmp_path)['x'].values, [[np.nan, np.nan, np.nan, 1.0]])


def test_half_a_line_is_ignored_and_dropped_at_resume(tmp_path):
    write(tmp_path, {1: row(1), 2: row(2)})
    path = tmp_path / 'metrics.jsonl'
    whole = path.read_bytes()
    for cut in range(1, 30):
        path.write_bytes(whole[:-cut])
        steps = read_metrics(tmp_path)['train/loss'].steps
        assert steps.tolist() == [1]
    write(tmp_path, {2: row(2)}, after=1)
    assert path.read_bytes() == whole


def test_resume_drops_what_comes_after_the_restored_step(tmp_path):
    table = np.ones((2, 3))
    rows = {step: {**row(step), 'by_shot': table * step} for step in range(1, 6)}
    write(tmp_path, rows)
    whole = {path.name: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    (tmp_path / 'arrays' / '9.npz.tmp').touch()
    write(tmp_path, {}, after=3)
    assert [line['step'] for line in lines(tmp_path)] == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / 'arrays').iterdir()) == ['1.npz', '2.npz', '3.npz']
    write(tmp_path, {step: rows[step] for step in (4, 5)}, after=3)
    assert (tmp_path / 'metrics.jsonl').read_bytes() == whole['metrics.jsonl']
    assert read_metrics(tmp_path)['by_shot'].values.shape == (5, 2, 3)
    write(tmp_path, {7: row(7)}, after=None)
    assert [line['step'] for line in lines(tmp_path)] == [7] and not list((tmp_path / 'arrays').iterdir())


def test_flushed_lines_survive_a_kill(tmp_path):
    writer = MetricsWriter(tmp_path, after=None)
    writer.write(1, row(1))
    writer.flush()
    assert [line['step'] for line in lines(tmp_path)] == [1]
    writer.close()


@pytest.mark.parametrize('garbage', [b'\0\0\0\0\n', b'{"step": 3, "tr\n', b'\xff\xfe\n', b'\xff', b'{"a": [1]}\n',
                                     b'7\n'])
def test_bytes_left_by_a_crash_are_dropped(tmp_path, garbage):
    write(tmp_path, {1: row(1), 2: row(2)})
    path = tmp_path / 'metrics.jsonl'
    whole = path.read_bytes()
    path.write_bytes(whole + garbage)
    assert read_metrics(tmp_path)['train/loss'].steps.tolist() == [1, 2]
    write(tmp_path, {}, after=2)
    assert path.read_bytes() == whole


@pytest.mark.parametrize('damaged', [0, 1])
def test_a_damaged_line_costs_no_other(tmp_path, damaged, capsys):
    write(tmp_path, {1: row(1), 2: row(2), 3: row(3)})
    path = tmp_path / 'metrics.jsonl'
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b''.join(b'garbage\n' if i == damaged else line for i, line in enumerate(whole)))
    before, left = path.read_bytes(), [1, 2, 3]
    left.pop(damaged)
    assert read_metrics(tmp_path)['train/loss'].steps.tolist() == left
    write(tmp_path, {4: row(4)}, after=3)
    assert [line['step'] for line in lines(tmp_path)] == [*left, 4]
    assert 'metrics.jsonl cannot be read and are left out' in capsys.readouterr().err
    assert (tmp_path / 'metrics.jsonl.damaged').read_bytes() == before


def test_a_full_disk_is_told_once(tmp_path):
    """After the error of a write, closing the file neither raises nor warns: pytest makes warnings of finalizers."""
    writer = MetricsWriter(tmp_path, after=None)
    writer._file.close()
    writer._file = open('/dev/full', 'w')
    writer.write(1, row(1))
    with pytest.raises(OSError, match='No space'):
        writer.flush()
    writer.abandon()
    assert writer._file.closed


def test_write_json_is_the_old_or_the_new_file(tmp_path, monkeypatch):
    path = tmp_path / 'x.json'
    write_json(path, {'a': 1})
    assert json.loads(path.read_text()) == {'a': 1}

    def stop(fd):
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(log.os, 'fsync', stop)
        with pytest.raises(OSError):
            write_json(path, {'a': 2})
    assert json.loads(path.read_text()) == {'a': 1}
    write_json(path, {'a': 3})
    assert json.loads(path.read_text()) == {'a': 3}
    assert [p.name for p in tmp_path.iterdir()] == ['x.json']


def test_reading_never_unpickles(tmp_path):
    (tmp_path / 'arrays').mkdir()
    np.savez(tmp_path / 'arrays' / '1.npz', x=np.array([{'a': 1}], object))
    with pytest.raises(ValueError, match='allow_pickle'):
        read_metrics(tmp_path)


def test_progress_is_plain_lines_on_stderr(capsys):
    progress = Progress(10)
    progress.advance(5)
    progress.say('half')
    progress.close()
    out, err = capsys.readouterr()
    assert out == '' and err.endswith('] half\n') and err.count('\n') == 1
