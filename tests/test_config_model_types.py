"""Every model has a decoder-only form, and no model type treats id 0 within a text as padding."""

import pathlib

import jax
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x import axes, build_model
from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface
from remixer_t5x.optim import train_step

CONFIGS = pathlib.Path(__file__).parent.parent / 'configs'
DECODER_ONLY = 'model_types/decoder_only.gin'
OTHER_TYPES = {'bert', 'modern_bert'}
MODELS = sorted({path.stem for path in (CONFIGS / 'models').glob('*.gin')} - OTHER_TYPES)


@pytest.mark.parametrize('name', MODELS)
def test_every_model_has_a_decoder_only_form(name):
    model = build_model(f'models/{name}.gin', 'sizes/tiny.gin', DECODER_ONLY, NUM_DECODER_LAYERS=1)
    batch = batch_formats.get_abstract_batch(model.model_type, {'targets': 32}, batch_size=2, pack=True)
    params = nn.unbox(interface.compute_param_shapes(model, {name: array.shape for name, array in batch.items()}))
    jax.eval_shape(model.loss, params, batch)
    names = str(jax.tree.structure(params))
    assert model.model_type == 'decoder_only' and 'cross' not in names and "'encoder'" not in names


# For each model type: gin files, feature lengths and macros.
TYPES = {
    'encoder_decoder': (['models/t5_1_1.gin'], {'inputs': 9, 'targets': 7}, {}),
    'decoder_only': (['models/gpt2.gin'], {'targets': 8}, {}),
    'encoder_only': (['models/bert.gin'], {'inputs': 9, 'targets': 9}, {}),
    **{
        name: (['models/t5_1_1.gin', f'model_types/{name}.gin'], {'inputs': 9, 'targets': targets}, macros)
        for name, targets, macros in (
            ('classifier', 4, {'LABELS': ('O', 'B')}),
            ('token_labels', 9, {'LABELS': ('O', 'B')}),
            ('span', 9, {}),
            ('embedding', 4, {}),
        )
    },
}
REGRESSION = (['models/t5_1_1.gin', 'model_types/classifier.gin'], {'inputs': 9, 'targets': 4}, {})
PREFIX = (['models/t5_1_1.gin', DECODER_ONLY], {'inputs': 5, 'targets': 4}, {'PREFIX_LM': True})


def build_small_model(files, **macros):
    return build_model(*files, 'sizes/tiny.gin', VOCAB_SIZE=12, EMBED_DIM=16, NUM_HEADS=2, HEAD_DIM=8, **macros)


def test_the_table_of_optional_methods_lists_the_model_types_that_have_them():
    models = {name: build_small_model(files, **macros) for name, (files, _, macros) in TYPES.items()}
    assert models.keys() == batch_formats.FORMATS.keys()
    for method, (_, model_types) in interface.OPTIONAL_MODEL_METHODS.items():
        assert set(model_types) == {name for name, model in models.items() if hasattr(model, method)}, method


@pytest.mark.parametrize(
    ('files', 'lengths', 'macros'), [*TYPES.values(), PREFIX, REGRESSION], ids=[*TYPES, 'prefix', 'regression']
)
def test_renaming_ids_changes_no_loss(files, lengths, macros):
    """Only segment ids, weights and trailing zeros mark padding, so a token may be renamed to id 0."""
    model = build_small_model(files, **macros)
    renamed_ids = np.arange(12)
    renamed_ids[[0, 7]] = 7, 0
    batch, renamed = {}, {}
    for name, array in batch_formats.get_abstract_batch(model.model_type, lengths, batch_size=3).items():
        values = np.random.default_rng(len(batch)).integers(1, 12, array.shape).astype(array.dtype)
        if 'tokens' in name:
            values[:, 2:4] = 7, 3
            renamed[name] = renamed_ids[values].astype(np.int32)
            # Padding at the end of each row has id 0.
            values[:, 4:] = renamed[name][:, 4:] = 0
        elif name == 'labels':
            values %= 2
        else:
            values[...] = 1
            values[..., 4:] = 0 if values.ndim == 2 else 1
        batch[name] = values
    shapes = interface.compute_param_shapes(model, {name: array.shape for name, array in batch.items()})
    rng = np.random.default_rng(0)
    boxed = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(np.float32), shapes)

    def permute_vocabulary(leaf):
        value = leaf.value
        return np.take(value, renamed_ids, leaf.names.index(axes.VOCAB)) if axes.VOCAB in leaf.names else value

    permuted = jax.tree.map(permute_vocabulary, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    loss = jax.jit(model.loss)
    np.testing.assert_allclose(loss(permuted, {**batch, **renamed})[0], loss(nn.unbox(boxed), batch)[0], rtol=1e-5)


@pytest.mark.parametrize('name', ['encoder_decoder', 'decoder_only', 'encoder_only', 'classifier', 'token_labels'])
def test_label_smoothing_is_not_evaluated(name):
    files, lengths, macros = TYPES[name]
    smoothed, plain = (build_small_model(files, LABEL_SMOOTHING=smoothing, **macros) for smoothing in (0.2, 0.0))
    batch = batch_formats.get_abstract_batch(plain.model_type, lengths, batch_size=3)
    params = nn.unbox(interface.compute_param_shapes(plain, {name: array.shape for name, array in batch.items()}))

    def trace(make_function):
        return [str(jax.make_jaxpr(make_function(model))(params, batch)) for model in (smoothed, plain)]

    smoothed_loss, plain_loss = trace(lambda model: model.loss)
    assert smoothed_loss != plain_loss
    smoothed_evaluation, plain_evaluation = trace(train_step.make_eval_step)
    assert smoothed_evaluation == plain_evaluation
