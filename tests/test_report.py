"""The report page: complete, self-contained, nothing in it but text and pictures; of a run in whatever state."""

import base64
import hashlib
import html
import json
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import ROOT, get_config
from test_cli import run_script

from lingrok import report, run
from lingrok.config import from_config_dict

EVIL = '<script>window.pwned = 1</script>"\' onload="window.pwned = 1'
VOID = {'img', 'input', 'meta', 'wbr'}


class Page(HTMLParser):
    """A page taken apart: attributes of every tag, pictures, text of every element, rows of every table."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.scripts, self.styles, self.rows, self.words = [], [], [], [], [], []
        self.feed(text)
        assert not self.open, self.open
        self.text = ''.join(self.words)
        self.images = [base64.b64decode(own['src'].removeprefix('data:image/png;base64,'))
                       for name, own in self.tags if name == 'img']

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name == 'tr':
            self.rows.append([])
        if name in ('td', 'th'):
            self.rows[-1].append('')

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        into = {'script': self.scripts, 'style': self.styles}.get(self.open[-1] if self.open else '', self.words)
        into.append(data)
        if into is self.words and self.rows and {'td', 'th'} & {*self.open}:
            self.rows[-1][-1] += data

    def row(self, *start: str) -> list[str]:
        """The first row that begins with these cells."""
        return next(row for row in self.rows if row[: len(start)] == list(start))


def png(color: int) -> bytes:
    """A picture of one pixel."""
    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    header = struct.pack('>IIBBBBB', 1, 1, 8, 0, 0, 0, 0)
    return report.PNG + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(bytes([0, color]))) + chunk(b'IEND', b'')


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_figures(directory):
    """What two scripts write: one with expected numbers in long form and a film, one with a table of its own."""
    folder = directory / 'figures'
    (folder / 'heads').mkdir(parents=True)
    for number, name in enumerate(('heads.png', 'heads/0.png', 'heads/20.png', 'compare.png')):
        (folder / name).write_bytes(png(number))
    expected = [{'what': 'mass on targets', 'value': '.7', 'source': 'Fig 3', 'measured': '0.650 ± 0.020 (n=2)'},
                {'what': 'mass elsewhere', 'value': '.1', 'source': 'Fig 4', 'measured': report.ABSENT}]
    (folder / 'heads.json').write_text(json.dumps({
        'caption': 'Where heads look. Every dot is a seed.', 'run': str(directory), 'steps': [0, 20],
        'expected': expected}))
    (folder / 'heads.csv').write_text('quantity,step,replica,index,value\nmass,0,0,,0\nmass,0,1,,0\n'
                                      'mass,20,0,,0.25\nmass,20,1,,0.75\nby_head,20,0,1,4\nby_head,20,1,1,4\n')
    (folder / 'compare.json').write_text(json.dumps({'captions': {'compare': 'Settings side by side.'}, 'expected': [
        {'what': 'widths', 'value': 'no effect', 'source': 'a guess'}]}))
    (folder / 'compare.csv').write_text('setting,loss\nwide,1.5\nnarrow,2.5\n')


@pytest.fixture(name='finished', scope='module')
def _finished(tmp_path_factory):
    """A run of two seeds with two figures."""
    directory = tmp_path_factory.mktemp('report') / 'run'
    run.execute(from_config_dict(get_config('recall.py:smoke')), directory)
    add_figures(directory)
    return directory


@pytest.fixture(name='copy')
def _copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    return tmp_path / 'run'


def make(directory, **options) -> tuple[Page, list[str]]:
    text, notes = report.run_page(directory, **options)
    return Page(text), notes


def check_self_contained(page: Page) -> None:
    """One script, its own; nothing that loads or runs anything else."""
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(own['content'] for _, own in page.tags if own.get('http-equiv') == 'Content-Security-Policy')
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert {name for name, _ in page.tags} <= set(
        'html head meta title style body header main section nav h1 h2 h3 p dl div dt dd ul li a span b table thead '
        'tbody tr th td wbr figure figcaption img details summary label output input script'.split())
    for name, own in page.tags:
        assert not [key for key in own if key.startswith('on') or key in ('srcset', 'action', 'style')], own
        assert own.get('src', 'data:image/png;base64,').startswith('data:image/png;base64,'), name
        assert own.get('href', '#').startswith('#'), own
    assert not re.search(r'url\(|@import', ''.join(page.styles))
    assert not re.search(r'fetch|XMLHttp|import|eval|innerHTML|document\.write', script)


def test_a_finished_run_is_shown_whole(finished):
    page, notes = make(finished)
    assert notes == [] and 'finished, 20 steps' in page.text
    check_self_contained(page)
    for path in (finished / 'figures').rglob('*.png'):
        assert path.read_bytes() in page.images, path
    for text in ('Where heads look. Every dot is a seed.', 'Settings side by side.', 'How noise and recall are learned',
                 'Steps 0, 20.', '2: 1 setting(s) of 2 seed(s)', '5,824 a replica', 'a guess'):
        assert text in page.text, text
    assert page.row('mass on targets') == ['mass on targets', '.7', '0.650 ± 0.020 (n=2)', 'Fig 3']
    assert '1 expected numbers of other settings' in page.text
    assert page.row('optim.learning_rate') == ['optim.learning_rate', '0.06', '0.03', 'peak learning rate']
    versions = json.loads((finished / 'versions.json').read_text())[-1]
    assert page.row(*[str(x) for x in versions.values()])
    assert page.row('narrow', '2.5') and page.row('setting', 'loss')


def test_numbers_are_those_of_the_files(finished):
    """Against the lines of metrics.jsonl, the interval of two seeds worked out by hand: t = 12.706."""
    page, _ = make(finished)
    lines = {row['step']: row for row in map(json.loads, (finished / 'metrics.jsonl').read_text().splitlines())
             if 'noisy/loss' in row}
    assert sorted(lines) == [0, 10, 20]
    cells = {row[0]: row[1:] for row in page.rows if len(row) == 3 and row[2] == '2'}
    assert {'noisy/loss', 'noisy/loss/bayes', 'clean/p_noise', 'clean/p_correct'} <= cells.keys()
    for name, (shown, _) in cells.items():
        check_statistic(shown, lines[20][name])
    labels = next(own['data-labels'] for _, own in page.tags if 'data-labels' in own)
    along = next(json.loads(own['data-texts']) for _, own in page.tags if 'data-texts' in own)
    assert json.loads(labels) == ['0', '10', '20'] and along[-1] == cells['noisy/loss'][0]
    for step, shown in zip((0, 10, 20), along, strict=True):
        check_statistic(shown, lines[step]['noisy/loss'])
    check_statistic(page.row('mass', '', '20')[3], [0.25, 0.75])
    assert page.row('by_head', '1')[2:] == ['20', '4\xa0±\xa00', '2']


def check_statistic(shown: str, values) -> None:
    mean, half = shown.split('\xa0±\xa0')
    expected = 12.706 * abs(values[0] - values[1]) / 2
    np.testing.assert_allclose(float(half), expected, rtol=0.06)  # two digits are shown
    np.testing.assert_allclose(float(mean), np.mean(values), atol=expected / 15)


def test_whatever_comes_from_a_file_is_text(copy):
    rewrite(copy / 'config.json', name=EVIL, surprise={EVIL: [EVIL, '\ud800']})
    (copy / 'versions.json').write_text(json.dumps([{'jax': EVIL, EVIL: 'x', 'device': EVIL, 'lingrok': EVIL}]))
    rewrite(copy / 'figures' / 'heads.json', caption=EVIL, run=EVIL, steps=[EVIL],
            expected=[{'what': EVIL, 'value': EVIL, 'source': EVIL, 'measured': EVIL}, EVIL])
    (copy / 'figures' / 'heads.csv').write_text(f'"a<b>{EVIL.replace(chr(34), "")}"\nx<script>y\n')
    shutil.copy(copy / 'figures' / 'heads.png', copy / 'figures' / '<img src=x onerror=alert(1)>.png')
    lines = (copy / 'metrics.jsonl').read_text().replace('noisy/loss', 'noisy/<b onclick=x>')
    (copy / 'metrics.jsonl').write_text(lines)
    page, notes = make(copy)
    check_self_contained(page)
    assert page.text.count('window.pwned') >= 8 and '<b onclick=x>' in page.text
    assert '<img src=x onerror=alert(1)>' in page.text and any('surprise' in note for note in notes)
    assert report.tag('p', EVIL) == f'<p>{html.escape(EVIL)}</p>'


def cut_last_line(path):
    path.write_text(path.read_text()[:-20])


def flip(directory):
    path = max(directory.rglob('d/*'), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# What is done to a run -> what the page says, and whether it still knows the headline numbers.
STATES = {
    'the run is unfinished, step 20 of 20': (lambda d: (d / 'DONE').unlink(), True),
    'is half a line': (lambda d: cut_last_line(d / 'metrics.jsonl'), True),
    'cannot be read: Expecting property name': (lambda d: (d / 'config.json').write_text('{'), True),
    'config of format version 2; this lingrok reads 1': (lambda d: rewrite(d / 'config.json', format_version=2), True),
    "task.name='sorting' is unknown": (lambda d: rewrite(d / 'config.json', task={'name': 'sorting'}), True),
    'has no config.json': (lambda d: (d / 'config.json').unlink(), True),
    'trained with lingrok 9.9': (lambda d: (d / 'versions.json').write_text(
        json.dumps([{'step': 0, 'jax': '1', 'lingrok': '9.9'}])), True),
    'versions.json cannot be read': (lambda d: (d / 'versions.json').write_text('{'), True),
    'checkpoints/20 is damaged': (lambda d: flip(d / 'checkpoints' / '20'), True),
    'has no checkpoint that is whole': (lambda d: shutil.rmtree(d / 'checkpoints'), True),
    'metrics.jsonl is missing': (lambda d: (d / 'metrics.jsonl').unlink(), False),
    'clean/p_noise does not have one number': (lambda d: (d / 'metrics.jsonl').write_text(
        '{"step": 0, "noisy/loss": [1, 2], "clean/p_noise": [1]}\n'), True),
    'metrics or arrays': (lambda d: next((d / 'arrays').iterdir()).write_bytes(b'x'), True),
    'heads.png is no PNG': (lambda d: (d / 'figures' / 'heads.png').write_text('<svg onload="alert(1)"/>'), True),
    'not enough values to unpack': (lambda d: (d / 'figures' / 'heads.csv').write_text(''), True),
    'Drawn from another run': (lambda d: rewrite(d / 'figures' / 'heads.json', run='/elsewhere/other'), True),
}


@pytest.mark.parametrize('message', STATES)
def test_a_run_in_any_state_is_shown_as_far_as_it_can_be_read(copy, message):
    damage, known = STATES[message]
    damage(copy)
    page, notes = make(copy)
    check_self_contained(page)
    assert message in page.text
    assert message.startswith('Drawn') or any(message in note for note in notes), notes
    assert ('noisy/loss' in {row[0] for row in page.rows if row}) == known
    assert (copy / 'figures' / 'compare.png').read_bytes() in page.images
    if (copy / 'config.json').exists() and message != 'cannot be read: Expecting property name':
        assert [row for row in page.rows if row[0] == 'optim.learning_rate']


def test_a_replica_that_turned_nan_is_named_and_counts_in_no_interval(tmp_path):
    cfg = get_config('recall.py:smoke')
    cfg.vary.optim.learning_rate = (0.1, 1e6)
    run.execute(from_config_dict(cfg), tmp_path / 'run')
    page, notes = make(tmp_path / 'run')
    assert notes == ['replicas 1 turned NaN, were frozen, and count in no interval']
    assert [row[-1] for row in page.rows if row[0] == 'noisy/loss'][:2] == ['1', '0']
    assert 'not defined' in page.text and '2: 2 setting(s) of 1 seed(s)' in page.text


def test_without_checking_no_checkpoint_is_read(copy):
    flip(copy / 'checkpoints' / '1')
    assert make(copy, check=False)[1] == [] and make(copy)[1]


def test_without_figures_the_report_draws_that_of_the_training(copy):
    shutil.rmtree(copy / 'figures')
    (copy / 'DONE').unlink()
    before = sorted(copy.rglob('*'))
    page, _ = make(copy)
    assert len(page.images) == 1 and len(page.images[0]) > 10_000 and 'Drawn by the report.' in page.text
    assert 'FF: feed-forward.' in page.text and sorted(copy.rglob('*')) == before


def test_a_run_that_has_only_begun(copy):
    for name in ('metrics.jsonl', 'versions.json', 'DONE'):
        (copy / name).unlink()
    for name in ('figures', 'checkpoints', 'arrays'):
        shutil.rmtree(copy / name)
    page, notes = make(copy)
    assert notes[0] == 'the run is unfinished, step 0 of 20: its numbers are not final'
    assert 'No figures' in page.text and page.images == [] and page.row('optim.learning_rate')


@pytest.fixture(name='swept')
def _swept(finished, tmp_path):
    """A sweep of three programs of two seeds: a finished one, one that stands at step 10, one that has not started."""
    for name in ('0000-a', '0001-b'):
        shutil.copytree(finished, tmp_path / 'sweep' / name)
    late = tmp_path / 'sweep' / '0001-b'
    (late / 'DONE').unlink()
    lines = (late / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (late / 'metrics.jsonl').write_text(''.join(x for x in lines if json.loads(x)['step'] <= 10))
    (late / 'arrays' / '20.npz').unlink(missing_ok=True)
    add_figures(tmp_path / 'sweep')
    points = [[noise, seed] for noise in (0.3, 0.7, 0.9) for seed in (0, 1)]
    programs = [{'directory': name, 'memory': 1, 'rows': [2 * i, 2 * i + 1]}
                for i, name in enumerate(('0000-a', '0001-b', '0002-c'))]
    (tmp_path / 'sweep' / 'sweep.json').write_text(json.dumps({
        'format_version': 1, 'name': 'noise', 'id': 'x', 'columns': ['task.noise_prob', 'seed'], 'programs': programs,
        'points': points}))
    return tmp_path / 'sweep'


def test_a_sweep_is_a_table_of_settings_and_programs(swept, finished):
    text, notes = report.sweep_page(swept)
    page = Page(text)
    check_self_contained(page)
    assert notes == ['the sweep is unfinished, 1 of 3 programs: its numbers are not final']
    assert page.row('0', '0000-a') == ['0', '0000-a', 'finished', '20', '20', '2']
    assert page.row('1', '0001-b') == ['1', '0001-b', 'unfinished', '10', '20', '2']
    assert page.row('2', '0002-c') == ['2', '0002-c', 'not started', '0', '0', '2']
    head = ['task.noise_prob', 'noisy/loss', 'clean/p_noise', 'clean/p_correct', 'n', 'step']
    assert page.row('task.noise_prob') == head
    metrics = run.load_run(finished).metrics()['noisy/loss'].values
    check_statistic(page.row('0.3')[1], metrics[-1])
    check_statistic(page.row('0.7')[1], metrics[-2])
    assert page.row('0.3')[4:] == ['2', '20'] and page.row('0.7')[4:] == ['2', '10']
    assert {path.read_bytes() for path in (swept / 'figures').glob('*.png')} <= set(page.images)


def test_a_broken_program_does_not_hide_the_others(swept):
    (swept / '0001-b' / 'config.json').write_text('[]')
    next((swept / '0001-b' / 'arrays').iterdir()).write_bytes(b'x')
    text, notes = report.sweep_page(swept)
    page = Page(text)
    assert page.row('1', '0001-b')[2] == 'broken' and page.row('0.3')[5] == '20'
    assert any('0001-b is left out of the table of settings' in note for note in notes)
    assert any('config.json cannot be read' in note for note in notes)


@pytest.mark.parametrize('content, message', [('{', 'cannot be read'), ('{"format_version": 7}', 'format version 7'),
                                              ('{"format_version": 1, "programs": 3}', 'not iterable')])
def test_a_sweep_that_cannot_be_read_says_so(swept, content, message):
    (swept / 'sweep.json').write_text(content)
    text, notes = report.sweep_page(swept)
    assert any(message in note for note in notes) and len(Page(text).images) == 4


def test_the_script_writes_the_page(copy, tmp_path):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'theory').mkdir()
    (tmp_path / 'theory' / 'x.png').write_bytes(png(9))
    before = {path: path.read_bytes() for path in copy.rglob('*') if path.is_file()}
    cases = [(copy,), (copy, f'--out={tmp_path}/x.html', '--nocheck'), (tmp_path / 'theory',), (tmp_path / 'empty',),
             (tmp_path / 'nothing',)]
    done = run_script(cases, str(ROOT / 'experiments' / 'report.py'))
    assert [code for code, _, _ in done] == [0, 0, 0, 2, 2], done
    assert done[0][1:] == (f'report: {copy}/report.html\n', '') and done[1][1] == f'report: {tmp_path}/x.html\n'
    assert 'holds no run, no sweep and no figures' in done[3][2] and 'is not a directory' in done[4][2]
    assert Page((tmp_path / 'theory' / 'report.html').read_text()).images == [png(9)]
    assert Page((copy / 'report.html').read_text()).row('mass on targets')
    assert all(path.read_bytes() == content for path, content in before.items())


# In the page of a browser: what is too wide, what the controls do, and whether anything ran that should not.
PROBE = """
const wide = [...document.querySelectorAll('body *')].filter(x => x.getBoundingClientRect().right > innerWidth + 1
  && !x.closest('.wide, .plot')).map(x => x.tagName + x.className);
