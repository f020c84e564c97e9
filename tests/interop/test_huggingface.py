"""Weights of Hugging Face's T5 become ours and theirs again, bit by bit, and compute the same on both sides."""

import functools
import json

import gin
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from remixer_t5x import build_model
from remixer_t5x.config import loading
from remixer_t5x.devices.partition import unbox
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.huggingface import t5_tokenizer, table
from remixer_t5x.interop.huggingface.family import Config, Tokenizer
from remixer_t5x.interop.huggingface.t5 import T5
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.models import interface
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention
from remixer_t5x.models.sublayers.relu_mlp import ReluMLP
from remixer_tasks import vocabularies

VOCABULARY = vocabularies.byte(0)
NAMES = ('t5_v1_1_tiny', 't5_v1_0_tiny', 'umt5_tiny')
MODEL = 'remixer_t5x.models.seq2seq.Seq2Seq'


@pytest.fixture(autouse=True)
def _clean_gin():
    yield
    gin.clear_config()


def model_of(folder, source) -> Seq2Seq:
    """The model of the gin file that goes with `source`, as a user's command makes it."""
    path = folder / 'model.gin'
    path.write_text(source.family.gin_text('A test.'))
    return build_model(str(path))


def shipped(*files, flags=()) -> Seq2Seq:
    return loading.values(loading.Given([*files, 'sizes/tiny.gin'], flags), 'MODEL')[0]


def batch_of(arrays):
    targets = arrays['targets']
    return {
        'encoder_input_tokens': arrays['inputs'],
        'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets,
    }


@functools.cache
def compiled_logits(model):
    names = ('encoder_input_tokens', 'decoder_input_tokens')
    return jax.jit(
        lambda params, batch: model.module.apply({'params': params}, *map(batch.get, names), enable_dropout=False)
    )


def assert_same_logits(model, params, arrays) -> None:
    is_target = arrays['targets'] > 0
    ours = np.asarray(compiled_logits(model)(params, batch_of(arrays)))[is_target]
    theirs = arrays['logits'][is_target]
    assert np.max(np.abs(ours - theirs)) < 1e-5 * np.max(np.abs(theirs))


def assert_same_file(folder, weights) -> None:
    """The weights in `folder` have the names and the bits of `weights`."""
    written = load_file(folder / 'model.safetensors')
    assert set(written) == set(weights)
    for name, array in weights.items():
        assert written[name].dtype == np.float32 and np.array_equal(written[name], array), name


def folder_of(folders, path, arrays, name='t5_v1_0_tiny'):
    return folders.write(path, folders.CONFIGS[name], folders.weights_of(arrays))


def test_a_gated_untied_model_equals_recorded_outputs(folders, tmp_path):
    arrays = folders.recorded('t5_v1_1_tiny')
    source = huggingface.read(str(folder_of(folders, tmp_path / 'hf', arrays, 't5_v1_1_tiny')))
    assert_same_logits(model_of(tmp_path, source), source.params(), arrays)


def test_a_model_with_a_bias_in_each_layer_equals_recorded_outputs(folders, tmp_path):
    """umT5: logits, and greedy answers through the decoding caches."""
    arrays = folders.recorded('umt5_tiny')
    source = huggingface.read(str(folder_of(folders, tmp_path / 'hf', arrays, 'umt5_tiny')))
    model, params = model_of(tmp_path, source), source.params()
    assert params['decoder']['run_0']['layer']['self_attention']['position_bias']['embedding'].shape == (2, 2, 32)
    assert huggingface.describe(model, VOCABULARY) == (source.family, {'encoder': (3,), 'decoder': (2,)})
    assert_same_logits(model, params, arrays)
    length = arrays['greedy'].shape[1]
    greedy = jax.jit(lambda params, batch: model.predict(params, batch, length))
    np.testing.assert_array_equal(greedy(params, {'encoder_input_tokens': arrays['inputs']}), arrays['greedy'])


