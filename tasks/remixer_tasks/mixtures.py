"""Builds mixtures of tasks: GLUE and SuperGLUE with T5's rates, five entailment tasks, and multi-task pretraining.

The mixing rate of a task is its number of training examples, as counted by T5. A task with rate 0 is only evaluated.
In all functions, `data_dir` is the folder of the data (see `text_task`), and `excluded` lists tasks to exclude.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio
from remixer_tasks import catalogue
from remixer_tasks.benchmarks.text_task import TRAIN

# Maps each task to T5's count of training examples: ReCoRD has one example per answer, WSC has only the true pairs.
SUPER_GLUE = {
    'dpr_v001_simple': 1_322,
    'super_glue_wsc_v102_simple_train': 259,
    'super_glue_wsc_v102_simple_eval': 0,
    'super_glue_boolq_v102': 9_427,
    'super_glue_cb_v102': 250,
    'super_glue_copa_v102': 400,
    'super_glue_multirc_v102': 27_243,
    'super_glue_record_v102': 138_854,
    'super_glue_rte_v102': 2_490,
    'super_glue_wic_v102': 5_428,
    'super_glue_axb_v102': 0,
    'super_glue_axg_v102': 0,
}
# WNLI is not included, because T5 evaluates WNLI with models trained on WSC and DPR.
GLUE = {
    'glue_cola_v002': 8_551,
    'glue_sst2_v002': 67_349,
    'glue_mrpc_v002': 3_668,
    'glue_qqp_v002': 363_849,
    'glue_stsb_v002': 5_749,
    'glue_mnli_v002': 392_702,
    'glue_qnli_v002': 104_743,
    'glue_rte_v002': 2_490,
    'glue_mnli_mismatched_v002': 0,
    'glue_mnli_matched_v002': 0,
    'glue_ax_v002': 0,
}
# The entailment tasks of Tay et al. (Remixer): MNLI, Adversarial, Conjunctive and Abductive NLI, QNLI.
ENTAILMENT = {
    'glue_mnli_v002': 392_702,
    'glue_mnli_mismatched_v002': 0,
    'glue_mnli_matched_v002': 0,
    'anli_r1_v001': 16_946,
    'anli_r2_v001': 45_460,
    'anli_r3_v001': 100_459,
    'conj_nli_v001': 15_000,
    'abductive_nli_v001': 169_654,
    'glue_qnli_v002': 104_743,
}
SQUAD = {'squad_v010_allanswers': 87_599}


def glue(vocabulary: seqio.Vocabulary, data_dir: str | None = None, excluded: Sequence[str] = ()) -> seqio.Mixture:
    """Returns the mixture of GLUE without WNLI."""
    return build_mixture('glue_v002_proportional', GLUE, vocabulary, data_dir, excluded)


def super_glue(
    vocabulary: seqio.Vocabulary, data_dir: str | None = None, excluded: Sequence[str] = ()
) -> seqio.Mixture:
    """Returns the mixture of SuperGLUE with DPR and the diagnostic tasks."""
    return build_mixture('super_glue_v102_proportional', SUPER_GLUE, vocabulary, data_dir, excluded)


def entailment(
    vocabulary: seqio.Vocabulary, data_dir: str | None = None, excluded: Sequence[str] = ()
) -> seqio.Mixture:
    """Returns the mixture of the five entailment tasks."""
    return build_mixture('entailment_v001_proportional', ENTAILMENT, vocabulary, data_dir, excluded)


def multi_task(
    unsupervised: seqio.Task,
    unsupervised_rate: ranges.Positive = 1e6,
    maximum: ranges.Positive = 2**19,
    vocabulary: seqio.Vocabulary | None = None,
    data_dir: str | None = None,
    excluded: Sequence[str] = (),
    name: str = 'mt_v001_mix',
) -> seqio.Mixture:
    """Returns the mixture for multi-task pretraining (T5's en_mix): span corruption, GLUE, SuperGLUE and SQuAD.

    Args:
        unsupervised: the span corruption task.
        unsupervised_rate: mixing rate of the span corruption task; the final T5 Base used 2,620,000.
        maximum: maximum mixing rate of the other tasks.
        vocabulary: vocabulary of the other tasks; None uses the vocabulary of `unsupervised`.
    """
    vocabulary = vocabulary or unsupervised.output_features['targets'].vocabulary
    rates = {task: min(rate, maximum) for task, rate in {**GLUE, **SUPER_GLUE, **SQUAD}.items()}
    return build_mixture(name, rates, vocabulary, data_dir, excluded, [(unsupervised, unsupervised_rate)])


def count_examples(task: seqio.Task) -> float:
    """Returns the number of training examples, as counted by T5 if known; returns 0 without a training split."""
    if TRAIN not in task.splits:
        return 0.0
    if known := {**GLUE, **SUPER_GLUE, **ENTAILMENT, **SQUAD}.get(task.name):
        return float(known)
    # Imported lazily, because `sources` imports seqio.
    from remixer_tasks.corpora.sources import CorpusTask

    # The sources in `sources.py` do not report their numbers of examples to seqio.
    count = getattr(task.source, 'count_examples', task.source.num_input_examples)
    # Pretraining examples are not documents, and UL2's denoisers share one corpus, so the number is unknown.
    number = None if isinstance(task, CorpusTask) else count(TRAIN)
    if number is None:
        raise UserError(
            f'RATES must include {task.name}, whose number of examples is unknown; set '
            f"RATES = {{'{task.name}': 1000000}}"
        )
    return float(number)


def build_mixture(
    name: str,
    rates: Mapping[str, float],
    vocabulary: seqio.Vocabulary,
    data_dir: str | None,
    excluded: Sequence[str] = (),
    more: Sequence[tuple[seqio.Task, float]] = (),
) -> seqio.Mixture:
    """Returns the mixture of the tasks in `rates`, except those in `excluded`, and of `more` tasks with their rates."""
    if unknown := sorted(set(excluded) - set(rates)):
        raise UserError(
            f'EXCLUDED_TASKS must contain only tasks of {name} ({", ".join(rates)}), got {", ".join(unknown)}'
        )
    tasks = [
        (catalogue.task(task, vocabulary, data_dir), float(rate))
        for task, rate in rates.items()
        if task not in excluded
    ]
    return seqio.Mixture(name, [*more, *tasks])
