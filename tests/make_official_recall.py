"""Writes tests/official_recall.pth and .npz: a random two-layer recall model as torch saves it, and its logits.

    python tests/make_official_recall.py      needs torch, which nothing else here does; the files are kept

The names of the tensors and the arithmetic are those of the official code of arXiv 2406.03068, at a tiny size.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

VOCAB, WIDTH, HIDDEN, LENGTH = 7, 8, 16, 10


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        later = torch.ones(LENGTH, LENGTH).triu(1).bool()
        scores = (x @ self.wk(x).transpose(1, 2) / math.sqrt(WIDTH)).masked_fill(later, -math.inf)
        return self.wo(scores.softmax(-1) @ self.wv(x))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(self.w1(x).relu())


class Block(nn.Module):
    def __init__(self, ff):
        super().__init__()
        self.attention, self.ff = Attention(), ff

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.ff(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer('pe', torch.randn(LENGTH, WIDTH))
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer('freqs_cis', torch.polar(torch.ones_like(angles), angles))
        self.layers = nn.ModuleList([Block(nn.Linear(WIDTH, WIDTH, bias=False)), Block(FeedForward())])
        self.output = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pe
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


if __name__ == '__main__':
    torch.manual_seed(0)
    model = Transformer()
    tokens = torch.randint(0, VOCAB, (3, LENGTH))
    place = Path(__file__).with_name('official_recall.pth')
    torch.save(model.state_dict(), place)
    np.savez(place.with_suffix('.npz'), tokens=tokens.numpy(), logits=model(tokens).detach().numpy())
    print(place, place.stat().st_size)