def first_t5_model() -> Seq2Seq:
    """The model of the recorded first T5, without gin, whose factories would read gin whenever something is traced."""
    attention = {'num_heads': 2, 'head_dim': 8}
    own, cross = (functools.partial(kind, **attention) for kind in (SelfAttention, CrossAttention))
    mlp = functools.partial(ReluMLP, hidden_dim=40)

    def stack(count, *sublayers):
        layer, bias = (
            functools.partial(PreNorm, sublayers=sublayers),
            functools.partial(RelativePositionBias, num_heads=2),
        )
        return functools.partial(Stack, runs=((layer, count),), position_bias=bias)

    return Seq2Seq(EncoderDecoder(64, 24, stack(3, own, mlp), stack(2, own, cross, mlp), tied=True, scaled_output=True))


class FirstT5:
    """The recorded first T5 as our model; every function is compiled once for all tests."""

    def __init__(self, folders, path):
        self.arrays = folders.recorded('t5_v1_0_tiny')
        source = huggingface.read(str(folder_of(folders, path / 'hf', self.arrays)))
        self.model, self.params = first_t5_model(), source.params()
        self.loss = jax.jit(self.model.loss)
        self.score = jax.jit(self.model.score)
        length = self.arrays['greedy'].shape[1]
        search = BeamSearch(self.arrays['beams'].shape[1], PowerPenalty(0.6))
        self.greedy = jax.jit(lambda params, batch: self.model.predict(params, batch, length))
        self.beams = jax.jit(lambda params, batch: self.model.generate(params, batch, length, decoder=search))

    def check(self, params, arrays) -> None:
        """All that `arrays` say is what `params` give: logits, losses, what is generated."""
        assert_same_logits(self.model, params, arrays)
        batch, wanted = batch_of(arrays), float(arrays['loss'])
        loss, sums = self.loss(params, batch)
        assert float((loss - sums['z_loss']) / sums['weights']) == pytest.approx(wanted, rel=1e-5)
        assert -float(self.score(params, batch).sum() / sums['weights']) == pytest.approx(wanted, rel=1e-5)
        inputs = {'encoder_input_tokens': arrays['inputs']}
        np.testing.assert_array_equal(self.greedy(params, inputs), arrays['greedy'])
        found = self.beams(params, inputs)
        np.testing.assert_array_equal(found.tokens, arrays['beams'])
        np.testing.assert_allclose(found.scores, arrays['beam_scores'], rtol=1e-5)


@pytest.fixture(scope='module')
def first_t5(folders, tmp_path_factory):
    return FirstT5(folders, tmp_path_factory.mktemp('first_t5'))


def test_a_tied_scaled_model_equals_recorded_outputs(first_t5):
    first_t5.check(first_t5.params, first_t5.arrays)


def test_a_tied_scaled_model_equals_hugging_face_live(folders, first_t5, v1_0_maker, tmp_path):
    arrays = v1_0_maker.make_arrays(seed=3)
    first_t5.check(huggingface.read(str(folder_of(folders, tmp_path / 'hf', arrays))).params(), arrays)


def test_a_tied_table_gets_the_gradients_of_both_its_uses(first_t5):
    """By a difference quotient: the loss takes its own gradient, of a kernel that is the table transposed."""
    params, batch = first_t5.params, batch_of(first_t5.arrays)
    table = params['token_embedder']['embedding']
    direction = np.random.default_rng(0).standard_normal(table.shape, np.float32)

    def loss(table):
        return float(first_t5.loss({**params, 'token_embedder': {'embedding': table}}, batch)[0])

    gradient = jax.jit(jax.grad(lambda params: first_t5.model.loss(params, batch)[0]))(params)
    slope = np.sum(gradient['token_embedder']['embedding'] * direction)
    quotient = (loss(table + 1e-3 * direction) - loss(table - 1e-3 * direction)) / 2e-3
    assert slope == pytest.approx(quotient, rel=2e-2)


