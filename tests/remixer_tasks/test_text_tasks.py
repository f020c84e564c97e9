"""Tasks that T5 lacks (NLI, COGS), mixtures and their rates, and all tasks on real data."""

import fnmatch
import json
import pathlib
import re

import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import resumable_iterator
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_ranking
from remixer_tasks import catalogue, mixtures, names, pretraining, python_docs, vocabularies
from remixer_tasks.benchmarks import cogs
from tests.support.error_lines import error_message
from tests.support.paths import CONFIGS, ROOT, write_text

REAL_ROWS = json.loads((pathlib.Path(__file__).parent / 'golden' / 't5_real_rows.json').read_text())


def pairs(name, split, folder):
    _, examples = catalogue.read_examples(name, split, 10, str(folder))
    return [pair for _, texts in examples for pair in texts]


def json_lines(*rows):
    return ''.join(json.dumps(row) + '\n' for row in rows)


SNLI = [{'sentence1': 'P', 'sentence2': 'H', 'gold_label': label} for label in ('neutral', '-')]
ABDUCTIVE = {'obs1': 'A', 'obs2': 'B', 'hyp1': 'C', 'hyp2': 'D'}
ABDUCTIVE_PAIR = ('abductive_nli obs1: A obs2: B hyp1: C hyp2: D', 'hyp2')
ANLI_PAIR = ('anli hypothesis: H premise: C, d', 'contradiction')
# Task, split, files and expected pairs. SNLI pairs without a majority label are skipped; ANLI and Abductive NLI have
# two layouts.
TASKS_WITHOUT_T5 = [
    ('snli_v001', 'validation', {'snli_1.0/snli_1.0_dev.jsonl': json_lines(*SNLI)},
     [('snli hypothesis: H premise: P', 'neutral')]),
    ('anli_r2_v001', 'validation',
     {'anli_dev/ANLI_analysis_r2_dev.csv': 'eid,context,statement,gold_label\n1,"C, d",H,c\n'}, [ANLI_PAIR]),
    ('anli_r2_v001', 'test',
     {'anli_v0.1/R2/test.jsonl': json_lines({'uid': '1', 'context': 'C, d', 'hypothesis': 'H', 'label': 'c'})},
     [ANLI_PAIR]),
    ('conj_nli_v001', 'validation', {'conjnli/conj_dev.tsv': '\ufeffPremise\tHypothesis\tLabel\nP "q\tH\tneutral\n'},
     [('conj_nli hypothesis: H premise: P "q', 'neutral')]),
    ('conj_nli_v001', 'test', {'conjnli/conj_test.tsv': 'Premise\tHypothesis\nP\tH\n'},
     [('conj_nli hypothesis: H premise: P', '<unk>')]),
    ('abductive_nli_v001', 'validation',
     {'chaosnli_alphanli/chaosNLI_alphanli.jsonl': json_lines({'example': ABDUCTIVE, 'old_label': 2})},
     [ABDUCTIVE_PAIR]),
    ('abductive_nli_v001', 'train',
     {'abductive_nli/train.jsonl': json_lines(ABDUCTIVE), 'abductive_nli/train-labels.lst': '2\n'}, [ABDUCTIVE_PAIR]),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'split', 'files', 'expected'), TASKS_WITHOUT_T5)
def test_tasks_that_t5_lacks_have_their_text_format(tmp_path, name, split, files, expected):
    for file, text in files.items():
        write_text(tmp_path / file, text)
    assert pairs(name, split, tmp_path) == expected


def test_every_task_has_a_row_in_the_docs():
    names = re.findall(r'`([\w*]+)`', (ROOT / 'docs/tasks.md').read_text())
    assert [task for task in catalogue.TASKS if not any(fnmatch.fnmatch(task, name) for name in names)] == []


@pytest.mark.parametrize(
    ('labels', 'words'), [('3\n', "must be 1 or 2, got '3'"), ('1\n2\n', 'must have 1 labels, one per line')]
)
def test_invalid_labels_of_abductive_nli_are_rejected(tmp_path, labels, words):
    write_text(tmp_path / 'abductive_nli/train.jsonl', json_lines(ABDUCTIVE))
    write_text(tmp_path / 'abductive_nli/train-labels.lst', labels)
    assert words in error_message(pairs, 'abductive_nli_v001', 'train', tmp_path)


