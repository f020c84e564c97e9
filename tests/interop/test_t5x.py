"""Our models under T5X: its optimizer, partitioner and script accept them, and its loss and decoding equal ours.

Only the tests of the configs run without T5X (docs/t5x.md).
"""

import dataclasses
import functools
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from gin import config_parser

from remixer_t5x import UserError, axes, build_model
from remixer_t5x.config import loading
from remixer_t5x.interop.t5x import checkpoint as t5x_checkpoint
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.losses import CrossEntropy
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.models.sublayers.remixer import Remixer
from tests.interop import small_models

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
MODELS = sorted(path.stem for path in (CONFIGS / 'models').glob('*.gin'))
OTHER_TYPES = ('bert', 'gpt2', 'modern_bert')
# T5X uses deprecated features of its libraries.
NEEDS_T5X = [
    pytest.mark.skipif(importlib.util.find_spec('t5x') is None, reason='T5X cannot be imported (docs/t5x.md)'),
    pytest.mark.filterwarnings('ignore'),
]
# From T5X's partitioning.standard_logical_axis_rules.
RULES_OF_T5X = {'batch', 'vocab', 'embed', 'mlp', 'heads', 'kv', 'joined_kv', 'relpos_buckets', 'length', 'layers'}
ACTIVATIONS = {axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED}
VOCAB, INPUTS, TARGETS = 48, 9, 7


def bindings(file: str) -> dict:
    text = (CONFIGS / 't5x' / file).read_text()
    return {
        f'{statement.selector}.{statement.arg_name}'.rstrip('.'): statement.value
        for statement in config_parser.ConfigParser(text, loading.ReferenceCollector())
        if isinstance(statement, config_parser.BindingStatement)
    }


@pytest.fixture(scope='module')
def names() -> set[str]:
    return {value for name, value in vars(axes).items() if name.isupper()}


def test_every_axis_has_a_rule_for_partitioner_and_optimizer(names):
    model = bindings('model.gin')
    rules = {name for name, _ in model['partitioning.standard_logical_axis_rules.additional_rules']}
    assert names - rules == RULES_OF_T5X & names
    factors = model['adafactor.Adafactor.logical_factor_rules']
    assert {*names - ACTIVATIONS, None} == set(factors)
    assert factors[axes.LAYERS] == factors[axes.MECHANISMS] == 'batch'
    # Remixer's H is factored.
    assert {factors[axes.POSITIONS_OUT], factors[axes.POSITIONS_IN]} == {'row', 'column'}


def make_model() -> Seq2Seq:
    remixer = functools.partial(Remixer, hidden_dim=24, max_length=16)
    return small_models.t5(remixer, functools.partial(GatedMLP, hidden_dim=24), (2, 2), VOCAB, 16)


def make_module() -> EncoderDecoder:
    return make_model().module


@pytest.fixture(scope='module')
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = rng.integers(2, VOCAB, (3, INPUTS), dtype=np.int32)
    targets = rng.integers(2, VOCAB, (3, TARGETS), dtype=np.int32)
    inputs[1, 5:], targets[2, 3:] = 0, 0
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    weights = (targets > 0).astype(np.int32)
    return {
        'encoder_input_tokens': inputs,
        'decoder_input_tokens': shifted,
        'decoder_target_tokens': targets,
        'decoder_loss_weights': weights,
    }


@pytest.fixture(scope='module')
def params():
    shapes = {'encoder_input_tokens': (1, INPUTS), 'decoder_target_tokens': (1, TARGETS)}
    params = nn.unbox(make_model().init(jax.random.key(0), shapes))
    # Scales the initial logits, so that sequences differ.
    return params | {'logits': jax.tree.map(lambda x: 4 * x, params['logits'])}


def driver_model(module: EncoderDecoder, **settings):
    import seqio
    from t5x import adafactor

    from remixer_t5x.interop.t5x import driver as t5x

    rules = bindings('model.gin')['adafactor.Adafactor.logical_factor_rules']
    vocabulary = seqio.ByteVocabulary()
    return t5x.EncoderDecoderModel(
        module=module,
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=adafactor.Adafactor(logical_factor_rules=rules),
        **settings,
    )