@pytest.mark.parametrize('name', NAMES)
def test_a_round_trip_gives_the_file_back(folders, tmp_path, name):
    arrays = folders.recorded(name)
    weights, config = folders.weights_of(arrays), folders.CONFIGS[name]
    source = huggingface.read(str(folders.write(tmp_path / 'hf', config, weights, shards=3)))
    huggingface.write(str(tmp_path / 'back'), source.family, source.params(), source.family.one_run())
    assert_same_file(tmp_path / 'back', weights)
    again = huggingface.read(str(tmp_path / 'back'))
    assert again.family == source.family and again.family.eos_id == 1
    written = json.loads((tmp_path / 'back' / 'config.json').read_text())
    assert {**config, 'tie_word_embeddings': written['tie_word_embeddings']}.items() <= written.items()
    generation = json.loads((tmp_path / 'back' / 'generation_config.json').read_text())
    assert generation == {'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0}


SMALL = st.integers(1, 3)


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(*[SMALL] * 7), *[st.booleans()] * 4, st.lists(SMALL, min_size=1, max_size=3),
    st.integers(0, 1000),
)  # fmt: skip
def test_any_architecture_goes_there_and_back(sizes, gated, tied, scaled, layer_biases, runs, seed):
    names = ('vocab_size', 'embed_dim', 'mlp_dim', 'num_heads', 'head_dim')
    t5 = T5(
        **dict(zip(names, sizes, strict=False)), num_encoder_layers=sum(runs), num_decoder_layers=sizes[6], gated=gated,
        tied=tied, scaled_output=scaled, num_buckets=4, layer_biases=layer_biases,
    )  # fmt: skip
    layers = {'encoder': tuple(runs), 'decoder': (sizes[6],)}
    rng = np.random.default_rng(seed)
    theirs = {
        name: rng.standard_normal(row.shape, np.float32)
        for row in t5.rows()
        for _, names in row.places(layers)
        for name in names
    }
    tensors = _InMemory(theirs)
    params = t5.read(tensors, 'memory')
    back = table.write(t5.rows(), t5.one_run(), params)
    assert set(back) == set(theirs) and all(np.array_equal(back[name], theirs[name]) for name in theirs)
    # The same layers in several runs are the same names.
    parted = {**params, 'encoder': _parted(params['encoder'], runs)}
    back = table.write(t5.rows(), layers, parted)
    assert set(back) == set(theirs) and all(np.array_equal(back[name], theirs[name]) for name in theirs)
    assert T5.from_config(Config(t5.to_config(), 'memory'), tensors) == t5


class _InMemory(dict):
    def shape(self, name):
        return self[name].shape

    def renamed(self, names):
        return _InMemory({new: self[name] for new, name in names.items()})


def _parted(stack, runs):
    rest = {name: child for name, child in stack.items() if name != 'run_0'}
    ends = np.cumsum(runs)
    parts = {
        f'run_{i}': jax.tree.map(lambda x, i=i: x[ends[i] - runs[i] : ends[i]], stack['run_0'])
        for i in range(len(runs))
    }
    return {**rest, **parts}