@pytest.mark.parametrize(
    ('name', 'row', 'inputs', 'targets'),
    [
        ('cnn_dailymail_v002', {'article': 'It rained.', 'highlights': 'Rain.'}, 'summarize: It rained.', 'Rain.'),
        ('wmt_t2t_ende_v003', {'en': 'Good.', 'de': 'Gut.'}, 'translate English to German: Good.', 'Gut.'),
        ('wmt16_enro_v003', {'en': 'Yes', 'ro': 'Da'}, 'translate English to Romanian: Yes', 'Da'),
    ],
)
def test_summaries_and_translations_have_the_text_format_of_t5(name, row, inputs, targets):
    dataset = tf.data.Dataset.from_tensors({key: tf.constant(value) for key, value in row.items()})
    (example,) = catalogue.find_task(name).to_text(dataset).as_numpy_iterator()
    assert example == {'inputs': inputs.encode(), 'targets': targets.encode()}


COGS_ROWS = (
    ('A cat sat .', 'cat ( x _ 1 ) AND sit . agent ( x _ 2 , x _ 1 )', 'in_distribution'),
    ('Ada ran .', 'run . agent ( x _ 1 , Ada )', 'prim_to_subj_proper'),
    ('Ada sat .', 'sit . agent ( x _ 1 , Ada )', 'prim_to_subj_proper'),
    ('Bo ran .', 'run . agent ( x _ 1 , Bo )', 'cp_recursion'),
)


def write_cogs(folder):
    for name in ('train', 'dev', 'test', 'gen'):
        write_text(folder / f'cogs/{name}.tsv', ''.join('\t'.join(row) + '\n' for row in COGS_ROWS))


def test_cogs_from_rows_to_metrics(tmp_path):
    write_cogs(tmp_path)
    vocabulary = cogs.words(str(tmp_path), positions=9)
    assert {'8', 'Ada', 'sit'} <= set(vocabulary.words)
    assert '9' not in vocabulary.words
    task = catalogue.task('cogs_v001', vocabulary, str(tmp_path))
    examples = list(task.get_dataset({'inputs': 8, 'targets': 32}, 'gen', shuffle=False).as_numpy_iterator())
    assert [vocabulary.decode(e['targets'].tolist()) for e in examples] == [row[1] for row in COGS_ROWS]
    assert [vocabulary.decode(e['inputs'].tolist()) for e in examples] == [row[0] for row in COGS_ROWS]
    targets = [task.postprocess_fn(e['targets_pretokenized'].decode(), example=e, is_target=True) for e in examples]
    wrong = {2: 'sit . agent ( x _ 1 , Bo )', 3: ''}
    predictions = [task.postprocess_fn(wrong.get(n, f' {row[1]}  ')) for n, row in enumerate(COGS_ROWS)]
    (metric,) = task.metric_fns
    metrics = metric(targets, predictions)
    assert metrics == pytest.approx(
        {
            'exact_match': 50,
            'exact_match/in_distribution': 100,
            'exact_match/lexical': 50,
            'exact_match/structural': 0,
            'exact_match/generalization': 100 / 3,
            'exact_match/prim_to_subj_proper': 50,
            'exact_match/cp_recursion': 0,
        }
    )
    # The groups of examples are not averaged.
    assert checkpoint_ranking.select_ranking_metric('cogs_v001', metrics, 'mean') == ('mean', 50)


def test_mixtures_exclude_tasks_and_limit_rates(tmp_path):
    vocabulary = vocabularies.byte()
    super_glue = mixtures.super_glue(vocabulary, str(tmp_path), ['super_glue_record_v102'])
    assert {task.name for task in super_glue.tasks} == {*mixtures.SUPER_GLUE} - {'super_glue_record_v102'}
    assert len(mixtures.entailment(vocabulary, str(tmp_path)).tasks) == 9
    text = pretraining.span_corruption(python_docs.corpus(), vocabulary, data='text')
    mixture = mixtures.multi_task(text, unsupervised_rate=5e5, maximum=1e5, data_dir=str(tmp_path))
    rates = {task.name: mixture.get_rate(task) for task in mixture.tasks}
    assert (rates['text_span_corruption'], rates['glue_qqp_v002'], rates['squad_v010_allanswers']) == (5e5, 1e5, 87_599)
    assert len(rates) == len(mixtures.GLUE) + len(mixtures.SUPER_GLUE) + 2


