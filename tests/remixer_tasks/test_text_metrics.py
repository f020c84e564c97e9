"""Metrics equal T5's and values computed by hand, and can be selected by name and grouped by a column."""

import functools
import json

import pytest
import seqio
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_tasks import local_pairs, text_pairs, vocabularies
from remixer_tasks.benchmarks import prompts, text_metrics
from tests.support import references

TEXTS = ['The cat sat . It was on the mat .', 'A dog barked .', 'Rain fell all day .']
PREDICTED_TEXTS = ['The cat sat on a mat . It slept .', 'A dog barked .', 'It rained .']
BYTES = seqio.ByteVocabulary(extra_ids=100)
TARGETS, PREDICTIONS = ['yes', 'no', 'no', 'no'], ['yes', 'no', 'yes', ' no']


def test_bleu_equals_that_of_t5():
    references.require('sacrebleu', 't5')
    from t5.evaluation import metrics

    assert text_metrics.bleu(TEXTS, PREDICTED_TEXTS) == pytest.approx(metrics.bleu(TEXTS, PREDICTED_TEXTS))
    references_by_text = [[text, 'A cat sat .'] for text in TEXTS]
    by_reference = [list(each) for each in zip(*references_by_text, strict=True)]
    assert text_metrics.bleu(references_by_text, PREDICTED_TEXTS) == pytest.approx(
        metrics.bleu(by_reference, PREDICTED_TEXTS)
    )


def test_rouge_is_close_to_the_bootstrap_of_t5():
    references.require('rouge_score', 't5')
    from t5.evaluation import metrics

    ours, theirs = text_metrics.rouge(TEXTS, PREDICTED_TEXTS), metrics.rouge(TEXTS, PREDICTED_TEXTS)
    assert set(ours) == set(theirs)
    # T5 estimates the mean by bootstrapping three examples, so its values vary.
    assert ours == pytest.approx(theirs, abs=2.0)


def test_the_correlation_of_constants_is_0():
    """Their means are inexact: correlating the rounding errors would give 100 or -100."""
    for first, second in (([0.2] * 3, [1.4] * 3), ([0.2] * 3, [0.2] * 3), ([0.1] * 10, list(range(10)))):
        assert text_metrics.pearson_corrcoef(first, second) == {'pearson_corrcoef': 0.0}
        assert text_metrics.spearman_corrcoef(first, second) == {'spearman_corrcoef': 0.0}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=30))
def test_an_invalid_prediction_is_never_better_than_a_wrong_one(rows):
    targets, predictions = zip(*rows, strict=True)
    wrong = [(t + 1) % 3 if p == -1 else p for t, p in rows]
    assert text_metrics.accuracy(targets, predictions) == text_metrics.accuracy(targets, wrong)
    binary = [min(t, 1) for t in targets]
    flipped = [1 - t if p not in (0, 1) else p for t, p in zip(binary, predictions, strict=True)]
    assert text_metrics.f1(binary, predictions) == text_metrics.f1(binary, flipped)


def test_metrics_by_name_equal_values_computed_by_hand():
    values = {}
    for metric in text_metrics.select_metrics('accuracy, exact_match, best_constant_prediction, squad, macro_f1'):
        values |= metric(TARGETS, PREDICTIONS)
    # 'yes' is predicted twice, once correctly; ' no' differs from 'no'.
    assert values == pytest.approx(
        {
            'accuracy': 50,
            'exact_match': 75,
            'best_constant_prediction': 75,
            'em': 75,
            'f1': 75,
            'macro_f1': 100 * (2 / 3 + 2 / 4) / 2,
        }
    )


@pytest.mark.parametrize('text', ['nan', '-infinity', '1_000', '1e999', '٣', ''])
def test_only_decimal_digits_are_a_number(text):
    (metric,) = text_metrics.select_metrics(['regression'])
    values = metric(['1', '2', '4'], ['1.5', '2', text])
    assert set(values) == {'pearson_corrcoef', 'spearman_corrcoef', 'mean_absolute_error'}
    assert values['mean_absolute_error'] == pytest.approx(1.5)
    with pytest.raises(UserError, match='regression must be numbers') as error:
        metric(['1', text], ['1.5', '2'])
    assert repr(text) in str(error.value) and '\n' not in str(error.value)
    assert prompts.parse_number(text) == prompts.INVALID and prompts.parse_number(' -1.5e1 ') == -15.0


