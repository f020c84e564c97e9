"""Hugging Face's T5s compute the same on both sides: logits, losses, generated tokens; safetensors of any model."""

import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from remixer_t5x.config import loading
from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import model_folders as huggingface
from remixer_t5x.interop.huggingface import t5_tokenizer
from remixer_t5x.interop.huggingface.model_family import Tokenizer
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.feed_forward import ReluMLP
from remixer_tasks import vocabularies
from tests.interop import small_models
from tests.support import hf_folders, references

VOCABULARY = vocabularies.byte(0)
pytestmark = pytest.mark.usefixtures('clean_gin')


@pytest.fixture(scope='session')
def v1_0_maker():
    """Returns the module make_t5_tiny; skips if its libraries are missing."""
    references.require('torch', 'transformers')
    from tests.golden import make_t5_tiny

    return make_t5_tiny


def shipped(*files, flags=()) -> Seq2Seq:
    return loading.load_macro_values(loading.ConfigSources([*files, 'sizes/tiny.gin'], flags), 'MODEL')[0]


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


def test_a_umt5_generates_the_recorded_answers(tmp_path):
    """Each layer has a position bias, in the decoding caches too."""
    arrays = hf_folders.recorded_arrays('umt5_tiny')
    source = huggingface.open_model_folder(str(hf_folders.write_tiny(tmp_path / 'hf', 'umt5_tiny')))
    model, params = hf_folders.model_from_source(source, tmp_path), source.read_params()
    assert params['decoder']['run_0']['layer']['self_attention']['position_bias']['embedding'].shape == (2, 2, 32)
    length = arrays['greedy'].shape[1]
    greedy = jax.jit(lambda params, batch: model.predict(params, batch, length))
    np.testing.assert_array_equal(greedy(params, {'encoder_input_tokens': arrays['inputs']}), arrays['greedy'])


class TinyT5V10:
    """The recorded T5 1.0 as our model; compiles each function once for all tests."""

    def __init__(self, path):
        self.arrays = hf_folders.recorded_arrays('t5_v1_0_tiny')
        source = huggingface.open_model_folder(str(hf_folders.write_tiny(path / 'hf', 't5_v1_0_tiny')))
        mlp = functools.partial(ReluMLP, hidden_dim=40)
        self.model = small_models.t5(mlp, mlp, (3, 2), 64, 24, head_dim=8, tied=True, scaled_output=True)
        self.params = source.read_params()
        self.loss = jax.jit(self.model.loss)
        self.score = jax.jit(self.model.score)
        length = self.arrays['greedy'].shape[1]
        search = BeamSearch(self.arrays['beams'].shape[1], PowerPenalty(0.6))
        self.greedy = jax.jit(lambda params, batch: self.model.predict(params, batch, length))
        self.beams = jax.jit(lambda params, batch: self.model.generate(params, batch, length, decoder=search))

    def check(self, params, arrays) -> None:
        """Checks that logits, losses and generated tokens with `params` equal `arrays`."""
        assert_same_logits(self.model, params, arrays)
        batch, expected = batch_of(arrays), pytest.approx(float(arrays['loss']), rel=1e-5)
        loss, sums = self.loss(params, batch)
        assert float((loss - sums['z_loss']) / sums['weights']) == expected
        assert -float(self.score(params, batch).sum() / sums['weights']) == expected
        inputs = {'encoder_input_tokens': arrays['inputs']}
        np.testing.assert_array_equal(self.greedy(params, inputs), arrays['greedy'])
        beams = self.beams(params, inputs)
        np.testing.assert_array_equal(beams.tokens, arrays['beams'])
        np.testing.assert_allclose(beams.scores, arrays['beam_scores'], rtol=1e-5)


@pytest.fixture(scope='module')
def t5_v1_0(tmp_path_factory):
    return TinyT5V10(tmp_path_factory.mktemp('t5_v1_0'))


def test_a_tied_scaled_model_equals_recorded_outputs(t5_v1_0):
    t5_v1_0.check(t5_v1_0.params, t5_v1_0.arrays)