# What transformers 5 can say in addition to the published models: a config, whether lm_head is apart from the table.
MIXTURES = {
    'gated_tied_scaled': ({'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': True}, False),
    'gated_tied_unscaled': ({'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, False),
    'relu_untied_unscaled': ({'feed_forward_proj': 'relu', 'tie_word_embeddings': False}, True),
    'relu_untied_scaled': ({'feed_forward_proj': 'relu'}, True),
    'other_numbers': (
        {
            'relative_attention_num_buckets': 20,
            'relative_attention_max_distance': 40,
            'layer_norm_epsilon': 1e-2,
            'tie_word_embeddings': True,
        },
        False,
    ),
}


@pytest.mark.parametrize('name', MIXTURES)
def test_mixtures_compute_the_same_there_here_and_there_again(name, v1_0_maker, tmp_path):
    import torch
    import transformers

    changes, apart = MIXTURES[name]
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32,
        d_model=24,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        **changes,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    if apart:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(32, 24))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if 'relative_attention_bias' in weight_name:
                weight.normal_()
    rng = np.random.default_rng(0)
    # Longer than the distances that have buckets of their own.
    arrays = {'inputs': rng.integers(2, 32, (2, 70)), 'targets': rng.integers(2, 32, (2, 60))}
    arrays['targets'][1, 40:] = 0
    arrays |= outputs(model, arrays)
    model.save_pretrained(tmp_path / 'hf')
    source, back = huggingface.read(str(tmp_path / 'hf')), tmp_path / 'back'
    params = source.params()
    assert_same_logits(model_of(tmp_path, source), params, arrays)
    huggingface.write(str(back), source.family, params, source.family.one_run())
    found = outputs(transformers.T5ForConditionalGeneration.from_pretrained(back).eval(), arrays)
    np.testing.assert_array_equal(found['logits'], arrays['logits'])
    assert huggingface.read(str(back)).family == source.family
    # Version 4 would make an output at random where a table that is not scaled is alone.
    assert ('lm_head.weight' in load_file(back / 'model.safetensors')) == (
        not (source.family.tied and source.family.scaled_output)
    )
    if name != 'relu_untied_scaled':
        # As version 4 said it, in one field.
        config = {**_config(tmp_path / 'hf'), 'tie_word_embeddings': changes['tie_word_embeddings']}
        del config['scale_decoder_outputs']
        (tmp_path / 'hf' / 'config.json').write_text(json.dumps(config))
        assert huggingface.read(str(tmp_path / 'hf')).family == source.family


def _config(folder):
    return json.loads((folder / 'config.json').read_text())


def outputs(model, arrays):
    import torch

    inputs, targets = torch.from_numpy(arrays['inputs']), torch.from_numpy(arrays['targets'])
    with torch.no_grad():
        out = model(
            input_ids=inputs, attention_mask=(inputs > 0).long(), labels=targets.masked_fill(targets == 0, -100)
        )
    return {'logits': out.logits.numpy(), 'loss': out.loss.numpy()}


def test_our_model_loads_in_transformers(v1_0_maker, tmp_path):
    """Random parameters of our own model, in two runs, rounded to bfloat16."""
    import transformers

    flags = [('ENCODER_RUNS', '((@encoder/layer.make_layer, 1), (@encoder/layer.make_layer, 2))')]
    flags += [(name, str(value)) for name, value in SIZES.items()]
    model = shipped('models/t5_1_1.gin', flags=flags)
    t5, runs = huggingface.describe(model, VOCABULARY)
    assert runs == {'encoder': (1, 2), 'decoder': (2,)} and t5.gated and not t5.tied and not t5.scaled_output
    params = _random(model)
    huggingface.write(str(tmp_path / 'hf'), t5, params, runs, 'bfloat16')
    rng = np.random.default_rng(0)
    arrays = {'inputs': rng.integers(2, 48, (2, 9)), 'targets': rng.integers(2, 48, (2, 7))}
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / 'hf').float().eval()
    arrays |= outputs(theirs, arrays)
    assert_same_logits(model, safetensors_export.rounded(params, 'bfloat16'), arrays)


SIZES = {'VOCAB_SIZE': 48, 'EMBED_DIM': 16, 'MLP_DIM': 24, 'NUM_HEADS': 2, 'HEAD_DIM': 4, 'NUM_DECODER_LAYERS': 2}


OWN_BIAS = 'attention.SelfAttention.position_bias'


def _random(model, seed=0):
    shapes = {'encoder_input_tokens': (1, 4), 'decoder_target_tokens': (1, 4)}
    abstract = unbox(interface.param_shapes(model, shapes))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), abstract)


@pytest.mark.parametrize(
    ('files', 'flags', 'named'),
    [
        (['models/remixer.gin'], [], 'sublayer Remixer'),
        (['models/fnet.gin'], [], 'sublayer FNet'),
        (['models/hyper_mixer.gin'], [], 'sublayer HyperMixer'),
        (['models/tim.gin'], [], 'sublayer TimAttention'),
        (['models/t5_1_1.gin'], [('LAYOUT', '@layer.PostNorm')], 'layout of the encoder is PostNorm'),
        (['models/t5_1_1.gin'], [('DECODER_POSITION_BIAS', 'None')], 'position bias of the decoder is None'),
        (['models/t5_1_1.gin'], [('DECODER_SUBLAYERS', '(%DECODER_MIXER, %DECODER_FEED_FORWARD)')], 'SelfAttention'),
        (
            ['models/t5_1_1.gin'],
            [(OWN_BIAS, '@positions.RelativePositionBias')],
            'encoder and its layers have position',
        ),
        (['models/t5_1_1.gin'], [('decoder/gated_mlp.GatedMLP.hidden_dim', '8')], None),
        (['models/t5_1_1.gin'], [('positions.RelativePositionBias.num_heads', '8')], 'num_heads is 8'),
        (['models/t5_1_0.gin'], [('DECODER_FEED_FORWARD', '@gated_mlp.GatedMLP')], 'feed_forward is GatedMLP'),
    ],
)
def test_what_hugging_face_does_not_have_is_refused_by_name(files, flags, named):
    model = shipped(*files, flags=flags)
    if named is None:
        assert huggingface.describe(model, VOCABULARY)
        return
    with pytest.raises(UserError, match=named) as refused:
        huggingface.describe(model, VOCABULARY)
    assert '--to_safetensors' in str(refused.value) and '\n' not in str(refused.value)