const table = document.querySelector('table.sortable'), column = i => [...table.tBodies[0].rows].map(
  row => row.cells[i].textContent);
const before = column(0), value = document.querySelector('[data-texts]'), last = value.textContent;
table.tHead.querySelectorAll('button')[0].click();
const up = column(0);
table.tHead.querySelectorAll('button')[0].click();
const down = column(0);
const input = document.querySelector('[data-labels] input');
input.value = 0;
input.oninput();
const film = document.querySelector('.film input');
film.value = 0;
film.oninput();
parent.postMessage(JSON.stringify({
  width: innerWidth, scroll: document.documentElement.scrollWidth, wide, before, up, down, last,
  first: value.textContent,
  hidden: input.hidden, label: document.querySelector('output').textContent,
  frames: [...document.querySelectorAll('.frame')].map(x => x.hidden), pwned: window.pwned === undefined,
  broken: [...document.images].filter(x => !x.complete || !x.naturalWidth).length,
  background: getComputedStyle(document.body).backgroundColor}), '*');
"""
# A window of Chromium has at least 500 pixels; a frame can be as narrow as a phone.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe src="report.html" width="{}" height="2400" style="border: 0"></iframe>
<script>onmessage = event => {{ document.documentElement.dataset.probe = event.data; }};</script>
"""
SCHEMES = {'light': (1, 'rgb(255, 255, 255)'), 'dark': (0, 'rgb(20, 23, 27)')}


