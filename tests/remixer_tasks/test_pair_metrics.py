"""Metrics by their names and by a column, and the columns that travel with a user's rows."""

import functools
import json

import pytest
import seqio

from remixer_t5x.errors import UserError
from remixer_tasks import local_pairs, text_pairs, vocabularies
from remixer_tasks.benchmarks import answers, pair_metrics

BYTES = seqio.ByteVocabulary(extra_ids=100)
TARGETS, FOUND = ['yes', 'no', 'no', 'no'], ['yes', 'no', 'yes', ' no']


def test_metrics_have_names():
    values = {}
    for metric in pair_metrics.named('accuracy, exact_match, best_constant_answer, squad, macro_f1'):
        values |= metric(TARGETS, FOUND)
    # 'yes' is named twice and once right; ' no' is another text than 'no'.
    assert values == pytest.approx(
        {
            'accuracy': 50,
            'exact_match': 75,
            'best_constant_answer': 75,
            'em': 75,
            'f1': 75,
            'macro_f1': 100 * (2 / 3 + 2 / 4) / 2,
        }
    )


def test_numbers_are_compared_as_numbers():
    (metric,) = pair_metrics.named(['regression'])
    found = metric(['1', '2', '4'], ['1.5', '2', 'x'])
    assert found['mean_absolute_error'] == pytest.approx(1.5)
    assert set(found) == {'pearson_corrcoef', 'spearman_corrcoef', 'mean_absolute_error'}


@pytest.mark.parametrize('text', ['nan', 'NaN', 'inf', '-infinity', '1_000', '1e999', '٣', '', '0x10', '1,5'])
def test_what_a_model_writes_is_a_number_only_in_decimal_digits(text):
    (metric,) = pair_metrics.named(['regression'])
    assert metric(['1', '2', '4'], ['1.5', '2', text]) == metric(['1', '2', '4'], ['1.5', '2', 'x'])
    assert answers.number(text) == answers.INVALID and answers.number(' -1.5e1 ') == -15.0


@pytest.mark.parametrize('names', [['acuracy'], [], 'f2'])
def test_unknown_metrics(names):
    with pytest.raises(UserError, match='METRICS must be some of accuracy, exact_match'):
        pair_metrics.named(names)


def rows(tmp_path, name='a.jsonl', count=20):
    path = tmp_path / name
    lines = [{'q': f'is {i} even', 'a': ('yes', 'no')[i % 2], 'type': f't{i % 3}', 'id': i} for i in range(count)]
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return str(path)


def test_columns_travel_and_metrics_are_told_apart_by_one(tmp_path):
    options = {'columns': ['id'], 'metrics_by': 'type'}
    corpus = local_pairs.corpus(rows(tmp_path), 'q', 'a', validation_fraction=0.3, **options)
    task = text_pairs.task(corpus, BYTES, 'mine', **options)
    examples = list(task.get_dataset({'inputs': 32, 'targets': 8}, 'validation', shuffle=False).as_numpy_iterator())
    assert examples and all(
        example['type'] == b't%d' % (int(example['id']) % 3) and example['inputs_pretokenized'].startswith(b'is ')
        for example in examples
    )
    texts = [example['targets_pretokenized'].decode() for example in examples]
    judged = [task.postprocess_fn(text, example=e, is_target=True) for text, e in zip(texts, examples, strict=True)]
    (metric,) = task.metric_fns
    values = metric(judged, ['yes'] * len(texts))
    assert values['accuracy'] == pytest.approx(100 * texts.count('yes') / len(texts))
    groups = {example['type'].decode() for example in examples}
    assert set(values) == {'accuracy', *(f'accuracy/{group}' for group in groups)}


def test_without_columns_the_rows_are_read_as_before(tmp_path):
    path = rows(tmp_path)
    plain, kept = (local_pairs.corpus(path, 'q', 'a', **more) for more in ({}, {'columns': ['id']}))
    assert plain.identity != kept.identity
    document = next(iter(plain.training_documents()))
    assert document.count(text_pairs.SEPARATOR) == 1
    texts = list(local_pairs.texts(kept).training_documents())
    assert {'yes', 'no'} < set(texts) and not any(text_pairs.SEPARATOR in text for text in texts)


@pytest.mark.parametrize(
    ('options', 'said'),
    [({'columns': ['kind']}, "names 'kind', and .* has the columns q, a, type, id"),
     ({'metrics_by': 'targets'}, 'must name columns other than inputs')],
)  # fmt: skip
def test_columns_that_are_not_there(tmp_path, options, said):
    with pytest.raises(UserError, match=said):
        list(local_pairs.corpus(rows(tmp_path), 'q', 'a', **options).training_documents())


def test_several_files_are_evaluated_side_by_side(tmp_path):
    files = {'dev': rows(tmp_path, 'dev.jsonl', 4), 'hard': rows(tmp_path, 'hard.jsonl', 7)}
    read = functools.partial(local_pairs.corpus, files=rows(tmp_path), inputs='q', targets='a')
    make = functools.partial(text_pairs.task, vocabulary=BYTES, name='mine')
    task = make(corpus=read())
    assert local_pairs.evaluated(task, None, read, make) is task
    _, *tasks = local_pairs.evaluated(task, files, read, make)
    assert [task.name for task in tasks] == ['mine_dev', 'mine_hard']
    counts = [len(list(task.get_dataset({'inputs': 32, 'targets': 8}, 'validation', shuffle=False))) for task in tasks]
    assert counts == [4, 7]


def test_a_vocabulary_of_few_words_has_the_pieces_that_there_are(tmp_path):
    texts = local_pairs.texts(local_pairs.corpus(rows(tmp_path), 'q', 'a'))
    vocabulary = vocabularies.trained(texts, 1024, at_most=True)
    assert 190 < vocabulary.vocab_size < 300
    assert vocabulary.decode(vocabulary.encode('is 7 even')) == 'is 7 even'
    with pytest.raises(UserError, match='the text is too small for a vocabulary of 924 pieces'):
        vocabularies.trained(texts, 1024).vocab_size  # noqa: B018 (trains)


def test_words_of_the_rows_are_a_vocabulary(tmp_path):
    texts = local_pairs.texts(
        local_pairs.corpus(rows(tmp_path), 'q', 'a', validation_files=rows(tmp_path, 'b.jsonl', 2))
    )
    vocabulary, again = vocabularies.words(texts), vocabularies.words(texts)
    assert set(vocabulary.words) == {'is', 'even', 'yes', 'no', *map(str, range(20))}
    assert vocabulary == again and vocabulary.vocab_size == 27
    assert vocabulary.decode(vocabulary.encode('is 7 odd')) == 'is 7 <unk>'


@pytest.mark.parametrize(
    ('files', 'said'),
    [('hard.jsonl', "EVAL_PAIRS must name each file, got 'ha"), ({'../x': 'a'}, "must have letters.* got '../x'")],
)
def test_files_to_evaluate_on_have_names_for_folders(files, said):
    with pytest.raises(UserError, match=said):
        local_pairs.evaluated(None, files, None, None)
