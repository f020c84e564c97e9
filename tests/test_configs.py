"""Every shipped gin file is read, every model has its golden number of parameters, and no file is left out."""

import pathlib

import jax
import pytest

from remixer_t5x.cli import gin_config
from remixer_t5x.model.seq2seq import Seq2Seq

CONFIGS = pathlib.Path(__file__).parent.parent / 'configs'
SHAPES = {'encoder_input_tokens': (1, 512), 'decoder_target_tokens': (1, 114)}

# From T5's published v1.1 checkpoints (small to xxl), and 224M in REMIXERS, table 1 (scaled base). The others are ours:
# `remixer-t5x info --gin_file=models/MODEL.gin --gin_file=sizes/SIZE.gin` prints them.
PARAMETERS = {
    ('t5_1_1', 'tiny'): 22_746_880,
    ('t5_1_1', 'small'): 76_961_152,
    ('t5_1_1', 'base'): 247_577_856,
    ('t5_1_1', 'large'): 783_150_080,
    ('t5_1_1', 'xl'): 2_849_757_184,
    ('t5_1_1', 'xxl'): 11_135_332_352,
    ('remixer', 'tiny'): 24_844_040,
    ('remixer', 'small'): 81_155_472,
    ('remixer', 'base'): 253_869_336,
    ('remixer_scaled', 'scaled_base'): 223_973_394,
}


def build(*files: str) -> Seq2Seq:
    gin_config.load(files, [], root='remixer_t5x.model.seq2seq.Seq2Seq', partial=True)
    return gin_config.call(Seq2Seq)


@pytest.mark.parametrize(('model', 'size'), PARAMETERS)
def test_number_of_parameters(model, size):
    built = build(f'models/{model}.gin', f'sizes/{size}.gin')
    shapes = jax.eval_shape(lambda key: built.init(key, SHAPES), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[model, size]


def test_no_model_or_size_is_left_out():
    assert {path.stem for path in (CONFIGS / 'models').glob('*.gin')} == {model for model, _ in PARAMETERS}
    assert {path.stem for path in (CONFIGS / 'sizes').glob('*.gin')} == {size for _, size in PARAMETERS}


@pytest.mark.parametrize('line', ['ENCODER_FEED_FORWARD', 'DECODER_FEED_FORWARD'])
def test_one_line_swaps_half_a_layer(line):
    flags = [(line, '@gated_mlp.GatedMLP')]
    gin_config.load(
        ['models/remixer.gin', 'sizes/tiny.gin'], flags, root='remixer_t5x.model.seq2seq.Seq2Seq', partial=True
    )
    swapped = gin_config.call(Seq2Seq)
    shapes = jax.eval_shape(lambda key: swapped.init(key, SHAPES), jax.random.key(0))
    side, other = ('encoder', 'decoder') if line.startswith('ENCODER') else ('decoder', 'encoder')
    assert 'gated_mlp' in shapes[side]['run_0']['layer'] and 'remixer' not in shapes[side]['run_0']['layer']
    assert 'remixer' in shapes[other]['run_0']['layer']


def test_every_experiment_is_complete_but_for_what_its_header_requires():
    files = sorted((CONFIGS / 'experiments').glob('*.gin'))
    assert len(files) >= 5
    for path in files:
        header = path.read_text().split('include')[0]
        flags = [('MODEL_DIR', '/nowhere')]
        if 'FILES' in header:
            flags.append(('FILES', __file__))
        gin_config.load([f'experiments/{path.name}'], flags, root='remixer_t5x.cli.train.run')


@pytest.mark.parametrize('path', sorted(CONFIGS.rglob('*.gin')), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_file_says_what_it_requires(path):
    header = ''.join(line for line in path.read_text().splitlines(True) if line.startswith('#'))
    assert 'Requires:' in header
    assert path.parent.name == 'experiments' or 'Provides:' in header
