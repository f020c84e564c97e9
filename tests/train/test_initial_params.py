"""Initial parameters from a checkpoint of another model: which are loaded and which are initialized."""

import types

import jax
import numpy as np
import optax
import pytest
import seqio

from remixer_t5x import build_model
from remixer_t5x.data import batch_formats
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.interop import converted_checkpoint
from remixer_t5x.optim import train_state
from remixer_t5x.train import initial_params
from tests.support import hf_folders, saved_run


@pytest.fixture(scope='module')
def seq2seq(tmp_path_factory):
    """The MODEL_DIR of an encoder-decoder with four layers in its encoder."""
    config = f'{saved_run.CONFIG}NUM_ENCODER_LAYERS = 4\n'
    return saved_run.write_run(tmp_path_factory.mktemp('runs') / 'seq2seq', config, steps=(1,))


def load(folder, model_type, fresh=None, renamed=None, vocabularies=None, gin='', **macros):
    """Loads the parameters of a model of this type, and returns them with their description."""
    type_file = '' if model_type == 'encoder_decoder' else f"include 'model_types/{model_type}.gin'\n"
    (folder.parent / f'{model_type}.gin').write_text(f'{saved_run.CONFIG}NUM_ENCODER_LAYERS = 4\n{type_file}{gin}')
    model = build_model(str(folder.parent / f'{model_type}.gin'), **macros)
    plan = train_state.plan_train_state(
        model, optax.sgd(1.0), batch_formats.get_smallest_batch_shapes(model_type), Partitioner()
    )
    ours, theirs = vocabularies or (saved_run.VOCABULARY, None)
    settings = types.SimpleNamespace(
        initial_checkpoint_path=str(folder),
        fresh_parameters=fresh,
        checkpoint_map=renamed or {},
        initial_vocabulary=theirs,
    )
    return initial_params.load_initial_params(
        settings, plan, ours, lambda: plan.create(jax.random.key(0)), model.fresh_parameters
    )


def array_counts(description):
    """Returns the number of fresh arrays and of unused arrays of each module."""
    rows = [line.split() for line in description.splitlines()[1:]]
    return [{row[1]: int(row[2][1:]) for row in rows if row[0] == status} for status in ('fresh', 'unused')]


