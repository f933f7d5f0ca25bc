"""lingrok: how transformers split their work between in-context reasoning and plain associations.

    run = lingrok.load_run('runs/recall_demo-...')
    logits, acts = run.apply(tokens, capture='blocks.*.attn.pattern')
"""

from lingrok.config import ConfigError as ConfigError
from lingrok.config import ModelConfig as ModelConfig
from lingrok.model import apply as apply
from lingrok.pretrained.language import load_pretrained as load_pretrained
from lingrok.run import Run as Run
from lingrok.run import load_run as load_run

__version__ = '0.1.0'