class TestUnderT5X:
    pytestmark = NEEDS_T5X

    @pytest.mark.parametrize('model', OTHER_TYPES)
    def test_only_encoder_decoders_are_accepted(self, model):
        module = build_model(f'models/{model}.gin', 'sizes/tiny.gin').module
        with pytest.raises(UserError, match=f'encoder-decoder.*{type(module).__name__}.*remixer-t5x train'):
            driver_model(module)

    @pytest.mark.parametrize('model', [model for model in MODELS if model not in OTHER_TYPES])
    def test_optimizer_and_partitioner_support_every_encoder_decoder(self, model):
        from t5x import partitioning, train_state

        size = {'remixer_scaled': 'scaled_base', 't5_1_0': 'small'}.get(model, 'tiny')
        files = [f'models/{model}.gin', f'sizes/{size}.gin']
        driven = driver_model(build_model(*files).module)
        shapes = {'encoder_input_tokens': (2, 64), 'decoder_input_tokens': (2, 32)}

        def state(rng):
            return train_state.FlaxOptimTrainState.create(
                driven.optimizer_def, driven.get_initial_variables(rng, shapes)
            )

        abstract = jax.eval_shape(state, jax.random.key(0))
        extra = bindings('model.gin')['partitioning.standard_logical_axis_rules.additional_rules']
        rules = partitioning.standard_logical_axis_rules(additional_rules=extra)
        specs = partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=rules).get_mesh_axes(abstract)
        assert len(jax.tree.leaves(specs.params)) == len(jax.tree.leaves(abstract.params))
        used = [axis for spec in jax.tree.leaves(specs.params) for axis in spec]
        assert 'model' in used and set(used) <= {'model', None}
        # The layers of a run are separate matrices: no moment is averaged over them.
        for side in ('encoder', 'decoder'):
            runs = {name: tree for name, tree in abstract.param_states[side].items() if name.startswith('run_')}
            for name, tree in runs.items():
                count = jax.tree.leaves(abstract.params[side][name])[0].shape[0]
                assert all(leaf.shape == (1,) or leaf.shape[0] == count for leaf in jax.tree.leaves(tree))

    @pytest.mark.parametrize('label_smoothing', [0.0, 0.1])
    def test_loss_equals_ours(self, params, batch, label_smoothing):
        driven = driver_model(make_module(), z_loss=1e-2, label_smoothing=label_smoothing)
        loss, metrics = driven.loss_fn(params, batch, None)
        ours, sums = dataclasses.replace(make_model(), loss_function=CrossEntropy(1e-2, label_smoothing)).loss(
            params, batch
        )
        np.testing.assert_allclose(loss, ours, rtol=1e-5)
        np.testing.assert_allclose(metrics['z_loss'].compute(), sums['z_loss'], rtol=1e-5)

    def test_scores_equal_ours(self, params, batch):
        scores = driver_model(make_module()).score_batch(params, batch)
        np.testing.assert_allclose(scores, make_model().score(params, batch), rtol=1e-5)

    def test_logits_are_float32_in_bfloat16(self, params, batch):
        module = make_module().clone(dtype='bfloat16')
        assert driver_model(module)._compute_logits(params, batch).dtype == jnp.float32

    def test_greedy_decoding_equals_ours(self, params, batch):
        from t5x import decoding

        greedy = functools.partial(decoding.temperature_sample, temperature=0.0)
        tokens = driver_model(make_module(), decode_fn=greedy).predict_batch(params, batch)
        expected = make_model().generate(params, batch, TARGETS).tokens[:, 0]
        assert len(np.unique(expected)) > 4
        np.testing.assert_array_equal(tokens, expected)

    def test_scores_of_beams_equal_those_of_their_tokens(self, params, batch):
        """Fails if the caches are not reordered with their beams."""
        tokens, aux = driver_model(make_module()).predict_batch_with_aux(
            params, batch, num_decodes=3, return_all_decodes=True
        )
        tokens = np.asarray(tokens)
        assert tokens.shape == (3, 3, TARGETS)
        compared = 0
        for beam in range(3):
            targets = tokens[:, beam]
            shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
            scored = {**batch, 'decoder_target_tokens': targets, 'decoder_input_tokens': shifted}
            del scored['decoder_loss_weights']
            score = make_model().score(params, scored)
            lengths, ended = np.sum(targets > 0, axis=1), np.any(targets == 1, axis=1)
            penalty = np.where(ended, ((5.0 + lengths) / 6.0) ** 0.6, 1.0)
            # T5X adds empty beams, and treats id 0 as a token, which our score treats as padding.
            last = np.where(ended, np.argmax(targets == 1, axis=1) + 1, TARGETS)
            usable = (lengths == last) & (aux['scores'][:, beam] > -1e6)
            np.testing.assert_allclose(aux['scores'][usable, beam], (score / penalty)[usable], rtol=1e-4)
            compared += usable.sum()
        assert compared >= 3

    def test_tasks_are_registered_by_name(self):
        import seqio

        from remixer_t5x.interop.t5x import driver as t5x

        feature = seqio.Feature(seqio.ByteVocabulary())
        source = seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=['train'])
        make = functools.partial(
            seqio.Task, 'a_task', source=source, preprocessors=[], output_features={'inputs': feature}
        )
        first, second = make(), make()
        mixture = seqio.Mixture('a_mixture', [(second, 1.0)])
        assert t5x.register_task(first) == t5x.register_task('a_task') == 'a_task'
        assert seqio.get_mixture_or_task('a_task') is first
        assert t5x.register_task(mixture) == 'a_mixture'
        assert seqio.get_mixture_or_task('a_mixture') is mixture and seqio.TaskRegistry.get('a_task') is second

    def test_t5xs_script_trains_a_remixer_on_eight_devices(self, tmp_path, monkeypatch):
        monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
        files = ('models/remixer.gin', 'sizes/tiny.gin', 'data/python_docs.gin', 't5x/pretrain.gin')
        with_defaults = ('t5x/defaults.gin', *files)
        macros = {
            'MODEL_DIR': repr(str(tmp_path)), 'TRAIN_STEPS': 2, 'BATCH_SIZE': 8, 'EVAL_PERIOD': 2, 'EVAL_STEPS': 1,
            'TASK_FEATURE_LENGTHS': {'inputs': 64, 'targets': 24}, 'CHECKPOINT_PERIOD': 2, 'NUM_PARTITIONS': None,
            'MODEL_PARALLEL_SUBMESH': (1, 2), 'NUM_ENCODER_LAYERS': 1, 'NUM_DECODER_LAYERS': 2,
            'DATA_SEED': 0,
        }  # fmt: skip
        command = [sys.executable, '-m', 't5x.train', f'--gin_search_paths={CONFIGS}']
        command += [f'--gin_file={file}' for file in with_defaults]
        command += [f'--gin.{name}={value}' for name, value in macros.items()]
        completed = subprocess.run(command, capture_output=True, text=True, cwd=CONFIGS.parent)
        assert completed.returncode == 0, completed.stderr[-3000:]

        lengths = {'MAX_INPUT_LENGTH': 64, 'MAX_TARGET_LENGTH': 24}
        model = build_model(*files[:2], VOCAB_SIZE=4096, NUM_ENCODER_LAYERS=1, NUM_DECODER_LAYERS=2, **lengths)
        shapes = {'encoder_input_tokens': (1, 8), 'decoder_target_tokens': (1, 8)}
        abstract = nn.unbox(jax.eval_shape(lambda key: model.init(key, shapes), jax.random.key(0)))
        trained, step = t5x_checkpoint.read_t5x_checkpoint(str(tmp_path), abstract)
        first, _ = t5x_checkpoint.read_t5x_checkpoint(str(tmp_path / 'checkpoint_0'), abstract)
        assert step == 2
        changed = [np.any(a != b) for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(first), strict=True)]
        assert all(changed)