@pytest.fixture(name='chromium', scope='session')
def _chromium():
    path = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
    return path or pytest.skip('no chromium; apt-get install chromium')


def browse(chromium, page, *options, width: int, scheme: str) -> str:
    command = [chromium, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars',
               f'--user-data-dir={page.parent / "profile"}', f'--window-size={width},2400',
               '--virtual-time-budget=5000', f'--blink-settings=preferredColorScheme={SCHEMES[scheme][0]}', *options,
               f'file://{page}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.browser
@pytest.mark.parametrize('scheme', SCHEMES)
@pytest.mark.parametrize('width', [390, 1200])
def test_in_a_browser(copy, tmp_path, chromium, width, scheme):
    rewrite(copy / 'figures' / 'heads.json', caption=f'{EVIL} {"long" * 100}')
    page = tmp_path / 'report.html'
    text = report.run_page(copy)[0]
    # The page's own policy lets no other script run; with the probe's added, that of the caption still must not.
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    page.write_text(text.replace('script-src ', f"script-src 'sha256-{digest}' ").replace(
        '</body>', f'<script>{PROBE}</script></body>'))
    frame = tmp_path / 'frame.html'
    frame.write_text(FRAME.format(width))
    found = re.search('data-probe="([^"]*)"', browse(chromium, frame, '--dump-dom', width=1300, scheme=scheme))
    seen = json.loads(html.unescape(found[1]))
    assert seen['width'] == width and seen['scroll'] <= width and seen['wide'] == []
    assert seen['pwned'] and seen['broken'] == 0 and seen['background'] == SCHEMES[scheme][1]
    assert seen['up'] == sorted(seen['before'], key=str.lower) != seen['before'] and seen['down'] == seen['up'][::-1]
    assert seen['first'] != seen['last'] and seen['label'] == '0' and not seen['hidden']
    assert seen['frames'] == [False, True]
    picture = tmp_path / 'page.png'
    browse(chromium, page, f'--screenshot={picture}', width=width, scheme=scheme)
    assert struct.unpack('>II', picture.read_bytes()[16:24]) == (width, 2400)