def write_rows(tmp_path, name='a.jsonl', count=20):
    path = tmp_path / name
    lines = [{'q': f'is {i} even', 'a': ('yes', 'no')[i % 2], 'type': f't{i % 3}', 'id': i} for i in range(count)]
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return str(path)


def test_columns_are_kept_and_metrics_are_grouped_by_a_column(tmp_path):
    options = {'columns': ['id'], 'metrics_by': 'type'}
    corpus = local_pairs.corpus(write_rows(tmp_path), 'q', 'a', validation_fraction=0.3, **options)
    task = text_pairs.task(corpus, BYTES, 'mine', **options)
    examples = list(task.get_dataset({'inputs': 32, 'targets': 8}, 'validation', shuffle=False).as_numpy_iterator())
    assert examples and all(
        example['type'] == b't%d' % (int(example['id']) % 3) and example['inputs_pretokenized'].startswith(b'is ')
        for example in examples
    )
    texts = [example['targets_pretokenized'].decode() for example in examples]
    targets = [task.postprocess_fn(text, example=e, is_target=True) for text, e in zip(texts, examples, strict=True)]
    (metric,) = task.metric_fns
    values = metric(targets, ['yes'] * len(texts))
    assert values['accuracy'] == pytest.approx(100 * texts.count('yes') / len(texts))
    groups = {example['type'].decode() for example in examples}
    assert set(values) == {'accuracy', *(f'accuracy/{group}' for group in groups)}


def test_columns_are_part_of_the_identity_but_not_of_the_texts(tmp_path):
    path = write_rows(tmp_path)
    without_column, with_column = (
        local_pairs.corpus(path, 'q', 'a', **options) for options in ({}, {'columns': ['id']})
    )
    assert without_column.identity != with_column.identity
    document = next(iter(without_column.read_training_documents()))
    assert document.count(text_pairs.SEPARATOR) == 1
    texts = list(text_pairs.PairTexts(with_column).read_training_documents())
    assert {'yes', 'no'} < set(texts) and not any(text_pairs.SEPARATOR in text for text in texts)


def test_each_set_of_evaluation_files_is_a_task(tmp_path, capsys):
    files = {'dev': write_rows(tmp_path, 'dev.jsonl', 4), 'hard': write_rows(tmp_path, 'hard.jsonl', 7)}
    read = functools.partial(local_pairs.corpus, files=write_rows(tmp_path), inputs='q', targets='a')
    make = functools.partial(text_pairs.task, vocabulary=BYTES, name='mine')
    task = make(corpus=read())
    assert local_pairs.evaluation_tasks(task, None, read, make) is task
    _, *tasks = local_pairs.evaluation_tasks(task, files, read, make)
    assert [task.name for task in tasks] == ['mine_dev', 'mine_hard']
    counts = [len(list(task.get_dataset({'inputs': 32, 'targets': 8}, 'validation', shuffle=False))) for task in tasks]
    assert counts == [4, 7] and 'hard.jsonl: 7 documents to evaluate' in capsys.readouterr().err
    with pytest.raises(UserError, match="letters, digits and _.:#, got 'mine_very-hard'"):
        local_pairs.evaluation_tasks(task, {'very-hard': files['hard']}, read, make)
    with pytest.raises(UserError, match=r'EVAL_PAIRS and PAIRS must not share files, got .*dev.jsonl in both'):
        local_pairs.evaluation_tasks(task, files, read, make, train=str(tmp_path / 'd*.jsonl'))


def test_a_word_vocabulary_contains_the_words_of_all_rows(tmp_path):
    texts = text_pairs.PairTexts(
        local_pairs.corpus(write_rows(tmp_path), 'q', 'a', validation_files=write_rows(tmp_path, 'b.jsonl', 2))
    )
    vocabulary, again = vocabularies.words(texts), vocabularies.words(texts)
    assert set(vocabulary.words) == {'is', 'even', 'yes', 'no', *map(str, range(20))}
    assert vocabulary == again and vocabulary.vocab_size == 27
    assert vocabulary.decode(vocabulary.encode('is 7 odd')) == 'is 7 <unk>'


def test_unknown_metrics_and_columns_are_rejected(tmp_path):
    with pytest.raises(UserError, match='METRICS must be a list of names from accuracy, exact'):
        text_metrics.select_metrics(['acuracy'])
    with pytest.raises(UserError, match="of .*'q', 'a', 'type', 'id'.*got 'kind'"):
        list(local_pairs.corpus(write_rows(tmp_path), 'q', 'a', columns=['kind']).read_training_documents())
