"""T5X checkpoints, read without T5X, compute T5X's logits; checkpoints that we write are read back."""

import functools
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.feed_forward import GatedMLP, ReluMLP
from remixer_t5x.models.sublayers.remixer import Remixer
from tests.interop import small_models
from tests.interop.small_models import abstract_params, random_params
from tests.support import references
from tests.support.error_lines import error_message
from tests.support.paths import GOLDEN

KINDS = ('t5_1_1', 't5_1_1_orbax', 't5_1_0', 't5_1_1_scanned')
# As in tests/golden/make_t5x_checkpoints.py.
VOCAB, EMBED, HEADS, HEAD_DIM, MLP, STEP = 64, 16, 2, 4, 24, 7
GATED = functools.partial(GatedMLP, hidden_dim=MLP)
RELU = functools.partial(ReluMLP, hidden_dim=MLP)


@functools.cache
def make_model(mlp=GATED, num_decoder_layers=3, tied=False) -> Seq2Seq:
    layers = (2, num_decoder_layers)
    return small_models.t5(mlp, mlp, layers, VOCAB, EMBED, HEAD_DIM, tied=tied, scaled_output=tied)


def model_of(kind: str) -> Seq2Seq:
    return make_model(RELU, tied=True) if kind == 't5_1_0' else make_model()


@pytest.fixture(scope='module')
def golden(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp('t5x')
    shutil.unpack_archive(GOLDEN / 't5x_checkpoints.tar.gz', folder, filter='data')
    return folder


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(module, params, inputs, targets):
    return module.apply({'params': params}, inputs, targets, enable_dropout=False)


@pytest.mark.parametrize('kind', KINDS)
def test_a_t5x_checkpoint_gives_the_logits_of_t5x(golden, kind):
    model = model_of(kind)
    params, step = t5x_checkpoint.read_t5x_checkpoint(str(golden / kind), abstract_params(model))
    assert step == STEP
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'float32'}
    with np.load(golden / kind / 'outputs.npz') as arrays:
        inputs, targets, expected = arrays['inputs'], arrays['targets'], arrays['logits']
    logits = compute_logits(model.module, params, inputs, np.pad(targets[:, :-1], ((0, 0), (1, 0))))
    difference = np.max(np.abs(np.asarray(logits) - expected)[targets > 0])
    assert difference < 1e-5 * np.max(np.abs(expected)), difference


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('own_names', [False, True], ids=['names of T5X', 'our names'])
def test_t5x_reads_what_is_written(tmp_path, own_names):
    references.require('t5x')
    from t5x import checkpoints

    model = make_model()
    params = random_params(model)
    folder = t5x_checkpoint.write_t5x_checkpoint(str(tmp_path), params, STEP, own_names)
    loaded = checkpoints.load_t5x_checkpoint(folder)
    assert int(loaded['state']['step']) == STEP
    ours, theirs = (tree['decoder'] for tree in (params, loaded['target']))
    wi = ours['run_0']['layer']['gated_mlp']['wi_0']['kernel']
    if own_names:
        np.testing.assert_array_equal(theirs['run_0']['layer']['gated_mlp']['wi_0']['kernel'], wi)
    for index in range(0 if own_names else 3):
        np.testing.assert_array_equal(theirs[f'layers_{index}']['mlp']['wi_0']['kernel'], wi[index])


@pytest.mark.parametrize('kind', ['t5_1_1', 't5_1_0'])
def test_a_written_checkpoint_has_the_format_of_t5x_and_reads_back_bit_for_bit(golden, tmp_path, kind):
    model = model_of(kind)
    params = random_params(model)
    for step in (3, 12):
        folder = pathlib.Path(t5x_checkpoint.write_t5x_checkpoint(str(tmp_path), params, step))
        assert folder.name == f'checkpoint_{step}'
    read, step = t5x_checkpoint.read_t5x_checkpoint(str(tmp_path), abstract_params(model))
    assert step == 12
    jax.tree.map(np.testing.assert_array_equal, read, params)
    folders = (folder, golden / kind / 'checkpoint_7')
    ours, theirs = (serialization.msgpack_restore((path / 'checkpoint').read_bytes()) for path in folders)
    assert ours['version'] == theirs['version']
    assert jax.tree.structure(ours['optimizer']['target']) == jax.tree.structure(theirs['optimizer']['target'])
    name = 'target.encoder.layers_0.mlp.wo.kernel'
    first, second = (json.loads((path / name / '.zarray').read_text()) for path in folders)
    assert all(first[key] == second[key] for key in ('shape', 'dtype', 'order', 'zarr_format'))


