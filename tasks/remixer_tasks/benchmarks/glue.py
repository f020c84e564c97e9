"""GLUE's tasks, named and worded as T5 has them.

The diagnostic AX is answered as MNLI. T5 reports nothing on it; where its labels are given, ours report the
leaderboard's metric. WNLI is there twice: as a classification, and as T5 evaluates it, by the noun that WSC's models
name.
"""

from remixer_tasks.benchmarks import answers, class_metrics, prompts
from remixer_tasks.benchmarks.sources import glue_files, winograd_nli
from remixer_tasks.benchmarks.sources.dataset import TEST, VALIDATION
from remixer_tasks.benchmarks.text_task import TextTask

_F1_AND_ACCURACY = (class_metrics.f1, class_metrics.accuracy)


def _task(name: str, features: tuple[str, ...], metrics=(class_metrics.accuracy,), worded_as: str | None = None):
    """features: in the order of their names, as T5 has them."""
    wording = worded_as or name
    names = glue_files.LABELS[wording]
    return TextTask(
        f'glue_{name}_v002',
        glue_files.DATASETS[name],
        prompts.classification(wording, features, names),
        answers.ClassId(names),
        metrics,
    )


_MNLI = ('hypothesis', 'premise')
TASKS = (
    _task('cola', ('sentence',), (class_metrics.matthews_corrcoef,)),
    _task('sst2', ('sentence',)),
    _task('mrpc', ('sentence1', 'sentence2'), _F1_AND_ACCURACY),
    _task('qqp', ('question1', 'question2'), _F1_AND_ACCURACY),
    TextTask(
        'glue_stsb_v002',
        glue_files.DATASETS['stsb'],
        prompts.similarity,
        answers.number,
        (class_metrics.pearson_corrcoef, class_metrics.spearman_corrcoef),
    ),
    _task('mnli', _MNLI),
    _task('mnli_matched', _MNLI, worded_as='mnli'),
    _task('mnli_mismatched', _MNLI, worded_as='mnli'),
    _task('qnli', ('question', 'sentence')),
    _task('rte', ('sentence1', 'sentence2')),
    _task('wnli', ('sentence1', 'sentence2')),
    _task('ax', _MNLI, (class_metrics.matthews_corrcoef,), worded_as='mnli'),
    TextTask(
        'glue_wnli_v002_simple_eval',
        glue_files.DATASETS['wnli'],
        winograd_nli.as_schema,
        answers.refers,
        (class_metrics.accuracy,),
        splits=(VALIDATION, TEST),
    ),
)