@pytest.mark.parametrize(('maximum', 'temperature'), [(None, 1.0), (300, 2.0)])
def test_rates_equal_those_of_seqio(tmp_path, maximum, temperature):
    feature = seqio.Feature(vocabularies.byte(), add_eos=True)
    source = seqio.FunctionDataSource(lambda split, shuffle_files: None, ['train'], num_input_examples={'train': 1600})
    counted = seqio.Task('counted', source, dict.fromkeys(('inputs', 'targets'), feature), [])
    settings = {'maximum': maximum, 'temperature': temperature}
    mixture = names.mixture([counted, 'super_glue_cb_v102'], rates={'super_glue_cb_v102': 7.5}, **settings)
    rates = {task.name: mixture.get_rate(task) for task in mixture.tasks}
    assert rates['counted'] == seqio.mixing_rate_num_examples(counted, maximum=maximum, temperature=temperature)
    assert rates['super_glue_cb_v102'] == 7.5
    write_cogs(tmp_path)
    mixture = names.mixture(['cogs_v001', 'super_glue_cb_v102'], vocabularies.byte(), str(tmp_path), maximum=100)
    assert {task.name: mixture.get_rate(task) for task in mixture.tasks} == {'cogs_v001': 4, 'super_glue_cb_v102': 100}
    unknown = seqio.Task('unknown', seqio.FunctionDataSource(lambda split, shuffle_files: None, ['train']), {}, [])
    corrupted = pretraining.span_corruption(python_docs.corpus(), vocabularies.byte(), data='text')
    for task in (unknown, corrupted):
        with pytest.raises(UserError, match=f"RATES must include {task.name}, .*RATES = {{'{task.name}'"):
            names.mixture([task]).get_rate(task)
    with pytest.raises(UserError, match='RATES must contain only tasks in TASKS.* got super_glue_rte_v102'):
        names.mixture(['super_glue_cb_v102'], vocabularies.byte(), rates={'super_glue_rte_v102': 1})
    for rate in (0, -1, 'a', float('nan')):
        with pytest.raises(UserError, match=r'RATES.* must (be a non-negative number|contain a number above 0), got '):
            names.mixture(['super_glue_cb_v102'], vocabularies.byte(), rates={'super_glue_cb_v102': rate})
    for tasks in ('super_glue_cb_v102', [], [5], 5):
        with pytest.raises(UserError, match='TASKS must be a list of names, got '):
            names.mixture(tasks)
    for tasks in ([counted, seqio.Task('counted', source, counted.output_features, [])], ['counted'] * 2):
        with pytest.raises(UserError, match='TASKS must have different names, got counted, counted'):
            names.mixture(tasks)


def test_the_vocabulary_size_of_cogs_equals_that_in_its_gin_file(real_data):
    assert cogs.words().vocab_size == 880
    assert '880 ids' in (CONFIGS / 'data/cogs.gin').read_text()


@pytest.mark.parametrize('name', sorted(catalogue.TASKS))
def test_targets_of_real_data_score_as_correct_predictions(name, real_data, shared, monkeypatch):
    """The first examples of each split are encoded without loss, and their targets have positive scores.

    Splits whose texts are compared with those of T5 (test_t5_semantics.py) are skipped. Tasks of a dataset share its
    parsed files.
    """
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(shared / 'cache'))
    task = catalogue.task(name, vocabularies.byte(), str(real_data))
    source = catalogue.find_task(name).create_source(str(real_data))
    available = [split for split in source.splits if source.find_origin(split) and f'{name}/{split}' not in REAL_ROWS]
    if not available:
        pytest.skip(f'no other files of {name} in REMIXER_T5X_DATA')
    lengths = {'inputs': 4096, 'targets': 4096}
    for split in available:
        # Training runs also read tasks without AutoGraph.
        dataset = resumable_iterator.call_without_autograph(
            lambda split=split: task.get_dataset(lengths, split, shuffle=False, try_in_mem_cache=False)
        )
        examples = list(dataset.take(20).as_numpy_iterator())
        decoded = [task.output_features['targets'].vocabulary.decode(e['targets'].tolist()) for e in examples]
        assert decoded == [e['targets_pretokenized'].decode() for e in examples]
        targets, predictions = (
            [
                task.postprocess_fn(text, example=e, is_target=is_target)
                for text, e in zip(decoded, examples, strict=True)
            ]
            for is_target in (True, False)
        )
        for metric in task.metric_fns:
            for value in metric(targets, predictions).values():
                assert 0 < value <= 100 + 1e-9