def test_models_that_t5xs_network_lacks_are_only_written_with_our_names(tmp_path):
    model = make_model(functools.partial(Remixer, hidden_dim=8, max_length=16))
    params = random_params(model)
    with pytest.raises(UserError, match='corresponds to .*remixer.*--own_names'):
        t5x_checkpoint.write_t5x_checkpoint(str(tmp_path), params, 1)
    t5x_checkpoint.write_t5x_checkpoint(str(tmp_path), params, 1, own_names=True)
    jax.tree.map(
        np.testing.assert_array_equal,
        t5x_checkpoint.read_t5x_checkpoint(str(tmp_path), abstract_params(model))[0],
        params,
    )


def copy_and_change(golden, tmp_path, change, kind='t5_1_1'):
    """Copies a T5X checkpoint, and applies `change` to the parameters in its msgpack file."""
    copy = tmp_path / 'checkpoint_7'
    shutil.copytree(golden / kind / 'checkpoint_7', copy)
    contents = serialization.msgpack_restore((copy / 'checkpoint').read_bytes())
    change(contents['optimizer']['target'])
    (copy / 'checkpoint').write_bytes(serialization.msgpack_serialize(contents))
    return copy


def test_a_checkpoint_in_bfloat16_is_read(golden, tmp_path):
    """Published T5.1.1 checkpoints are float32; users of T5X save bfloat16 for inference."""
    value = np.arange(EMBED * VOCAB, dtype=np.float32).reshape(VOCAB, EMBED).astype(jnp.bfloat16)
    copy = copy_and_change(golden, tmp_path, lambda target: target['token_embedder'].update(embedding=value))
    params, _ = t5x_checkpoint.read_t5x_checkpoint(str(copy), abstract_params(make_model()))
    np.testing.assert_array_equal(params['token_embedder']['embedding'], value.astype(np.float32))


def test_layers_with_different_position_biases_raise_an_error(golden, tmp_path):
    bias = np.random.default_rng(0).normal(size=(HEADS, 2, 32))

    def change(target):
        target['encoder']['encoder']['relpos_bias']['rel_embedding'] = bias

    copy = copy_and_change(golden, tmp_path, change, 't5_1_1_scanned')
    with pytest.raises(UserError, match='different position bias'):
        t5x_checkpoint.read_t5x_checkpoint(str(copy), abstract_params(make_model()))


@pytest.mark.parametrize(
    ('model', 'message'),
    [
        (make_model(num_decoder_layers=2), 'model has no decoder/layers_2'),
        (make_model(num_decoder_layers=4), 'it has no decoder/layers_3'),
        (make_model(RELU), 'it has no .*mlp/wi'),
        (make_model(functools.partial(GatedMLP, hidden_dim=MLP + 8)), r'wi_0/kernel has shape \(3, 16, 24\) in'),
    ],
    ids=['fewer layers', 'more layers', 'other feed-forward', 'wider'],
)
def test_a_checkpoint_of_another_model_raises_a_one_line_error(golden, model, message):
    assert re.search(
        message, error_message(t5x_checkpoint.read_t5x_checkpoint, str(golden / 't5_1_1'), abstract_params(model))
    )


