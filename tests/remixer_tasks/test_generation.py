"""CNN/DailyMail and WMT as T5 words them; ROUGE and BLEU as T5 computes them."""

import sys

import pytest
import tensorflow as tf

from remixer_t5x.errors import UserError
from remixer_tasks import catalogue
from remixer_tasks.benchmarks import text_metrics
from tests.support import references

TARGETS = ['The cat sat . It was on the mat .', 'A dog barked .', 'Rain fell all day .']
FOUND = ['The cat sat on a mat . It slept .', 'A dog barked .', 'It rained .']


@pytest.mark.parametrize(
    ('name', 'row', 'inputs', 'targets'),
    [
        ('cnn_dailymail_v002', {'article': 'It rained.', 'highlights': 'Rain.'}, 'summarize: It rained.', 'Rain.'),
        ('wmt_t2t_ende_v003', {'en': 'Good.', 'de': 'Gut.'}, 'translate English to German: Good.', 'Gut.'),
        ('wmt15_enfr_v003', {'en': 'Yes', 'fr': 'Oui'}, 'translate English to French: Yes', 'Oui'),
        ('wmt16_enro_v003', {'en': 'Yes', 'ro': 'Da'}, 'translate English to Romanian: Yes', 'Da'),
    ],
)
def test_rows_are_worded_as_by_t5(name, row, inputs, targets):
    dataset = tf.data.Dataset.from_tensors({key: tf.constant(value) for key, value in row.items()})
    (found,) = catalogue.find(name).to_text(dataset).as_numpy_iterator()
    assert found == {'inputs': inputs.encode(), 'targets': targets.encode()}


def test_bleu_is_t5s():
    references.need('sacrebleu', 't5')
    from t5.evaluation import metrics

    assert text_metrics.bleu(TARGETS, FOUND) == pytest.approx(metrics.bleu(TARGETS, FOUND))
    several = [[text, 'A cat sat .'] for text in TARGETS]
    by_reference = [list(each) for each in zip(*several, strict=True)]
    assert text_metrics.bleu(several, FOUND) == pytest.approx(metrics.bleu(by_reference, FOUND))


def test_rouge_is_the_middle_of_t5s():
    references.need('rouge_score', 't5')
    from t5.evaluation import metrics

    found, theirs = text_metrics.rouge(TARGETS, FOUND), metrics.rouge(TARGETS, FOUND)
    assert set(found) == set(theirs)
    # T5 draws a bootstrap of three examples; its middle is the mean but for chance.
    assert found == pytest.approx(theirs, abs=2.0)


@pytest.mark.parametrize(('metric', 'library'), [('bleu', 'sacrebleu'), ('rouge', 'rouge_score')])
def test_a_missing_library_is_one_line(metric, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f'the metric needs {library}.*: pip install'):
        getattr(text_metrics, metric)(['a'], ['a'])


@pytest.mark.parametrize('metric', ['bleu', 'rouge'])
def test_nothing_is_judged_without_examples(metric):
    assert getattr(text_metrics, metric)([], []) == {}
    with pytest.raises(ValueError, match='do not match'):
        getattr(text_metrics, metric)(['a'], [])
