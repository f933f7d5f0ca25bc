"""Can coefficients, or the task, be read off the residual stream? Linear probes (the authors' answer to reviewers).

    python experiments/modular/probes.py runs/modular_demo-ID
    python experiments/modular/probes.py runs/modular_demo-ID --steps=all      the best block along training

The authors read the factor between two examples at 15 to 20 % and the task at chance, and call it inconclusive. Here
rows with a zero are left out, where x alone tells that the factor is 0 (which would lift chance from 1 / p to 2 / p),
a random table of factors is the control, and the characters of the same factor are read beside its one-hot class.
"""

import functools

from absl import flags

from lingrok import cli
from lingrok.analysis import probes
from lingrok.cli import Expected
from lingrok.figures import features

ROWS = flags.DEFINE_integer('rows', 0, 'rows to fit and test on; 0: 2048, or 16 a residual dimension', lower_bound=0)
ROOT = flags.DEFINE_integer('root', None, 'primitive root of the logarithm; by default 27 for p = 29, else the least')

LP = 'authors to the reviewers, p = 29, 2 and 4 blocks, in words; chance .034'
EXPECTED = [Expected('accuracy of c, 1 shot, y token, after block 0', '.15 to .20', LP, 'c/accuracy[1,1]'),
            Expected('accuracy of c, 1 shot, y token, after the last block', '.15 to .20', LP, 'c/accuracy[-1,1]'),
            Expected('control: a random class of each pair, after the last block', 'not measured there',
                     'baseline: 1 / (p - 1) unless learned by heart', 'c_control/accuracy[-1,1]'),
            Expected('accuracy of c1, 2 shots, best', 'unknown', 'not measured there', 'c1/best'),
            Expected('accuracy of a at the last shot, after the last block', 'chance', LP, 'a/accuracy[-1,-1]'),
            Expected('accuracy of b at the last shot, after the last block', 'chance', LP, 'b/accuracy[-1,-1]')]


def measure(run, **at):
    return run.measure(functools.partial(probes.probes, num_rows=ROWS.value, root=ROOT.value), **at)


if __name__ == '__main__':
    cli.experiment(measure, features.probes, task='modular', expected=EXPECTED, frame=features.probes_frame,
                   curves=('c/best', 'c_control/best', 'c1/best', 'ab/best'))
