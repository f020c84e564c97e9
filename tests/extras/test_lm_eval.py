"""The adapter for lm-evaluation-harness, compared with its `hf` model and with the definition of each score."""

import importlib.util
import json
import shutil
import types

import jax
import numpy as np
import pytest

import remixer_t5x
from remixer_t5x import UserError
from tests.support import hf_folders, saved_run

pytest.importorskip('lm_eval', reason="lm_eval is not installed: pip install 'remixer-t5x[lm-eval]'")
pytestmark = [pytest.mark.filterwarnings('ignore'), pytest.mark.usefixtures('clean_gin')]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec('torch') is None or importlib.util.find_spec('transformers') is None,
    reason='torch and transformers are not installed: scripts/test.sh --references',
)
# 26 pieces and ten sentinels.
IDS = 36
PAIRS = [('a test', ' the'), ('this is a test. ', 'a'), ('', 'test it'), ('a', ' this is the end of it')]
TEXTS = ['this is a test', 'a']
SETTINGS = {'until': ['e'], 'max_gen_toks': 5, 'do_sample': False, 'temperature': 0.0}
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {file}
validation_split: validation
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
WRITES = """\
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6, do_sample: false}
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope='module')
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp('lm_eval') / 't5'
    config = {**hf_folders.V1_1, 'architectures': ['T5ForConditionalGeneration'], 'vocab_size': IDS}
    weights = hf_folders.weights_of(hf_folders.recorded_arrays('t5_v1_1_tiny'))
    # The model has only the ids of the tokenizer, so that both sides can decode every output.
    tables = {name: weights[name][:IDS] for name in ('shared.weight', 'lm_head.weight')}
    hf_folders.write(folder, config, {**weights, **tables})
    pieces = {'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>', 'extra_ids': hf_folders.SENTINELS}
    settings = {'tokenizer_class': 'T5Tokenizer', **pieces}
    settings['additional_special_tokens'] = [f'<extra_id_{i}>' for i in range(hf_folders.SENTINELS)]
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    return folder


def make_requests(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


def load_ours(path, **options):
    from remixer_t5x.extras.lm_eval.harness_model import RemixerLM

    return RemixerLM(str(path), batch_size=4, **options)


def load_hf(path, **options):
    import torch
    from lm_eval.models.huggingface import HFLM
    from safetensors.torch import load_file

    model = HFLM(pretrained=str(path), device='cpu', dtype='float32', batch_size=2, **options)
    # transformers 5 ties the two tables of every T5, regardless of the configuration.
    tables = load_file(path / 'model.safetensors')
    if 'lm_head.weight' in tables:
        model.model.lm_head.weight = torch.nn.Parameter(tables['lm_head.weight'])
    return model


def compare(path, begin=''):
    """Compares the scores of both models and returns the models; `begin` is prepended to contexts of the `hf` model."""
    models = load_ours(path), load_hf(path)
    prefixed = [(begin + context if context else '', continuation) for context, continuation in PAIRS]
    actual, expected = (
        model.loglikelihood(make_requests(*pairs)) for model, pairs in zip(models, (PAIRS, prefixed), strict=True)
    )
    np.testing.assert_allclose([score for score, _ in actual], [score for score, _ in expected], rtol=1e-4)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    rolling = [model.loglikelihood_rolling(make_requests(*((text,) for text in TEXTS))) for model in models]
    np.testing.assert_allclose(*rolling, rtol=1e-4)
    return models


@needs_torch
def test_numbers_of_a_t5_equal_those_of_lm_evals_own_model(t5):
    """Generated ids are compared with transformers, because lm_eval adds the input length to the output limit."""
    import torch

    model, other = compare(t5)
    texts = model.generate_until(make_requests(*((text, SETTINGS) for text in TEXTS)))
    vocabulary = model.trained.vocabulary
    for text, answer in zip(TEXTS, texts, strict=True):
        ids = torch.tensor([other.tok_encode(text)])
        assert ids.tolist() == [[*vocabulary.encode(text), 1]]
        # Without a cache, because transformers 5.23 creates one with as many layers as the encoder.
        ids = other.model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, use_cache=False)
        ids = ids[0, 1:].tolist()
        ids = ids[: ids.index(1)] if 1 in ids else ids
        assert answer == vocabulary.decode(ids).split('e')[0]


@needs_torch
def test_beams_equal_those_of_transformers(t5, tmp_path):
    """The end token is as likely as a letter, so that `early_stopping` changes some answers."""
    import torch
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / 't5'
    shutil.copytree(t5, folder)
    weights = load_file(folder / 'model.safetensors')
    weights['lm_head.weight'][1] = weights['lm_head.weight'][11]
    save_file(weights, folder / 'model.safetensors', {'format': 'pt'})
    model, other = load_ours(folder), load_hf(folder)
    decode = model.trained.vocabulary.decode
    texts = ['this is a test', 'a', 'the end', 'is it', 'a test of it', 'this', 'it is the end', 'at']
    answers = []
    for settings in ({}, {'early_stopping': 'never'}, {'early_stopping': True, 'length_penalty': 0.0}):
        settings = {**settings, 'num_beams': 2, 'do_sample': False}
        expected = []
        for text in texts:
            ids = torch.tensor([other.tok_encode(text)])
            ids = other.model.generate(input_ids=ids, max_new_tokens=8, use_cache=False, **settings)[0, 1:].tolist()
            expected.append(decode(ids[: ids.index(1)] if 1 in ids else ids))
        actual = model.generate_until(make_requests(*((text, {**settings, 'max_gen_toks': 8}) for text in texts)))
        assert actual == expected
        answers.append(actual)
    assert answers[0] != answers[1] and answers[0] != answers[2]


@needs_torch
def test_numbers_of_a_gpt2_equal_those_of_lm_evals_own_model(gpt2):
    """Our model starts every row with the end token, as in GPT-2's training; lm_eval's model only empty contexts."""
    begin = '<|endoftext|>'
    model, other = compare(gpt2, begin)
    answers = model.generate_until(make_requests(*((text, SETTINGS) for text in TEXTS)))
    assert answers == other.generate_until(make_requests(*((begin + text, SETTINGS) for text in TEXTS)))


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory):
    config = {'architectures': ['GPT2LMHeadModel'], 'bos_token_id': 59}
    folder = hf_folders.write_gpt2(tmp_path_factory.mktemp('lm_eval') / 'gpt2', **config)
    settings = {'tokenizer_class': 'GPT2Tokenizer', 'model_max_length': 20, 'bos_token': '<|endoftext|>'}
    (folder / 'tokenizer_config.json').write_text(json.dumps({**settings, 'eos_token': '<|endoftext|>'}))
    return folder


def test_a_local_task_runs_from_the_command(t5, tmp_path, monkeypatch, capsys):
    """The accuracy of a task that is defined by a YAML file and JSON lines equals that of `score`."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import remixer_t5x.extras.lm_eval as adapter

    rows = [
        {'question': 'a test', 'choices': ['the', 'is'], 'answer': 0},
        {'question': 'this is', 'choices': ['a', 'it'], 'answer': 1},
        {'question': 'the end', 'choices': ['this', 'at'], 'answer': 0},
    ]
    (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for name, kind in (('choose', CHOICES), ('write', WRITES)):
        (tmp_path / f'{name}.yaml').write_text(YAML.format(name=name, file=tmp_path / 'rows.jsonl') + kind)
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    adapter.register()
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    evaluation = lm_eval.simple_evaluate(
        model='remixer_t5x', model_args=f'path={t5}', tasks=['choose', 'write'], task_manager=manager, batch_size=2,
        bootstrap_iters=0,
    )  # fmt: skip
    trained = remixer_t5x.load(str(t5))
    vocabulary, right = trained.vocabulary, []
    for row in rows:
        batches = [remixer_t5x.make_batch([[*vocabulary.encode(row['question']), 1]], [vocabulary.encode(f' {choice}')])
                   for choice in row['choices']]  # fmt: skip
        scores = [float(trained.model.score(trained.params, batch)[0]) for batch in batches]
        right.append(int(np.argmax(scores)) == row['answer'])
    assert evaluation['results']['choose']['acc,none'] == pytest.approx(np.mean(right))
    assert evaluation['results']['write']['exact_match,none'] == 0.0


@pytest.fixture(scope='module')
def decoder_run(tmp_path_factory):
    """Writes a run of a decoder-only model without attention."""
    config = saved_run.CONFIG.replace("{'inputs': 40, 'targets': 12}", "{'targets': 24}")
    config += """
include 'model_types/decoder_only.gin'
from remixer_t5x.models.sublayers import linear_attention
DECODER_MIXER = @linear_attention.LinearAttention
linear_attention.LinearAttention.num_heads = %NUM_HEADS
linear_attention.LinearAttention.head_dim = %HEAD_DIM
"""
    return saved_run.write_run(tmp_path_factory.mktemp('decoder_run') / 'run', config, steps=(1,))


def test_a_decoder_with_only_a_mixer_is_scored_by_definition(decoder_run):
    """Texts longer than one window are also scored, with every token counted once."""
    model = load_ours(decoder_run)
    trained = model.trained

    @jax.jit
    def log_probabilities(inputs):
        logits = trained.model.module.apply({'params': trained.params}, inputs, enable_dropout=False)
        return jax.nn.log_softmax(logits)

    def expected_score(context, continuation):
        ids = np.asarray([[0, *context, *continuation]], np.int32)
        scores = np.asarray(log_probabilities(np.pad(ids[:, :-1], ((0, 0), (0, 30 - ids.shape[1])))))[0]
        positions = range(len(context), len(context) + len(continuation))
        return sum(scores[position, token] for position, token in zip(positions, continuation, strict=True))

    encode = trained.vocabulary.encode
    ((score, greedy),) = model.loglikelihood(make_requests(('one two', ' three')))
    np.testing.assert_allclose(score, expected_score(encode('one two'), encode(' three')), rtol=1e-4)
    assert not greedy
    text = encode('a text of thirty-five tokens, or so')
    (rolled,) = model.loglikelihood_rolling(make_requests(('a text of thirty-five tokens, or so',)))
    length = 23
    # The second window starts with as much of the preceding text as fits.
    first = expected_score([], text[:length])
    second = expected_score(text[len(text) - length - 1 : length], text[length:])
    np.testing.assert_allclose(rolled, first + second, rtol=1e-4)
    (text,) = model.generate_until(make_requests(('one', {'until': ['\n'], 'max_gen_toks': 3})))
    assert len(encode(text)) <= 3


@pytest.mark.parametrize('kind', ['t5', 'decoder_run'])
def test_rows_begin_with_the_special_tokens_of_the_vocabulary(kind, request, monkeypatch):
    """Truncating a long context removes its first tokens, but keeps special tokens such as Gemma's <bos>."""
    path, begin = request.getfixturevalue(kind), 5
    trained = remixer_t5x.load(str(path))
    encode = type(trained.vocabulary).encode
    monkeypatch.setattr(type(trained.vocabulary), 'encode', lambda self, text: [begin, *encode(self, text)])
    end = [1] if kind == 't5' else []
    model, inputs = load_ours(path, max_length=12), trained.model.input_array
    for context in ('a test', 'this is a test and the end of it all'):
        ids, target = [*encode(trained.vocabulary, context), *end], encode(trained.vocabulary, ' the')
        ((score, _),) = model.loglikelihood(make_requests((context, ' the')))
        room = 12 if kind == 't5' else 24 - len(target)
        row = np.asarray([[begin, *ids[max(0, len(ids) - room + 1) :]]], np.int32)
        batch = remixer_t5x.make_batch(row.tolist(), [target])
        expected = trained.model.score(trained.params, {**batch, inputs: row})
        np.testing.assert_allclose(score, expected[0], rtol=1e-4)


def test_generation_settings_select_a_decoder_and_unsupported_operations_raise_an_error(t5):
    from remixer_t5x.extras.lm_eval import harness_model

    with pytest.raises(UserError, match='until, .*repetition_penalty'):
        harness_model.parse_generation_kwargs({'until': [], 'repetition_penalty': 2.0}, 8)
    with pytest.raises(UserError, match='TEMPERATURE must be .* above 0, got 0.0'):
        harness_model.parse_generation_kwargs({'do_sample': True, 'top_p': 0.9}, 8)
    model = load_ours(t5, max_length=4)
    with pytest.raises(UserError, match='a continuation has .* tokens, but the model accepts at most 4'):
        model.loglikelihood(make_requests(('a', 'this is a test and the end of it')))
    decoders = [harness_model.parse_generation_kwargs(kwargs, 8)[2] for kwargs in (
        {'do_sample': True, 'temperature': 0.5, 'top_k': 3}, {'temperature': 0.7}, {'temperature': 0.0},
        {'do_sample': False, 'temperature': 0.7})]  # fmt: skip
    assert decoders == [remixer_t5x.Sampling(0.5, 3), remixer_t5x.Sampling(0.7), *[remixer_t5x.Greedy()] * 2]
    # It would have probability 1 and win every comparison.
    with pytest.raises(UserError, match='at least one token') as error:
        model.loglikelihood(make_requests(('a test', '\n')))
    assert '\n' not in str(error.value)


def test_a_continuation_within_a_piece_is_scored_by_separate_pieces(gpt2):
    """' the' is one piece of GPT-2; the `hf` model of lm_eval rejects such a pair."""
    model = load_ours(gpt2)
    encode, trained = model.trained.vocabulary.encode, model.trained
    context, continuation = encode('a t'), encode('he')
    assert len(encode('a the')) < len(context) + len(continuation)
    ((score, _), (joined, _)) = model.loglikelihood(make_requests(('a t', 'he'), ('a', ' the')))
    rows = np.asarray([[0, *context, *continuation]], np.int32)
    logits = trained.model.module.apply({'params': trained.params}, rows[:, :-1], enable_dropout=False)[0]
    log_probabilities = np.asarray(jax.nn.log_softmax(logits))
    positions = range(len(context), rows.shape[1] - 1)
    expected = sum(log_probabilities[position, rows[0, position + 1]] for position in positions)
    np.testing.assert_allclose(score, expected, rtol=1e-4)
    assert score < 0 and joined < 0


@needs_torch
def test_a_masked_language_model_scores_words_and_no_special_tokens(tmp_path):
    """Compares with the scores of Salazar et al. (2020), computed with transformers."""
    import torch
    import transformers

    folder = hf_folders.write_tiny(tmp_path / 'bert', 'bert_tiny')
    words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *'abcdefghij', *(f'[unused{index}]' for index in range(45))]
    (folder / 'vocab.txt').write_text('\n'.join(words))
    bert = transformers.BertForMaskedLM.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()

    def pseudo_log_likelihood(words_before, words_after):
        ids = [2, *(words.index(word) for word in words_before + words_after), 3]
        total = 0.0
        for position in range(1 + len(words_before), len(ids) - 1):
            masked = torch.tensor([[*ids[:position], 4, *ids[position + 1 :]]])
            with torch.no_grad():
                total += torch.log_softmax(bert(input_ids=masked).logits[0, position], -1)[ids[position]].item()
        return total

    model = load_ours(folder)
    scores = [score for score, _ in model.loglikelihood(make_requests(('', 'a b'), ('c d', ' e f')))]
    expected = [pseudo_log_likelihood('', 'ab'), pseudo_log_likelihood('cd', 'ef')]
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    text = 'abcdefghij' * 3
    # A window has 18 words; the second one starts with as much of the preceding text as fits.
    long = pseudo_log_likelihood('', text[:18]) + pseudo_log_likelihood(text[12:18], text[18:])
    rolled = model.loglikelihood_rolling(make_requests(('a b c',), (' '.join(text),)))
    np.testing.assert_allclose(rolled, [pseudo_log_likelihood('', 'abc'), long], rtol=1e-4)
