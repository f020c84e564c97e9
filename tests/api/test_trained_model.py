"""`load` for each kind of folder, and the methods of a loaded model."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import remixer_t5x
from remixer_t5x import UserError
from tests.support import hf_folders
from tests.support.error_lines import error_message
from tests.support.saved_run import VOCABULARY, write_run

LENGTHS = {'inputs': 40, 'targets': 12}
TEXTS = ['one', 'a text of some length, 35 tokens', 'two', '', 'three and four']
# A length to which `TrainedModel` does not pad.
PADDED_LENGTH = 37
TARGETS = ['1', '35 tokens', 'zwei', 'nothing', '']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp('api') / 'run')


@pytest.fixture(scope='module')
def trained(run):
    return remixer_t5x.load(str(run))


def ids_of(text):
    return [*VOCABULARY.encode(text), 1]


def one_row(text, length=None):
    """Returns the ids as [1, length], padded to `length` if it is not None."""
    ids = ids_of(text)
    return np.asarray([ids + [0] * ((length or len(ids)) - len(ids))], np.int32)


def test_load_selects_a_checkpoint_or_the_newest(run, trained):
    assert trained.source == str(run / 'checkpoints' / '2')
    older = remixer_t5x.load(str(run / 'checkpoints' / '1'))
    assert older.source == str(run / 'checkpoints' / '1')
    first, newest = (model.params['logits']['kernel'] for model in (older, trained))
    assert not np.array_equal(first, newest)
    assert trained.lengths == LENGTHS
    assert remixer_t5x.load(str(run), lengths={'targets': 5}).lengths == {'inputs': 40, 'targets': 5}


def test_generate_equals_the_generation_of_the_model(trained):
    answers = trained.generate(TEXTS)
    generate = jax.jit(lambda ids: trained.model.generate(trained.params, {'encoder_input_tokens': ids}, 12))
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = generate(one_row(text, PADDED_LENGTH))
        assert answer.text == VOCABULARY.decode([int(token) for token in expected.tokens[0, 0]])
        np.testing.assert_allclose(answer.scores, expected.scores[0], rtol=1e-4)
        assert not answer.truncated


def test_results_do_not_depend_on_the_batch_size(trained):
    small = remixer_t5x.TrainedModel(trained.model, trained.params, trained.vocabulary, trained.lengths, batch_size=3)
    decoder = remixer_t5x.Sampling(num_samples=2)
    large, few = (model.generate(TEXTS, decoder=decoder, seed=7) for model in (trained, small))
    assert [answer.texts for answer in few] == [answer.texts for answer in large]
    np.testing.assert_allclose(small.score(TEXTS, TARGETS), trained.score(TEXTS, TARGETS), rtol=1e-4)
    np.testing.assert_allclose(small.encode(TEXTS).hidden, trained.encode(TEXTS).hidden, atol=1e-4)


def test_generate_follows_decoder_seed_and_number_of_answers(trained, caplog):
    sampling = remixer_t5x.Sampling(num_samples=3)
    drawn = [trained.generate(TEXTS[:2], decoder=sampling, seed=seed) for seed in (1, 1, 2, 2**64 + 1)]
    assert drawn[0] == drawn[1] == drawn[3] != drawn[2]
    assert [len(answer.texts) for answer in drawn[0]] == [3, 3]
    with jax.log_compiles(), caplog.at_level('WARNING', 'jax'):
        trained.generate(TEXTS[:2], decoder=sampling, seed=3)
    assert not [record for record in caplog.records if 'Compiling' in record.getMessage()]
    with pytest.raises(UserError, match='seed must be .*, got -1'):
        trained.generate('one', seed=-1)
    beams = trained.generate(TEXTS[:1], decoder=remixer_t5x.BeamSearch(beams=4), answers=2)[0]
    assert len(beams.texts) == len(beams.scores) == 2 and beams.scores == sorted(beams.scores, reverse=True)
    assert len(trained.generate(TEXTS[:1], max_length=3)[0].text.encode()) <= 3 * 3
    with pytest.raises(UserError, match='BeamSearch'):
        trained.generate('one', answers=2)


def test_streamed_pieces_join_to_the_generated_text(trained):
    decoder = remixer_t5x.Sampling(no_repeat_ngram_size=2)
    pieces = list(trained.stream('one', decoder=decoder, seed=3))
    expected = trained.generate('one', decoder=decoder, seed=3)[0].text
    assert ''.join(pieces) == expected and expected and all(pieces)
    stop = expected[len(expected) // 2]
    stopped = trained.generate('one', decoder=decoder, seed=3, stop_strings=stop)[0].text
    assert stopped == expected[: expected.index(stop) + 1]
    assert ''.join(trained.stream('one', decoder=decoder, seed=3, stop_strings=[stop])) == stopped
    with pytest.raises(UserError, match=r'decoder must be .*, got BeamSearch\(.*stop=continue_until_settled\)$'):
        list(trained.stream('one', decoder=remixer_t5x.BeamSearch()))


def test_score_is_the_sum_of_log_probabilities(trained):
    logits_of = jax.jit(functools.partial(trained.model.module.apply, {'params': trained.params}, enable_dropout=False))
    for text, target, score in zip(TEXTS, TARGETS, trained.score(TEXTS, TARGETS), strict=True):
        targets = one_row(target, PADDED_LENGTH)
        logits = logits_of(one_row(text, PADDED_LENGTH), np.pad(targets, ((0, 0), (1, 0)))[:, :-1])
        each = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], -1)[..., 0]
        np.testing.assert_allclose(score, each[targets > 0].sum(), rtol=1e-4)


def test_encode_returns_the_encoder_output_with_mask_and_mean(trained):
    encoded = trained.encode(TEXTS)
    encode = jax.jit(functools.partial(trained.model.encode, trained.params))
    for row, text in enumerate(TEXTS):
        expected = np.asarray(encode(one_row(text, PADDED_LENGTH)))[0, : len(ids_of(text))]
        assert encoded.mask[row].sum() == len(expected)
        np.testing.assert_allclose(encoded.hidden[row][encoded.mask[row]], expected, atol=1e-4)
        np.testing.assert_allclose(encoded.mean[row], expected.mean(0), atol=1e-4)
        assert not encoded.hidden[row][~encoded.mask[row]].any()


def test_loss_is_the_mean_over_target_tokens(trained):
    batch = trained.make_batch(TEXTS, TARGETS)
    metrics = trained.loss(batch)
    tokens = sum(len(ids_of(target)) for target in TARGETS)
    assert metrics['tokens'] == tokens
    np.testing.assert_allclose(metrics['loss'], -trained.score(TEXTS, TARGETS).sum() / tokens, rtol=1e-3)
    with pytest.raises(UserError, match='must contain target tokens'):
        trained.loss({name: np.zeros_like(array) for name, array in batch.items()})


def test_methods_accept_a_single_text_and_an_empty_list(trained):
    assert trained.generate('one') == trained.generate(['one'])
    np.testing.assert_array_equal(trained.score('one', '1'), trained.score(['one'], ['1']))
    assert trained.encode('one').hidden.shape == (1, 4, 16)
    assert trained.generate([]) == []
    assert trained.score([], []).shape == trained.score_ids(np.zeros((0, 3)), np.zeros((0, 2))).shape == (0,)
    assert [array.shape for array in trained.encode([])] == [(0, 0, 16), (0, 0), (0, 16), (0,), (0, 16)]


def test_long_texts_are_truncated_or_an_error(trained):
    long = 'x' * 50
    fits = 'x' * 39
    answers = trained.generate([long, fits])
    assert [answer.truncated for answer in answers] == [True, False]
    assert answers[0].texts == answers[1].texts
    encoded = trained.encode([long, 'y'])
    assert encoded.truncated.tolist() == [True, False] and encoded.hidden.shape[1] == LENGTHS['inputs']
    for inputs, targets, side in ((long, 'x', 'inputs'), ('x', long, 'targets')):
        with pytest.raises(UserError, match=rf'{side}\[0\] has more than {LENGTHS[side]} tokens'):
            trained.score(inputs, targets)
        with pytest.raises(UserError, match='lengths='):
            trained.make_batch(inputs, targets)


def test_a_row_length_that_is_not_given_is_that_of_the_longest_row():
    batch = remixer_t5x.make_batch([[1], [2, 3]], [[4, 5], [6]], {'inputs': 3})
    assert batch['encoder_input_tokens'].shape == (2, 3) and batch['decoder_target_tokens'].shape == (2, 2)


def test_only_targets_that_continue_a_prompt_omit_the_start_token(trained):
    vocabulary = types.SimpleNamespace(encode=lambda text: [5, *VOCABULARY.encode(text)], eos_id=1)
    for ends_inputs, starts in ((True, [5, 5]), (False, [5, *VOCABULARY.encode('b')])):
        batch = dataclasses.replace(trained, vocabulary=vocabulary, ends_inputs=ends_inputs).make_batch('a', 'b')
        assert [batch[name][0, 0] for name in ('encoder_input_tokens', 'decoder_target_tokens')] == starts


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda trained: trained.generate('one', max_length=2.5), 'max_length must be a whole number .*, got 2.5'),
        (lambda trained: trained.generate('one', max_length=0), 'max_length must be .* at least 1 or None, got 0'),
        (lambda trained: trained.generate('one', decoder=remixer_t5x.Greedy), r'decoder must be Greedy\(\)'),
        (lambda _: remixer_t5x.BeamSearch(length_penalty=1.0), r'\(in Python, an object\), got 1.0'),
        (lambda trained: trained.generate('one', decoder='beam'), "decoder must be .*, got 'beam'"),
        (lambda trained: trained.generate('one', answers=1.0), 'answers must be a whole number .*, got 1.0'),
        (lambda trained: trained.generate(1), 'a text must be a str, got int 1'),
        (lambda trained: list(trained.stream(['one', 'two'])), r"text must be a str, got \['one', 'two'\]"),
        (lambda trained: trained.score(['a', 'b'], ['c']), '2 inputs and 1 targets'),
        (lambda trained: trained.make_batch(['a', 'b'], ['c']), '2 inputs and 1 targets'),
        (lambda trained: trained.score_ids([[3]], [[4], [5]]), '1 inputs and 2 targets'),
        (lambda trained: trained.score_ids([[3, -1]], [[4]]), 'token id must be from 0 to 383, got -1'),
        (lambda trained: trained.score_ids([[3]], [[4, 384]]), 'token id must be from 0 to 383, got 384'),
        (lambda trained: trained.score_ids([[3]], [[4] * 13]), 'targets must have at most 12 tokens, got 13'),
        (lambda _: remixer_t5x.make_batch([[1] * 4], [[1]], {'inputs': 3}), 'inputs must have at most 3 tokens, got 4'),
        (lambda _: remixer_t5x.make_batch([1, 2], [3, 4]), r'inputs must be lists of token ids, got \[1, 2\]'),
        (lambda _: remixer_t5x.make_batch([[1]], ['a']), r"targets must be lists of token ids, got \['a'\]"),
        (lambda trained: trained.score_ids([3], [[4]]), r'inputs must be lists of token ids, got \[3\]'),
        (lambda trained: trained.loss({}), 'batch must have at least 1 row, got 0; use make_batch'),
        (lambda trained: trained.loss(trained.make_batch([], [])), 'batch must have at least 1 row, got 0'),
        (lambda _: remixer_t5x.make_batch([[1]], [[1]], {'input': 3}), 'keys of lengths must be .*, got input'),
        (lambda _: remixer_t5x.make_batch([[1]], [[1]], {'inputs': 3.0}), r"lengths\['inputs'\] must be .*, got 3.0"),
        (lambda _: remixer_t5x.make_batch([[1]], [[1]], 5), 'lengths must be a dictionary.* or None, got 5'),
        (lambda _: remixer_t5x.load('runs/mine', lengths=512), 'lengths must be a dictionary.* or None, got 512'),
        (lambda trained: trained.save('unused', step=-1), 'step must be a non-negative integer, got -1'),
    ],
)
def test_invalid_arguments_raise_an_error(trained, call, message):
    with pytest.raises(UserError, match=message):
        call(trained)


def test_a_hugging_face_folder_is_loaded_and_saved(tmp_path):
    """The tests of `convert` load other models."""
    folder = hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_1_tiny')
    # Code in the folder is not run.
    (folder / 'config.gin').write_text('this is not gin')
    loaded = remixer_t5x.load(str(folder), lengths={'inputs': 16, 'targets': 8})
    again = remixer_t5x.load(loaded.save(tmp_path / 'ours'))
    assert again.lengths == loaded.lengths
    jax.tree.map(np.testing.assert_array_equal, loaded.params, again.params)
    np.testing.assert_array_equal(again.score(['a b'], ['c']), loaded.score(['a b'], ['c']))


def test_folders_without_a_model_raise_an_error(run, tmp_path):
    def load_error(path, **options):
        return error_message(lambda: remixer_t5x.load(str(path), **options))

    assert 'is not a folder' in load_error(tmp_path / 'nowhere')
    assert 'does not contain a checkpoint' in load_error(tmp_path)
    assert 'contains a vocabulary' in load_error(run, vocabulary='spiece.model')
    for length in (0, -1, None, 2.5, '16'):
        assert f"lengths['inputs'] must be a whole number of at least 1, got {length!r}" in load_error(
            run, lengths={'inputs': length}
        )
    bare = shutil.copytree(run, tmp_path / 'bare')
    (bare / 'config.gin').unlink()
    assert 'must contain config.gin or model.gin' in load_error(bare)
    (bare / 'remixer_t5x_run.json').unlink()
    assert 'must be inside a MODEL_DIR' in load_error(bare)


def test_finetuned_parameters_are_saved_and_loaded_ones_unchanged(trained, tmp_path):
    before, kernel = trained.score(TEXTS, TARGETS), np.asarray(trained.params['logits']['kernel'])
    batch = trained.make_batch(TEXTS, TARGETS)
    shapes = {name: array.shape for name, array in batch.items()}
    plan = remixer_t5x.plan_train_state(trained.model, optax.adamw(0.01), shapes, trained.partitioner)
    step = remixer_t5x.make_train_step(trained.model, plan.tx)
    step = remixer_t5x.jit_train_step(step, plan.shardings, trained.partitioner)
    # `replace` shares the buffers of the loaded parameters with the state.
    for state in (plan.create(jax.random.key(0)).replace(params=trained.params), plan.init_from_params(trained.params)):
        losses = []
        for _ in range(3):
            state, metrics = step(state, trained.partitioner.shard_batch(batch))
            losses.append(float(metrics['loss']))
        assert losses[-1] < losses[0]
    np.testing.assert_array_equal(trained.score(TEXTS, TARGETS), before)
    np.testing.assert_array_equal(trained.params['logits']['kernel'], kernel)
    tuned = dataclasses.replace(trained, params=state.params)
    # The folder can be moved.
    again = remixer_t5x.load(shutil.move(tuned.save(tmp_path / 'tuned', step=3), tmp_path / 'moved'))
    assert again.source == str(tmp_path / 'moved/checkpoints/3') and again.lengths == trained.lengths
    np.testing.assert_array_equal(again.score(TEXTS, TARGETS), tuned.score(TEXTS, TARGETS))
    assert not np.array_equal(again.score(TEXTS, TARGETS), before)
    with pytest.raises(UserError, match='already contains the checkpoint of step 3'):
        tuned.save(tmp_path / 'moved')


def test_bfloat16_halves_the_parameters_and_changes_little(run, trained):
    low = remixer_t5x.load(str(run), dtype='bfloat16')
    assert {leaf.dtype for leaf in jax.tree.leaves(low.params)} == {jnp.dtype('bfloat16')}
    # bfloat16 has 8 bits; a target has up to 10 tokens of about 6 nats each.
    np.testing.assert_allclose(low.score(TEXTS, TARGETS), trained.score(TEXTS, TARGETS), rtol=0.02)


def test_a_replaced_model_or_length_takes_effect_after_the_first_call(run):
    trained = remixer_t5x.load(str(run))
    score = trained.score('one', '1')
    assert trained.encode('x' * 50).hidden.shape[1] == 40
    longer = dataclasses.replace(trained, lengths={**LENGTHS, 'inputs': 60})
    assert longer.encode('x' * 50).hidden.shape[1] == len(ids_of('x' * 50))
    low = dataclasses.replace(trained.model, module=trained.model.module.clone(dtype='bfloat16'))
    assert dataclasses.replace(trained, model=low).score('one', '1') != score


def test_a_model_that_does_not_score_texts_is_refused():
    files = ['models/t5_1_1.gin', 'sizes/tiny.gin', 'model_types/classifier.gin']
    classifier = remixer_t5x.TrainedModel(
        remixer_t5x.build_model(*files, LABELS=('a', 'b')), {}, VOCABULARY, {'inputs': 8, 'targets': 8}
    )
    with pytest.raises(UserError, match="for make_batch, got 'classifier'"):
        classifier.make_batch('a', 'b')
    with pytest.raises(UserError, match="for score, got 'classifier'"):
        classifier.score_ids([[3]], [[4]])


ONE_EXAMPLE = """
import jax, remixer_t5x, sys
trained = remixer_t5x.load(sys.argv[1])
print(jax.device_count(), trained.loss(trained.make_batch(['one'], ['1']))['loss'])
"""


def test_one_example_runs_on_eight_devices_without_warnings(run, trained):
    environment = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
    environment['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
    program = [sys.executable, '-c', ONE_EXAMPLE, str(run)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, '')
    devices, loss = done.stdout.split()
    assert int(devices) == 8
    np.testing.assert_allclose(float(loss), trained.loss(trained.make_batch(['one'], ['1']))['loss'], rtol=1e-5)