def test_a_classifier_loads_the_encoder_of_an_encoder_decoder(seq2seq):
    params, description = load(seq2seq, 'classifier', LABELS=('no', 'yes'))
    before, _, _ = converted_checkpoint.read_checkpoint(str(seq2seq))
    assert set(params) == {'token_embedder', 'encoder', 'head'}
    for name in ('token_embedder', 'encoder'):
        for ours, theirs in zip(jax.tree.leaves(params[name]), jax.tree.leaves(before[name]), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert description.startswith(f'parameters of {seq2seq}: 12 arrays are loaded\n')
    fresh, unused = array_counts(description)
    assert all(name.startswith('head/') for name in fresh) and sum(fresh.values()) == 4
    assert unused.pop('logits/kernel') == 1 and sum(unused.values()) == 16


@pytest.mark.parametrize(
    ('fresh', 'message'), [(None, 'does not fit this model'), ('mixr', "FRESH_PARAMETERS must be .* got 'mixr'")]
)
def test_a_decoder_is_only_dropped_by_a_valid_setting(seq2seq, fresh, message):
    with pytest.raises(UserError, match=message):
        load(seq2seq, 'encoder_only', fresh)


RUNS = 'from remixer_t5x.models.architecture import layer\nENCODER_RUNS = ((@encoder/layer.make_layer, 1), ' \
       '(@encoder/layer.make_layer, 2), (@encoder/layer.make_layer, 1))\n'  # fmt: skip
SPLIT_LAYERS = {
    'encoder/run_0/(.*)': r'encoder/run_0/\1[0:1]',
    'encoder/run_1/layer/(gated_mlp/.*)': None,
    'encoder/run_1/(.*)': r'encoder/run_0/\1[1:3]',
    'encoder/run_2/(.*)': r'encoder/run_0/\1[3:4]',
}


def test_layers_of_a_run_can_be_split_over_other_runs(seq2seq):
    params, description = load(seq2seq, 'encoder_decoder', renamed=SPLIT_LAYERS, gin=RUNS)
    before, _, _ = converted_checkpoint.read_checkpoint(str(seq2seq))
    kernel = before['encoder']['run_0']['layer']['self_attention']['query']['kernel']
    for run, layers in ((0, slice(0, 1)), (1, slice(1, 3)), (2, slice(3, 4))):
        ours = params['encoder'][f'run_{run}']['layer']['self_attention']['query']['kernel']
        np.testing.assert_array_equal(ours, kernel[layers])
    assert array_counts(description) == [{'encoder/run_1/layer/gated_mlp': 3}, {}]
    wi = before['encoder']['run_0']['layer']['gated_mlp']['wi_0']['kernel']
    assert not np.array_equal(params['encoder']['run_1']['layer']['gated_mlp']['wi_0']['kernel'], wi[1:3])
    np.testing.assert_array_equal(params['decoder']['final_norm']['scale'], before['decoder']['final_norm']['scale'])


@pytest.mark.parametrize(
    ('renamed', 'words'),
    [({'encoder/run_0': None}, "got 'encoder/run_0'"),
     ({'logits/(.*)': r'logits/\2'}, 'valid replacement'),
     ({'logits/kernel': 'head/kernel'}, 'maps logits/kernel to head/kernel, which is not in'),
     ({'encoder/run_0/(.*)': r'encoder/run_0/\1[2:7]'}, r'has shape \(2, .*\), expected \(4, ')],
    ids=['part', 'no group', 'lacks', 'layers'],
)  # fmt: skip
def test_an_invalid_checkpoint_map_raises_an_error(seq2seq, renamed, words):
    with pytest.raises(UserError, match=words):
        load(seq2seq, 'encoder_decoder', renamed=renamed)


def test_embedding_rows_are_copied_from_the_same_pieces(seq2seq):
    """The run has 26 SentencePiece pieces and 10 sentinels, the checkpoint has bytes and 100 sentinels."""
    pieces = seqio.SentencePieceVocabulary(str(hf_folders.SPIECE), extra_ids=10)
    with pytest.raises(UserError, match='was trained with vocabulary'):
        load(seq2seq, 'encoder_decoder', vocabularies=(pieces, None), VOCAB_SIZE=48)
    params, description = load(seq2seq, 'encoder_decoder', vocabularies=(pieces, saved_run.VOCABULARY), VOCAB_SIZE=48)
    before, _, _ = converted_checkpoint.read_checkpoint(str(seq2seq))
    fresh, _ = load(seq2seq, 'encoder_decoder', fresh='e', vocabularies=(pieces, saved_run.VOCABULARY), VOCAB_SIZE=48)
    # <pad>, </s>, <unk>, and the sentinels: <extra_id_0> is the last id of each.
    known = {0: 0, 1: 1, 2: 2, **{pieces.vocab_size - 1 - i: 358 - i for i in range(10)}}
    for tree, path, axis in ((before, ('token_embedder', 'embedding'), 0), (before, ('logits', 'kernel'), 1)):
        ours, theirs, random = (np.moveaxis(np.asarray(t[path[0]][path[1]]), axis, 0) for t in (params, tree, fresh))
        for row in range(48):
            np.testing.assert_array_equal(ours[row], theirs[known[row]] if row in known else random[row])
    assert description.count(f'13 of {pieces.vocab_size} pieces are in the checkpoint') == 2
    attention = params['encoder']['run_0']['layer']['self_attention']['key']['kernel']
    np.testing.assert_array_equal(attention, before['encoder']['run_0']['layer']['self_attention']['key']['kernel'])


def test_the_first_expression_that_matches_decides():
    names = dict.fromkeys(['a/b', 'a/c', 'd'])
    sources = initial_params.find_param_sources(names, {'a/b': None, 'a/(.)': r'x/\1', 'd': 'e[1:2]'})
    assert sources == {'a/b': None, 'a/c': ('x/c', None), 'd': ('e', (1, 2))}
