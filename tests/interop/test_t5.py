"""Hugging Face's T5s compute the same on both sides: logits, losses, answers; its tokenizers; plain safetensors."""

import functools
import json

import gin
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from remixer_t5x import build_model
from remixer_t5x.config import loading
from remixer_t5x.devices.partition import unbox
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import folders as huggingface
from remixer_t5x.interop.huggingface import t5_tokenizer
from remixer_t5x.interop.huggingface.family import Tokenizer
from remixer_t5x.interop.safetensors import export as safetensors_export
from remixer_t5x.models import interface
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.attention import CrossAttention, SelfAttention
from remixer_t5x.models.sublayers.feed_forward import ReluMLP
from remixer_tasks import vocabularies

VOCABULARY = vocabularies.byte(0)


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


def assert_same_logits(model, params, arrays, tolerance=1e-5) -> None:
    is_target = arrays['targets'] > 0
    ours = np.asarray(compiled_logits(model)(params, batch_of(arrays)))[is_target]
    theirs = arrays['logits'][is_target]
    assert np.max(np.abs(ours - theirs)) < tolerance * np.max(np.abs(theirs))


def folder_of(folders, path, arrays, name='t5_v1_0_tiny'):
    return folders.write(path, folders.CONFIGS[name], folders.weights_of(arrays))


def test_a_model_with_a_bias_in_each_layer_generates_recorded_answers(folders, tmp_path):
    """umT5, through the caches of decoding."""
    arrays = folders.recorded('umt5_tiny')
    source = huggingface.read(str(folder_of(folders, tmp_path / 'hf', arrays, 'umt5_tiny')))
    model, params = model_of(tmp_path, source), source.params()
    assert params['decoder']['run_0']['layer']['self_attention']['position_bias']['embedding'].shape == (2, 2, 32)
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
    # Random parameters of size 1 make large logits, and so larger rounding.
    assert_same_logits(model, safetensors_export.rounded(params, 'bfloat16'), arrays, 3e-5)


SIZES = {'VOCAB_SIZE': 48, 'EMBED_DIM': 16, 'MLP_DIM': 24, 'NUM_HEADS': 2, 'HEAD_DIM': 4, 'NUM_DECODER_LAYERS': 2}


def _random(model, seed=0):
    shapes = {'encoder_input_tokens': (1, 4), 'decoder_target_tokens': (1, 4)}
    abstract = unbox(interface.param_shapes(model, shapes))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), abstract)


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
