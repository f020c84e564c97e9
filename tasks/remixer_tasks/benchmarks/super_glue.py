"""SuperGLUE's tasks, named and worded as T5 has them; WSC is in `wsc`.

The diagnostics AX-b and AX-g are answered as RTE. T5 reports nothing on them; where their labels are given, ours report
what the leaderboard does, but for AX-g's gender parity.
"""

from collections.abc import Callable

from remixer_tasks.benchmarks import answer_metrics, answers, class_metrics, prompts
from remixer_tasks.benchmarks.sources import super_glue_files
from remixer_tasks.benchmarks.sources.dataset import Dataset
from remixer_tasks.benchmarks.sources.super_glue_files import BOOLEAN, CHOICES, COMMITMENT, ENTAILMENT
from remixer_tasks.benchmarks.text_task import TextTask


def _tasks(data: Callable[[str], Dataset], name: str) -> tuple[TextTask, ...]:
    """The seven tasks; `name` is what they are called, with a place for SuperGLUE's name of the task."""

    def labelled(folder, features, names, *metrics):
        task = folder.lower()
        to_text = prompts.classification(task, features, names)
        judged_by = metrics or (class_metrics.accuracy,)
        return TextTask(name.format(task), data(folder), to_text, answers.ClassId(names), judged_by)

    return (
        labelled('BoolQ', ('passage', 'question'), BOOLEAN),
        labelled('CB', ('hypothesis', 'premise'), COMMITMENT, class_metrics.mean_f1(3), class_metrics.accuracy),
        labelled('COPA', ('choice1', 'choice2', 'premise', 'question'), CHOICES),
        TextTask(
            name.format('multirc'),
            data('MultiRC'),
            prompts.classification('multirc', ('question', 'answer', 'paragraph'), BOOLEAN, markup=True),
            answers.MultiRC(),
            (answer_metrics.multirc_f1, answer_metrics.multirc_exact_match),
        ),
        TextTask(name.format('record'), data('ReCoRD'), prompts.record, answers.record, (answer_metrics.record,)),
        labelled('RTE', ('hypothesis', 'premise'), ENTAILMENT),
        labelled('WiC', ('sentence1', 'sentence2', 'word'), BOOLEAN),
    )


TASKS = (
    *_tasks(super_glue_files.dataset, 'super_glue_{}_v102'),
    TextTask(
        'super_glue_axb_v102',
        super_glue_files.dataset('AX-b'),
        prompts.classification('rte', {'hypothesis': 'sentence2', 'premise': 'sentence1'}, ENTAILMENT),
        answers.ClassId(ENTAILMENT),
        (class_metrics.matthews_corrcoef,),
    ),
    TextTask(
        'super_glue_axg_v102',
        super_glue_files.dataset('AX-g'),
        prompts.classification('rte', ('hypothesis', 'premise'), ENTAILMENT),
        answers.ClassId(ENTAILMENT),
        (class_metrics.accuracy,),
    ),
)
FEW_SHOT = _tasks(super_glue_files.few_shot, 'fewglue_{}_v001')
