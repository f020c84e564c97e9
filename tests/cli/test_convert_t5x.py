"""`convert --from_t5x` and `--to_t5x`: round trips and errors."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from remixer_t5x import build_model
from remixer_t5x.api import saved_models
from remixer_t5x.cli.main import main
from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint
from tests.support.paths import GOLDEN

# As in tests/golden/make_t5x_checkpoints.py.
MODEL = """from __gin__ import dynamic_registration

import seqio

EMBED_DIM = 16
NUM_HEADS = 2
HEAD_DIM = 4
MLP_DIM = 24
REMIXER_DIM = 24
NUM_ENCODER_LAYERS = 2
NUM_DECODER_LAYERS = 3
VOCAB_SIZE = 64
VOCABULARY = @seqio.PassThroughVocabulary()
seqio.PassThroughVocabulary.size = 64
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('convert')
    shutil.unpack_archive(GOLDEN / 't5x_checkpoints.tar.gz', folder, filter='data')
    (folder / 'sizes.gin').write_text(MODEL)
    return folder


def convert(folder: pathlib.Path, *flags: str) -> int:
    return main(['convert', '--gin_file=models/t5_1_1.gin', f'--gin_file={folder}/sizes.gin', *flags])


@pytest.fixture(scope='module')
def model_dir(folder) -> str:
    """Converts a T5X checkpoint and returns the MODEL_DIR."""
    path = str(folder / 'ours')
    assert convert(folder, f'--from_t5x={folder / "t5_1_1"}', f'--to={path}') == 0
    return path


@pytest.mark.parametrize(('own_names', 'step'), [(False, 7), (True, 0)])
def test_a_checkpoint_survives_a_round_trip(folder, model_dir, tmp_path, own_names, step, capsys):
    """A renamed checkpoint has step 0."""
    checkpoint = model_dir if step else shutil.copytree(f'{model_dir}/checkpoints/7', tmp_path / 'final')
    flags = ('--own_names',) if own_names else ()
    assert convert(folder, f'--checkpoint={checkpoint}', f'--to_t5x={tmp_path}/theirs', *flags) == 0
    assert 'bit-identical' in capsys.readouterr().out
    names = [path.name for path in (tmp_path / f'theirs/checkpoint_{step}').iterdir()]
    assert ('target.encoder.layers_0.mlp.wo.kernel' in names) != own_names
    model = build_model('models/t5_1_1.gin', str(folder / 'sizes.gin'))
    abstract = saved_models.get_abstract_params(model)
    (original, _), (converted, converted_step) = (
        t5x_checkpoint.read_t5x_checkpoint(str(path), abstract) for path in (folder / 't5_1_1', tmp_path / 'theirs')
    )
    assert converted_step == step
    jax.tree.map(np.testing.assert_array_equal, original, converted)


@pytest.mark.parametrize(
    ('flags', 'words'),
    [
        (['encoder_decoder.EncoderDecoder.tied=True'], 'tied of the model is True'),
        (['ACTIVATION="silu"'], 'got silu'),
        (['positions.RelativePositionBias.max_distance=64'], 'max_distance of'),
        (
            ['attention.SelfAttention.position_bias=@positions.RelativePositionBias']
            + [f'{side}_POSITION_BIAS=None' for side in ('ENCODER', 'DECODER')],
            'got a bias in each layer',
        ),
    ],
)
def test_a_model_that_computes_something_else_than_t5xs_network_is_refused(
    folder, model_dir, tmp_path, capsys, flags, words
):
    gin_flags = [f'--gin.{flag}' for flag in flags]
    assert convert(folder, f'--checkpoint={model_dir}', f'--to_t5x={tmp_path}', *gin_flags) == 2
    error = capsys.readouterr().err
    assert words in error and '--own_names' in error