def test_a_tied_table_gets_the_gradients_of_both_uses(t5_v1_0):
    """Compared with a difference quotient, because the loss computes its own gradient of the transposed table."""
    params, batch = t5_v1_0.params, batch_of(t5_v1_0.arrays)
    table = params['token_embedder']['embedding']
    direction = np.random.default_rng(0).standard_normal(table.shape, np.float32)

    def loss(table):
        return float(t5_v1_0.loss({**params, 'token_embedder': {'embedding': table}}, batch)[0])

    gradient = jax.jit(jax.grad(lambda params: t5_v1_0.model.loss(params, batch)[0]))(params)
    slope = np.sum(gradient['token_embedder']['embedding'] * direction)
    quotient = (loss(table + 1e-3 * direction) - loss(table - 1e-3 * direction)) / 2e-3
    assert slope == pytest.approx(quotient, rel=2e-2)


# Unpublished models that transformers 5 supports: config, and whether lm_head is a separate table.
VARIANTS = {
    'gated_tied_scaled': ({'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': True}, False),
    'gated_tied_unscaled': ({'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}, False),
    'silu_untied_unscaled': ({'feed_forward_proj': 'gated-silu', 'tie_word_embeddings': False}, True),
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


@pytest.mark.parametrize('name', VARIANTS)
def test_variants_compute_the_same_after_a_round_trip(name, v1_0_maker, tmp_path):
    import torch
    import transformers

    changes, separate_output = VARIANTS[name]
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=24, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=2, num_heads=2,
        decoder_start_token_id=0, **changes,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    if separate_output:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(32, 24))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if 'relative_attention_bias' in weight_name:
                weight.normal_()
    rng = np.random.default_rng(0)
    # Longer than the distances with exact buckets.
    arrays = {'inputs': rng.integers(2, 32, (2, 70)), 'targets': rng.integers(2, 32, (2, 60))}
    arrays['targets'][1, 40:] = 0
    arrays |= outputs(model, arrays)
    model.save_pretrained(tmp_path / 'hf')
    source, back = huggingface.open_model_folder(str(tmp_path / 'hf')), tmp_path / 'back'
    params = source.read_params()
    assert_same_logits(hf_folders.model_from_source(source, tmp_path), params, arrays)
    huggingface.write_model_folder(str(back), source.family, params, source.family.default_layer_runs())
    logits = outputs(transformers.T5ForConditionalGeneration.from_pretrained(back).eval(), arrays)['logits']
    np.testing.assert_array_equal(logits, arrays['logits'])
    assert huggingface.open_model_folder(str(back)).family == source.family
    # If the output is not scaled, transformers 4 would initialise a missing lm_head randomly.
    assert ('lm_head.weight' in load_file(back / 'model.safetensors')) == (
        not (source.family.tied and source.family.scaled_output)
    )
    if name != 'relu_untied_scaled':
        # transformers 4 has one field for a tied and a scaled output.
        file = tmp_path / 'hf' / 'config.json'
        config = {**json.loads(file.read_text()), 'tie_word_embeddings': changes['tie_word_embeddings']}
        del config['scale_decoder_outputs']
        file.write_text(json.dumps(config))
        assert huggingface.open_model_folder(str(tmp_path / 'hf')).family == source.family


def outputs(model, arrays):
    import torch

    inputs, targets = torch.from_numpy(arrays['inputs']), torch.from_numpy(arrays['targets'])
    with torch.no_grad():
        out = model(
            input_ids=inputs, attention_mask=(inputs > 0).long(), labels=targets.masked_fill(targets == 0, -100)
        )
    return {'logits': out.logits.numpy(), 'loss': out.loss.numpy()}


def test_our_model_loads_in_transformers(v1_0_maker, tmp_path):
    """Random parameters of our model, in two runs, rounded to bfloat16."""
    import transformers

    flags = [('ENCODER_RUNS', '((@encoder/layer.make_layer, 1), (@encoder/layer.make_layer, 2))')]
    flags += [(name, str(value)) for name, value in SIZES.items()]
    model = shipped('models/t5_1_1.gin', flags=flags)
    t5, runs = hf_folders.describe(model, VOCABULARY)
    assert runs == {'encoder': (1, 2), 'decoder': (2,)}
    assert (t5.activation, t5.tied, t5.scaled_output) == ('gelu', False, False)
    params = small_models.random_params(model)
    huggingface.write_model_folder(str(tmp_path / 'hf'), t5, params, runs, 'bfloat16')
    rng = np.random.default_rng(0)
    arrays = {'inputs': rng.integers(2, 48, (2, 9)), 'targets': rng.integers(2, 48, (2, 7))}
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / 'hf').float().eval()
    arrays |= outputs(theirs, arrays)
    # Random parameters of standard deviation 1 give large logits, and therefore larger rounding.
    assert_same_logits(model, safetensors_files.round_params(params, 'bfloat16'), arrays, 3e-5)


SIZES = {'VOCAB_SIZE': 48, 'EMBED_DIM': 16, 'MLP_DIM': 24, 'NUM_HEADS': 2, 'HEAD_DIM': 4, 'NUM_DECODER_LAYERS': 2}


def test_the_number_of_sentinels_is_read_from_the_tokenizer(tmp_path):
    folder = hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_0_tiny')
    tokenizer = folder / 'tokenizer_config.json'
    model = str(folder / 'spiece.model')
    expected = Tokenizer('sentencepiece', {'path': model, 'extra_ids': 10}, model)
    assert t5_tokenizer.find_t5_tokenizer(folder) == expected
    assert t5_tokenizer.find_t5_tokenizer(folder, '/other.model').arguments['path'] == '/other.model'
    names = [f'<extra_id_{i}>' for i in range(7)]
    # ByT5 was pretrained with the last bytes as sentinels.
    byt5 = {'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 125}
    for config, extra_ids in (({'additional_special_tokens': names}, 7), ({'extra_ids': 0}, 0), (byt5, 0), ({}, 100)):
        tokenizer.write_text(json.dumps(config))
        assert t5_tokenizer.find_t5_tokenizer(folder).arguments['extra_ids'] == extra_ids
    (folder / 'spiece.model').unlink()
    with pytest.raises(UserError, match='--vocabulary'):
        t5_tokenizer.find_t5_tokenizer(folder)


def test_any_model_is_written_to_safetensors_and_read(tmp_path):
    params = small_models.random_params(shipped('models/remixer.gin', flags=[(k, str(v)) for k, v in SIZES.items()]))
    record = {'config': 'X = 1\n', 'vocabulary': 'abc of 48 ids', 'versions': {'jax': '0'}, 'task': 'other'}
    file = safetensors_files.write_params(str(tmp_path / 'a.safetensors'), params, 12, record)
    read, step, read_record = safetensors_files.read_params(str(file))
    assert safetensors_files.find_differing_array(params, read) is None and step == 12
    assert read_record == {name: record[name] for name in ('config', 'vocabulary', 'versions')}
    assert 'encoder/run_0/layer/remixer/mixing/logits' in load_file(file)
    with pytest.raises(UserError, match='already exists'):
        safetensors_files.write_params(str(file), params, 12, record)
    low = safetensors_files.write_params(str(tmp_path / 'low.safetensors'), params, 12, record, 'bfloat16')
    assert low.stat().st_size < 0.6 * file.stat().st_size
    rounded = safetensors_files.round_params(params, 'bfloat16')
    assert safetensors_files.find_differing_array(rounded, safetensors_files.read_params(str(low))[0]) is None
    assert safetensors_files.find_differing_array(params, rounded) is not None
    save_file({'x': np.ones(2, np.float32)}, tmp_path / 'foreign.safetensors', {'format': 'pt'})
    with pytest.raises(UserError, match='--from_hf'):
        safetensors_files.read_params(str(tmp_path / 'foreign.safetensors'))
