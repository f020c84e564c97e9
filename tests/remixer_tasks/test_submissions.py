"""Submission files: the names, labels and row order that the leaderboards of GLUE and SuperGLUE publish."""

import json

import pytest

from remixer_tasks.benchmarks import glue, submissions, super_glue, winograd


def rows(*predictions, idx=None, target='the cat', **fields):
    idx = idx or range(len(predictions))
    return [
        {'prediction': text, 'target': target, 'example': {'idx': number, **fields}}
        for number, text in zip(idx, predictions, strict=True)
    ]


def write(tmp_path, task, predictions):
    """Writes a submission; returns the name and the lines of its file, and the message."""
    message = submissions.write_submission(str(tmp_path / 'files'), task, predictions)
    (path,) = (tmp_path / 'files').iterdir()
    return path.name, path.read_text().splitlines(), message


# Prediction, file name and line, from the formats that super.gluebenchmark.com and gluebenchmark.com publish.
LINES = {
    'super_glue_boolq_v102': ('True', 'BoolQ.jsonl', '{"idx": 0, "label": "true"}'),
    'super_glue_cb_v102': ('neutral', 'CB.jsonl', '{"idx": 0, "label": "neutral"}'),
    'super_glue_copa_v102': ('choice2', 'COPA.jsonl', '{"idx": 0, "label": 1}'),
    'super_glue_rte_v102': ('not_entailment', 'RTE.jsonl', '{"idx": 0, "label": "not_entailment"}'),
    'super_glue_wic_v102': ('False', 'WiC.jsonl', '{"idx": 0, "label": "false"}'),
    'super_glue_wsc_v102_simple_eval': ('cat', 'WSC.jsonl', '{"idx": 0, "label": "True"}'),
    'super_glue_axb_v102': ('entailment', 'AX-b.jsonl', '{"idx": 0, "label": "entailment"}'),
    'super_glue_axg_v102': ('entailment', 'AX-g.jsonl', '{"idx": 0, "label": "entailment"}'),
    'glue_cola_v002': ('acceptable', 'CoLA.tsv', '0\t1'),
    'glue_sst2_v002': ('negative', 'SST-2.tsv', '0\t0'),
    'glue_mrpc_v002': ('equivalent', 'MRPC.tsv', '0\t1'),
    'glue_qqp_v002': ('not_duplicate', 'QQP.tsv', '0\t0'),
    'glue_stsb_v002': ('5.6', 'STS-B.tsv', '0\t5.000'),
    'glue_mnli_matched_v002': ('contradiction', 'MNLI-m.tsv', '0\tcontradiction'),
    'glue_mnli_mismatched_v002': ('entailment', 'MNLI-mm.tsv', '0\tentailment'),
    'glue_qnli_v002': ('not_entailment', 'QNLI.tsv', '0\tnot_entailment'),
    'glue_rte_v002': ('entailment', 'RTE.tsv', '0\tentailment'),
    'glue_wnli_v002': ('entailment', 'WNLI.tsv', '0\t1'),
    'glue_ax_v002': ('neutral', 'AX.tsv', '0\tneutral'),
}


@pytest.mark.parametrize('task', LINES)
def test_file_names_and_labels_equal_those_of_the_leaderboards(tmp_path, task):
    prediction, name, line = LINES[task]
    lines = [line] if name.endswith('jsonl') else ['index\tprediction', line]
    assert write(tmp_path, task, rows(prediction))[:2] == (name, lines)


def test_every_task_of_the_leaderboards_has_its_file():
    known = {task.name for task in (*super_glue.TASKS, winograd.TASKS[1], *glue.TASKS)}
    without_leaderboard = {name for name in known if not submissions.get_file_name(name)}
    # MNLI without a suffix has no test split, because the leaderboard has two: matched and mismatched.
    assert without_leaderboard == {'glue_mnli_v002'}
    nested = {'super_glue_multirc_v102', 'super_glue_record_v102'}
    assert set(LINES) | nested == known - without_leaderboard


def test_rows_are_ordered_and_invalid_labels_are_counted(tmp_path):
    predictions = rows('no label', 'entailment', 'not_entailment', idx=[2, 0, 1])
    _, lines, message = write(tmp_path, 'super_glue_rte_v102', predictions)
    assert [json.loads(line)['idx'] for line in lines] == [0, 1, 2]
    assert json.loads(lines[2])['label'] == 'entailment'
    assert '3 predictions, 1 of them invalid and written as entailment' in message


def test_multirc_is_nested(tmp_path):
    predictions = [
        {'prediction': text, 'target': '<unk>', 'example': {'idx/paragraph': p, 'idx/question': q, 'idx/answer': a}}
        for text, p, q, a in [('True', 1, 4, 1), ('False', 0, 0, 0), ('True', 1, 4, 0), ('?', 1, 3, 0)]
    ]
    name, lines, _ = write(tmp_path, 'super_glue_multirc_v102', predictions)
    last = [{'idx': 0, 'label': 1}, {'idx': 1, 'label': 1}]
    questions = [{'idx': 3, 'answers': [{'idx': 0, 'label': 0}]}, {'idx': 4, 'answers': last}]
    assert name == 'MultiRC.jsonl' and [json.loads(line) for line in lines] == [
        {'idx': 0, 'passage': {'questions': [{'idx': 0, 'answers': [{'idx': 0, 'label': 0}]}]}},
        {'idx': 1, 'passage': {'questions': questions}},
    ]


def test_record_has_one_line_for_each_query(tmp_path):
    predictions = [
        {'prediction': text, 'target': 'x', 'example': {'idx/passage': 0, 'idx/query': query}}
        for text, query in [('Ann', 7), ('Bob', 7), ('Cy', 2)]
    ]
    name, lines, _ = write(tmp_path, 'super_glue_record_v102', predictions)
    assert name == 'ReCoRD.jsonl'
    assert [json.loads(line) for line in lines] == [{'idx': 2, 'label': 'Cy'}, {'idx': 7, 'label': 'Ann'}]