def test_folders_without_a_checkpoint_raise_an_error(golden, tmp_path):
    def check(words, path=tmp_path):
        with pytest.raises(UserError, match=words):
            t5x_checkpoint.read_t5x_checkpoint(str(path), abstract_params(make_model()))

    check('does not contain a T5X checkpoint', tmp_path / 'nowhere')
    (tmp_path / 'checkpoint_3.tmp').mkdir()
    (tmp_path / 'checkpoint_4').mkdir()
    check('does not contain a T5X checkpoint')
    check('gcloud storage', 'gs://bucket/checkpoint_1')
    (tmp_path / 'checkpoint_4' / 'checkpoint').write_bytes(b'model_checkpoint_path: "model.ckpt-1"')
    check('TensorFlow')
    (tmp_path / 'checkpoint_4' / 'checkpoint').write_bytes(b'\x81\xa1')
    check('cannot be read')
    with pytest.raises(UserError, match='already exists'):
        t5x_checkpoint.write_t5x_checkpoint(str(golden / 't5_1_1'), random_params(make_model()), STEP)


TABLE = 'target.token_embedder.embedding'


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda spec: spec['kvstore'].update(path='a/../../elsewhere'), 'outside of'),
        (lambda spec: spec['kvstore'].update(path='link'), 'is a link to '),
        (lambda spec: spec.update(driver='json'), 'must be zarr'),
        (lambda spec: spec['metadata'].update(shape=[10**6, 10**6]), r'has shape \(1000000, 1000000\) in'),
        (lambda spec: spec['metadata'].update(shape=[-VOCAB, -EMBED]), r'requires .*; copy'),
    ],
)
def test_a_checkpoint_with_invalid_specs_raises_a_one_line_error(golden, tmp_path, change, message):
    copy = copy_and_change(golden, tmp_path, lambda target: change(target['token_embedder']['embedding']))
    shutil.copytree(copy / TABLE, tmp_path / 'elsewhere')
    if 'link' in message:
        (copy / 'link').symlink_to(tmp_path / 'elsewhere')
    assert re.search(
        message, error_message(t5x_checkpoint.read_t5x_checkpoint, str(copy), abstract_params(make_model()))
    )


@pytest.mark.parametrize(
    ('kind', 'change'),
    [
        ('t5_1_1', {'shape': [10**7, 10**7]}),
        ('t5_1_1', {'dtype': '|O'}),
        ('t5_1_1_orbax', {'chunks': [10**7, 10**7]}),
    ],
)
def test_an_array_with_invalid_metadata_raises_a_one_line_error(golden, tmp_path, kind, change):
    """A zarr array without chunks is filled with a constant, whatever its size; Orbax stores arrays in a database."""
    copy = tmp_path / 'checkpoint_7'
    shutil.copytree(golden / kind / 'checkpoint_7', copy)
    if kind == 't5_1_1':
        file = copy / TABLE / '.zarray'
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    else:
        store = ts.KvStore.open({'driver': 'ocdbt', 'base': f'file://{copy}/state/'}).result()
        key = next(key for key in store.list().result() if key.startswith(b'target.token_embedder') and b'.z' in key)
        store.write(key, json.dumps({**json.loads(store[key]), **change})).result()
    error_message(t5x_checkpoint.read_t5x_checkpoint, str(copy), abstract_params(make_model()))


@settings(max_examples=50, deadline=None)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3),
        lambda inner: st.dictionaries(st.sampled_from(['version', 'optimizer', 'target', 'state', 'step']), inner),
        max_leaves=6,
    ).map(serialization.msgpack_serialize)
)
@example(b'\x91' * 3000)
@example(serialization.msgpack_serialize({'version': 3, 'optimizer': {'target': {'a': 'x'}, 'state': {'step': 1}}}))
def test_any_bytes_as_a_checkpoint_raise_a_one_line_error(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / 'checkpoint_1'
    folder.mkdir(exist_ok=True)
    (folder / 'checkpoint').write_bytes(content)
    error_message(t5x_checkpoint.read_t5x_checkpoint, str(folder), {'a': jax.ShapeDtypeStruct((1,), np.float32)})
