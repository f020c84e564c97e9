"""Natural language inference beyond GLUE, worded like MNLI: SNLI, ANLI's three rounds, ConjNLI, Abductive NLI.

T5 has no such tasks; the names and wording are ours. Pairs of SNLI without an agreed label are left out.
"""

from remixer_tasks.benchmarks import answers, class_metrics, prompts
from remixer_tasks.benchmarks.sources import nli_files
from remixer_tasks.benchmarks.sources.dataset import UNLABELLED
from remixer_tasks.benchmarks.sources.nli_files import CHOICES, THREE
from remixer_tasks.benchmarks.text_task import TextTask

_ACCURACY = (class_metrics.accuracy,)


def _pair(name: str, dataset, worded_as: str, columns: dict[str, str]) -> TextTask:
    to_text = prompts.classification(worded_as, columns, THREE)
    return TextTask(name, dataset, to_text, answers.ClassId(THREE), _ACCURACY)


def _agreed(preprocess):
    return lambda dataset: preprocess(dataset.filter(lambda example: example['label'] != UNLABELLED))


_COLUMNS = {'hypothesis': 'hypothesis', 'premise': 'premise'}
_SNLI = TextTask(
    'snli_v001',
    nli_files.SNLI,
    _agreed(prompts.classification('snli', _COLUMNS, THREE)),
    answers.ClassId(THREE),
    _ACCURACY,
)
_ANLI = tuple(
    _pair(f'anli_r{number}_v001', nli_files.ANLI[number], 'anli', {'hypothesis': 'hypothesis', 'premise': 'context'})
    for number in (1, 2, 3)
)
_ABDUCTIVE = TextTask(
    'abductive_nli_v001',
    nli_files.ABDUCTIVE,
    prompts.classification('abductive_nli', ('obs1', 'obs2', 'hyp1', 'hyp2'), CHOICES),
    answers.ClassId(CHOICES),
    _ACCURACY,
)
TASKS = (_SNLI, *_ANLI, _pair('conj_nli_v001', nli_files.CONJUNCTIVE, 'conj_nli', _COLUMNS), _ABDUCTIVE)