@pytest.mark.parametrize(
    ('changes', 'named'),
    [
        ({'model_type': 'longt5'}, "model_type 'longt5'"),
        ({'feed_forward_proj': 'gated-silu'}, "feed_forward_proj 'gated-silu'"),
        ({'pad_token_id': 3}, 'pad_token_id 3'),
        ({'decoder_start_token_id': 2}, 'decoder_start_token_id 2'),
        ({'eos_token_id': [1, 2]}, 'eos_token_id'),
        ({'is_encoder_decoder': False}, 'is_encoder_decoder False'),
        ({'d_model': None}, 'd_model None'),
        ({'d_model': 16}, r'shared.weight in .* shape \(96, 32\), and \(96, 16\) by config.json'),
        ({'num_layers': 3}, 'lacks the weight encoder.block.2'),
        ({'num_decoder_layers': 1}, 'has the weight decoder.block.1'),
        ({'tie_word_embeddings': True}, 'lm_head.weight too'),
    ],
)
def test_a_config_that_is_no_t5_of_ours_is_refused(folders, tmp_path, changes, named):
    weights = folders.weights_of(folders.recorded('t5_v1_1_tiny'))
    folder = folders.write(tmp_path / 'hf', {**folders.V1_1, **changes}, weights)
    with pytest.raises(UserError, match=named):
        huggingface.read(str(folder)).params()


def test_weights_that_cannot_be_used_are_refused(folders, tmp_path):
    weights = folders.weights_of(folders.recorded('t5_v1_1_tiny'))

    def refused(named, name, weights=weights, shards=1):
        folder = tmp_path / name
        if not folder.exists():
            folders.write(folder, folders.V1_1, weights, shards=shards)
        with pytest.raises(UserError, match=named):
            huggingface.read(str(folder)).params()
        return folder

    shape = weights['shared.weight'].shape
    refused(
        'encoder.embed_tokens.weight .* is not shared.weight',
        'two_tables',
        {**weights, 'encoder.embed_tokens.weight': np.zeros(shape, np.float32)},
    )  # noqa: E501
    refused(
        'stored as I8',
        'quantised',
        {**weights, 'encoder.block.0.layer.1.DenseReluDense.wo.weight': np.ones((32, 48), np.int8)},
    )  # noqa: E501
    refused(
        'block.0.layer.0.adapter',
        'extra',
        {**weights, 'encoder.block.0.layer.0.adapter.weight': np.ones(2, np.float32)},
    )  # noqa: E501
    folder = folders.write(tmp_path / 'shards', folders.V1_1, weights, shards=2)
    (folder / 'model-00002-of-00002.safetensors').unlink()
    refused('lacks the shard model-00002-of-00002', 'shards')
    folder = folders.write(tmp_path / 'truncated', folders.V1_1, weights)
    (folder / 'model.safetensors').write_bytes((folder / 'model.safetensors').read_bytes()[:5000])
    refused('cannot be read as safetensors', 'truncated')
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    refused('pytorch_model.bin, a pickle.*save_pretrained', 'truncated')
    (folder / 'pytorch_model.bin').unlink()
    refused('has no model.safetensors', 'truncated')
    (folder / 'config.json').write_text('{')
    refused('config.json cannot be read', 'truncated')


def test_weights_that_t5_files_have_besides_are_passed_over(folders, tmp_path):
    weights = folders.weights_of(folders.recorded('t5_v1_0_tiny'))
    unread = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
    table = weights['shared.weight']
    more = {'encoder.embed_tokens.weight': table, 'decoder.embed_tokens.weight': table, 'lm_head.weight': table}
    folder = folders.write(tmp_path / 'hf', folders.V1_0, {**weights, **more, unread: np.ones((32, 2), np.float32)})
    plain = folders.write(tmp_path / 'plain', folders.V1_0, weights)
    sources = huggingface.read(str(folder)), huggingface.read(str(plain))
    assert sources[0].family == sources[1].family
    assert safetensors_export.first_difference(sources[0].params(), sources[1].params()) is None
    # Some files have the table under the name of a stack only.
    renamed = {('encoder.embed_tokens.weight' if n == 'shared.weight' else n): a for n, a in weights.items()}
    source = huggingface.read(str(folders.write(tmp_path / 'renamed', folders.V1_0, renamed)))
    assert safetensors_export.first_difference(source.params(), sources[1].params()) is None
    assert source.first_difference(source.params()) is None


def test_half_precision_files_are_read_without_loss(folders, tmp_path):
    weights = folders.weights_of(folders.recorded('t5_v1_0_tiny'))
    for dtype in ('bfloat16', 'float16'):
        low = {name: array.astype(np.dtype(dtype)) for name, array in weights.items()}
        source = huggingface.read(str(folders.write(tmp_path / dtype, folders.V1_0, low)))
        params = source.params()
        assert params['token_embedder']['embedding'].dtype == np.float32
        np.testing.assert_array_equal(params['token_embedder']['embedding'], low['shared.weight'].astype(np.float32))


def test_tokenizers_say_their_sentinels(folders, tmp_path):
    weights = folders.weights_of(folders.recorded('t5_v1_0_tiny'))
    folder = folders.write(tmp_path / 'hf', folders.V1_0, weights)
    tokenizer = folder / 'tokenizer_config.json'
    model = str(folder / 'spiece.model')
    expected = Tokenizer('sentencepiece', {'path': model, 'extra_ids': 10}, model)
    assert t5_tokenizer.read(folder) == expected
    tokenizer.write_text(json.dumps({'additional_special_tokens': [f'<extra_id_{i}>' for i in range(7)]}))
    assert t5_tokenizer.read(folder).arguments['extra_ids'] == 7
    tokenizer.write_text(json.dumps({'extra_ids': 0}))
    assert t5_tokenizer.read(folder).arguments['extra_ids'] == 0
    assert t5_tokenizer.read(folder, '/other.model').arguments['path'] == '/other.model'
    tokenizer.write_text(json.dumps({'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 125}))
    # ByT5 was pretrained with the last bytes.
    assert t5_tokenizer.read(folder).function == 'byte' and t5_tokenizer.read(folder).arguments == {'extra_ids': 0}
    tokenizer.unlink()
    assert t5_tokenizer.read(folder).arguments['extra_ids'] == 100
    (folder / 'spiece.model').unlink()
    with pytest.raises(UserError, match='--vocabulary'):
        t5_tokenizer.read(folder)


def test_any_model_goes_through_plain_safetensors(tmp_path):
    params = _random(shipped('models/remixer.gin', flags=[(k, str(v)) for k, v in SIZES.items()]))
    record = {'config': 'X = 1\n', 'vocabulary': 'abc of 48 ids', 'versions': {'jax': '0'}, 'task': 'other'}
    file = safetensors_export.write(str(tmp_path / 'a.safetensors'), params, 12, record)
    read, step, found = safetensors_export.read(str(file))
    assert safetensors_export.first_difference(params, read) is None and step == 12
    assert found == {name: record[name] for name in ('config', 'vocabulary', 'versions')}
    assert 'encoder/run_0/layer/remixer/mixing/logits' in load_file(file)
    with pytest.raises(UserError, match='exists already.*a_2.safetensors'):
        safetensors_export.write(str(file), params, 12, record)
    low = safetensors_export.write(str(tmp_path / 'low.safetensors'), params, 12, record, 'bfloat16')
    assert low.stat().st_size < 0.6 * file.stat().st_size
    rounded = safetensors_export.rounded(params, 'bfloat16')
    assert safetensors_export.first_difference(rounded, safetensors_export.read(str(low))[0]) is None
    assert safetensors_export.first_difference(params, rounded) is not None
    save_file({'x': np.ones(2, np.float32)}, tmp_path / 'foreign.safetensors', {'format': 'pt'})
    with pytest.raises(UserError, match='--from_hf'):
        safetensors_export.read(str(tmp_path / 'foreign.safetensors'))
