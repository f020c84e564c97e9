# ruff: noqa: E501 (rows of data)
"""Writes t5_tasks.json: what T5's own library makes of raw rows, and how it scores predictions.

The rows are written here, in the files' published formats; TFDS's builders read them, T5's preprocessors word them, and
T5's postprocessors and metrics judge the predictions. Of real data, found in the folder REMIXER_T5X_DATA, only counts and
hashes are kept. Needs google-research/text-to-text-transfer-transformer (commit e081111) and scikit-learn:
`REMIXER_T5X_DATA=... python tests/tasks/golden/make_t5_tasks.py`.
"""

import csv
import functools
import hashlib
import json
import os
import pathlib
import random
import tempfile

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from t5.data import glue_utils, postprocessors, preprocessors
from t5.evaluation import metrics

HERE = pathlib.Path(__file__).parent
KEPT = ('inputs', 'targets', 'answers', 'label', 'idx/question', 'idx/passage', 'idx/query')
# Larger splits are printed only: they would take the tests minutes.
MOST_ROWS = 2500
SUPER_GLUE = {
    'BoolQ': 'boolq', 'CB': 'cb', 'COPA': 'copa', 'MultiRC': 'multirc', 'ReCoRD': 'record', 'RTE': 'rte', 'WiC': 'wic',
    'WSC': 'wsc.fixed', 'AX-b': 'axb', 'AX-g': 'axg',
}  # fmt: skip
GLUE = {'CoLA': 'cola', 'SST-2': 'sst2', 'QQP': 'qqp', 'STS-B': 'stsb', 'QNLI': 'qnli', 'RTE': 'rte', 'WNLI': 'wnli'}


def json_lines(*rows):
    return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)


def table(*rows):
    return ''.join('\t'.join(row) + '\n' for row in rows)


def span(text, name, start=0):
    begin = text.index(name, start)
    return {'start': begin, 'end': begin + len(name) - 1}


STORY = (
    'Ada met Bo Lee in Oslo.\n@highlight\nBo Lee sang "well"\n@highlight\nThe crowd liked Ada\n@highlight\nIt rained.'
)
FILES = {
    'super_glue/BoolQ/train.jsonl': json_lines(
        {'question': 'is tea  hot', 'passage': 'Tea -- it is (often) hot.', 'idx': 3, 'label': True},
        {'question': 'is ice naïve', 'passage': 'Ice \u2013 cold & "dry"\ttab.', 'idx': 4, 'label': False},
    ),
    'super_glue/BoolQ/test.jsonl': json_lines({'question': 'is it', 'passage': 'Perhaps.', 'idx': 0}),
    'super_glue/CB/val.jsonl': json_lines(
        *({'premise': f'A said B {n}.', 'hypothesis': 'B', 'label': label, 'idx': n}
          for n, label in enumerate(('entailment', 'contradiction', 'neutral'))),
    ),
    'super_glue/COPA/val.jsonl': json_lines(
        {'premise': 'It fell.', 'choice1': 'Wind.', 'choice2': 'Sun.', 'question': 'cause', 'label': 0, 'idx': 0},
        {'premise': 'It rose.', 'choice1': 'Joy.', 'choice2': 'Fear.', 'question': 'effect', 'label': 1, 'idx': 1},
    ),
    'super_glue/MultiRC/val.jsonl': json_lines(
        {'idx': 5, 'version': 1.1, 'passage': {
            'text': '<b>Sent 1: </b>Rain fell.<br><b>Sent 2: </b>A < B.<br/>',
            'questions': [
                {'question': 'What fell?', 'idx': 9, 'sentences_used': [0], 'answers': [
                    {'text': 'Rain', 'idx': 20, 'label': 1}, {'text': 'Snow <b>', 'idx': 21, 'label': 0}]},
                {'question': 'Who?', 'idx': 10, 'answers': [{'text': 'Nobody', 'idx': 22, 'label': 0}]},
            ]}},
    ),
    'super_glue/ReCoRD/val.jsonl': json_lines(
        {'idx': 7, 'source': 'none', 'passage': {'text': STORY, 'entities': [
            span(STORY, 'Bo Lee'), span(STORY, 'Ada'), span(STORY, 'Oslo'), span(STORY, 'Ada', 20)]},
         'qas': [
             {'query': '@placeholder sang', 'idx': 11, 'answers': [
                 {'text': 'Bo Lee', **span(STORY, 'Bo Lee')}, {'text': 'Bo Lee', **span(STORY, 'Bo Lee', 20)}]},
             {'query': 'Who is @placeholder?', 'idx': 12, 'answers': [
                 {'text': 'Oslo', **span(STORY, 'Oslo')}, {'text': 'Ada', **span(STORY, 'Ada')}]},
         ]},
    ),
    'super_glue/ReCoRD/test.jsonl': json_lines(
        {'idx': 0, 'passage': {'text': STORY, 'entities': [span(STORY, 'Ada')]},
         'qas': [{'query': '@placeholder!', 'idx': 1}]},
    ),
    'super_glue/RTE/train.jsonl': json_lines(
        {'premise': 'No.', 'hypothesis': 'Yes.', 'label': 'not_entailment', 'idx': 0},
        {'premise': 'Yes.', 'hypothesis': 'Yes.', 'label': 'entailment', 'idx': 1},
    ),
    'super_glue/WiC/val.jsonl': json_lines(
        {'word': 'bank', 'sentence1': 'A bank pays.', 'sentence2': 'A river bank.', 'idx': 0, 'label': False,
         'start1': 2, 'end1': 6, 'start2': 8, 'end2': 12, 'version': 1.1},
        {'word': 'run', 'sentence1': 'Run!', 'sentence2': 'They ran.', 'idx': 1, 'label': True,
         'start1': 0, 'end1': 3, 'start2': 5, 'end2': 8, 'version': 1.1},
    ),
    'super_glue/WSC/train.jsonl': json_lines(
        *({'text': text, 'idx': n, 'label': label, 'target': {
            'span1_text': first, 'span1_index': i, 'span2_text': second, 'span2_index': j}}
          for n, (text, first, i, second, j, label) in enumerate((
              ('Ann told Sue that she was late.', 'Ann', 0, 'she', 4, True),
              ('Ann told Sue that she was late.', 'Sue', 2, 'she', 4, False),
              ('The red hat fell off and it broke .', 'the red hat.', 0, 'it', 6, True),
              ('In the box, a cup was so big that it broke.', 'A cup', 3, 'it', 9, True),
              ('I have an X here and it shines , it really does', 'X', 3, 'it', 6, True),
          ))),
    ),
    'super_glue/AX-b/AX-b.jsonl': json_lines(
        {'idx': 0, 'label': 'not_entailment', 'sentence1': 'A cat sat.', 'sentence2': 'No cat sat.', 'logic': 'Negation'}),
    'super_glue/AX-g/AX-g.jsonl': json_lines(
        {'hypothesis': 'He ate.', 'idx': 0, 'label': 'entailment', 'pair_id': 1, 'premise': 'A man ate.'}),
    'glue/CoLA/train.tsv': table(('gj04', '1', '', 'A "cat sat.'), ('gj04', '0', '*', 'Cat the sat')),
    'glue/CoLA/test.tsv': table(('index', 'sentence'), ('0', 'Is it?')),
    'glue/SST-2/dev.tsv': table(('sentence', 'label'), ('a joy . ', '1'), ('tedious', '0')),
    'glue/QQP/dev.tsv': table(
        ('id', 'qid1', 'qid2', 'question1', 'question2', 'is_duplicate'),
        ('0', '1', '2', 'Why "so?', 'Why?', '1'), ('1', '3', '4', 'How'), ('2', '5', '6', 'Who?', 'When?', '0')),
    'glue/STS-B/train.tsv': table(
        ('index', 'genre', 'sentence1', 'sentence2', 'score'),
        *((str(n), 'x', 'A man sings.', f'Song {n}', score) for n, score in enumerate(('5.000', '3.8', '0.1', '2.50', '0')))),
    'glue/QNLI/dev.tsv': table(
        ('index', 'question', 'sentence', 'label'), ('0', 'Who?', 'Ada did.', 'entailment'), ('1', 'Why?', 'Ada.', 'not_entailment')),
    'glue/RTE/dev.tsv': table(
        ('index', 'sentence1', 'sentence2', 'label'), ('0', 'It rains.', 'It pours.', 'not_entailment'), ('1', 'A.', 'A.', 'entailment')),
    'glue/WNLI/dev.tsv': table(
        ('index', 'sentence1', 'sentence2', 'label'),
        ('0', 'The cup hit the jar, and it broke.', 'The jar broke.', '1'),
        ('1', "Ann saw Sue's dog. She ran to her.", 'Ann ran to her.', '0'),
        ('2', 'The old man lost his hat because he forgot it.', "The old man lost the old man's hat.", '1'),
        ('3', 'If it rains, they stay in.', 'If it rains, the boys stay in.', '1')),
    'glue/MNLI/dev_matched.tsv': table(
        ('index', 'sentence1', 'sentence2', 'label1', 'gold_label'), ('0', 'P.', 'H.', 'neutral', 'neutral'),
        ('1', 'P2.', 'H2 ', 'neutral', 'contradiction')),
    'dpr_wsc/train.c.txt': 'The bee sat on the rose because it had pollen, it is said.\nit\nThe bee, the rose\nthe rose\n\n'
                           'Sue hit Ann , and she, cried.\nshe\nSue,Ann\nAnn\n\n',
    'squad/dev-v1.1.json': json.dumps({'version': '1.1', 'data': [{'title': 'T', 'paragraphs': [{
        'context': 'In 1,066 (AD) William-the-Great won\n at "Hastings".', 'qas': [
            {'id': 'a1', 'question': 'Who won?', 'answers': [
                {'text': 'William-the-Great', 'answer_start': 14}, {'text': 'William', 'answer_start': 14}]},
            {'id': 'a2', 'question': 'When, exactly?', 'answers': [{'text': '1,066 (AD)', 'answer_start': 3}]}]}]}]}),
}  # fmt: skip


def examples_of(builder, generated):
    """A dataset of what a TFDS builder's reader yields."""
    features = builder.info.features
    records = [features.serialize_example(example) for _, example in generated]
    return tf.data.Dataset.from_tensor_slices(records).map(features.deserialize_example)


def super_glue(config, folder, file):
    """What T5 makes of a raw SuperGLUE file."""
    builder = tfds.text.super_glue.SuperGlue(config=config, data_dir=tempfile.mkdtemp())
    split = 'test' if 'test' in file.name or config.startswith('ax') else 'train'
    data = examples_of(builder, builder._generate_examples(file, split))
    if config == 'axb':
        data = preprocessors.rekey(
            data, key_map={'premise': 'sentence1', 'hypothesis': 'sentence2', 'label': 'label', 'idx': 'idx'}
        )
    return glue_utils.get_glue_text_preprocessor(builder.builder_config)(data)


def wsc(file, only_true):
    builder = tfds.text.super_glue.SuperGlue(config='wsc.fixed', data_dir=tempfile.mkdtemp())
    data = examples_of(builder, builder._generate_examples(file, 'test'))
    return preprocessors.wsc_simple(data, correct_referent_only=only_true)


def glue_builder(config):
    return tfds.text.glue.Glue(config=config, data_dir=tempfile.mkdtemp())


def glue(config, file, preprocess=None):
    builder = glue_builder(config)
    split = {'test': 'test', 'wnli-test': 'test'}.get(file.stem, 'train')
    data = examples_of(builder, builder._generate_examples(file, split))
    return (preprocess or glue_utils.get_glue_text_preprocessor(builder.builder_config))(data)


def csv_pairs(config, columns, file, rows=slice(None), preprocess=None):
    """A CSV file with premise, hypothesis and label as examples of a GLUE configuration."""
    builder = glue_builder(config)
    with open(file, newline='') as opened:
        found = list(csv.DictReader(opened))[rows]
    generated = [
        (n, {columns[0]: row['premise'], columns[1]: row['hypothesis'], 'label': row['label'], 'idx': n})
        for n, row in enumerate(found)
    ]
    data = examples_of(builder, generated)
    return (preprocess or glue_utils.get_glue_text_preprocessor(builder.builder_config))(data)


def pronouns(file):
    builder = tfds.text.DefinitePronounResolution(data_dir=tempfile.mkdtemp())
    data = examples_of(builder, builder._generate_examples(file))
    return preprocessors.definite_pronoun_resolution_simple(data)


def squad(file):
    from tensorflow_datasets.datasets.squad.squad_dataset_builder import Builder

    builder = Builder(config='v1.1', data_dir=tempfile.mkdtemp(), version='3.0.0')
    generated = ((key, {**example}) for key, example in builder._generate_examples(file))
    return preprocessors.squad(examples_of(builder, generated))


def pipelines(root):
    """{'task/split': function that gives T5's dataset} for the files there."""
    found = {}
    for folder, config in SUPER_GLUE.items():
        for name, split in (('train', 'train'), ('val', 'validation'), ('test', 'test'), (folder, 'test')):
            file = root / 'super_glue' / folder / f'{name}.jsonl'
            if not file.exists():
                continue
            if folder == 'WSC':
                if split == 'train':
                    found['super_glue_wsc_v102_simple_train/train'] = functools.partial(wsc, file, True)
                else:
                    found[f'super_glue_wsc_v102_simple_eval/{split}'] = functools.partial(wsc, file, False)
            else:
                found[f'super_glue_{config}_v102/{split}'] = functools.partial(super_glue, config, folder, file)
        for name, split in (('train', 'train'), ('dev32', 'validation')):
            file = root / 'fewglue' / folder / f'{name}.jsonl'
            if file.exists() and folder != 'WSC':
                found[f'fewglue_{config}_v001/{split}'] = functools.partial(super_glue, config, folder, file)
    for folder, config in GLUE.items():
        for name, split in (('train', 'train'), ('dev', 'validation'), ('test', 'test')):
            file = root / 'glue' / folder / f'{name}.tsv'
            if file.exists():
                found[f'glue_{config}_v002/{split}'] = functools.partial(glue, config, file)
                if config == 'wnli' and split != 'train':
                    simple = functools.partial(glue, 'wnli', file, preprocessors.wnli_simple)
                    found[f'glue_wnli_v002_simple_eval/{split}'] = simple
    matched = root / 'glue/MNLI/dev_matched.tsv'
    if matched.exists():
        found['glue_mnli_matched_v002/validation'] = functools.partial(glue, 'mnli_matched', matched)
    if (root / 'dpr_wsc/train.c.txt').exists():
        found['dpr_v001_simple/train'] = functools.partial(pronouns, root / 'dpr_wsc/train.c.txt')
    if (root / 'dpr_wsc/test.c.txt').exists():
        found['dpr_v001_simple/test'] = functools.partial(pronouns, root / 'dpr_wsc/test.c.txt')
    if (root / 'squad/dev-v1.1.json').exists():
        found['squad_v010_allanswers/validation'] = functools.partial(squad, root / 'squad/dev-v1.1.json')
    return found


def other_layouts(root):
    """Files that TFDS does not know, read as what they are."""
    cola = [root / 'glue/CoLA' / f'{name}.tsv' for name in ('in_domain_train', 'in_domain_dev', 'out_of_domain_dev')]
    pair, mnli = ('sentence1', 'sentence2'), root / 'nli_datasets/mnli/dev.csv'
    folder = root / 'nli_datasets'
    found = {
        'glue_cola_v002/train': functools.partial(glue, 'cola', cola[0]),
        'glue_cola_v002/validation': lambda: glue('cola', cola[1]).concatenate(glue('cola', cola[2])),
        'glue_wnli_v002/test': functools.partial(glue, 'wnli', root / 'dpr_wsc/wnli-test.tsv'),
        'glue_wnli_v002_simple_eval/test': functools.partial(
            glue, 'wnli', root / 'dpr_wsc/wnli-test.tsv', preprocessors.wnli_simple
        ),
        'glue_wnli_v002_simple_eval/validation': functools.partial(
            csv_pairs, 'wnli', pair, folder / 'wnli/dev.csv', preprocess=preprocessors.wnli_simple
        ),
    }
    for config in ('rte', 'wnli'):
        for split, name in (('train', 'train'), ('validation', 'dev')):
            file = folder / config / f'{name}.csv'
            found[f'glue_{config}_v002/{split}'] = functools.partial(csv_pairs, config, pair, file)
    for kind, rows in (('matched', slice(0, 9815)), ('mismatched', slice(9815, None))):
        found[f'glue_mnli_{kind}_v002/validation'] = functools.partial(
            csv_pairs, f'mnli_{kind}', ('premise', 'hypothesis'), mnli, rows
        )
    return found


def plain(value):
    if isinstance(value, bytes):
        return value.decode()
    return [plain(part) for part in value] if value.ndim else value.item()


def rows_of(dataset):
    return [
        {name: plain(value) for name, value in example.items() if name in KEPT}
        for example in dataset.as_numpy_iterator()
    ]


def digest(rows):
    lines = sorted(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return hashlib.sha256('\n'.join(lines).encode()).hexdigest()


def functions_of(task):
    """(postprocess, metric functions) as T5 registers them."""
    if task == 'dpr':
        return lambda text, **_: text, [metrics.accuracy]
    if task == 'wsc':
        return postprocessors.wsc_simple, [metrics.accuracy]
    if task == 'squad':
        return postprocessors.qa, [metrics.squad]
    suite, _, config = task.partition('/')
    builder = tfds.text.super_glue.SuperGlue if suite == 'super_glue' else tfds.text.glue.Glue
    of = glue_utils.get_super_glue_metric if suite == 'super_glue' else glue_utils.get_glue_metric
    return glue_utils.get_glue_postprocess_fn(builder.builder_configs[config]), of(config)


def scored(task, examples, predictions):
    """T5's metrics of predicted texts; `examples` are preprocessed, texts as str."""
    postprocess, functions = functions_of(task)
    as_bytes = [
        {name: [t.encode() for t in value] if isinstance(value, list) else value.encode() if isinstance(value, str) else value
         for name, value in example.items()}
        for example in examples
    ]  # fmt: skip
    targets = [postprocess(e['targets'], example=b, is_target=True) for e, b in zip(examples, as_bytes, strict=True)]
    found = [postprocess(p, example=b, is_target=False) for p, b in zip(predictions, as_bytes, strict=True)]
    values = {}
    for function in functions:
        values.update({name: float(value) for name, value in function(targets, found).items()})
    return {'task': task, 'examples': examples, 'predictions': predictions, 'metrics': values}


def judged():
    """Predictions, right, wrong and invalid, for every kind of task."""
    rng = random.Random(0)
    kinds = {
        'super_glue/boolq': ('False', 'True'), 'super_glue/cb': ('entailment', 'contradiction', 'neutral'),
        'super_glue/rte': ('entailment', 'not_entailment'), 'glue/cola': ('unacceptable', 'acceptable'),
        'glue/mrpc': ('not_equivalent', 'equivalent'), 'glue/mnli': ('entailment', 'neutral', 'contradiction'),
    }  # fmt: skip
    found = []
    for task, labels in kinds.items():
        for share_right, invalid in ((0.8, True), (0.5, False), (0.0, True), (1.0, False)):
            targets = rng.choices(labels, k=25)
            wrong = [*labels, 'maybe', ''] if invalid else labels
            predictions = [t if rng.random() < share_right else rng.choice(wrong) for t in targets]
            found.append(scored(task, [{'targets': t} for t in targets], predictions))
    found.append(scored('glue/cola', [{'targets': t} for t in ('acceptable', 'unacceptable')] * 2, ['acceptable'] * 4))
    scores = [f'{rng.randrange(26) / 5:.1f}' for _ in range(30)]
    guesses = [rng.choice([score, f'{rng.random() * 5:.1f}', 'high', '-']) for score in scores]
    found.append(scored('glue/stsb', [{'targets': score} for score in scores], guesses))
    multirc = [{'targets': rng.choice(('True', 'False')), 'idx/question': n // 3} for n in range(30)]
    for wrong in (0.1, 0.6):
        guesses = [rng.choice(('True', 'False', 'true')) if rng.random() < wrong else e['targets'] for e in multirc]
        found.append(scored('super_glue/multirc', multirc, guesses))
    record = [
        {'targets': answer, 'answers': answers, 'idx/passage': passage, 'idx/query': query}
        for passage, query, answers in ((0, 0, ['Bo Lee', 'The Bo']), (0, 1, ['Oslo']), (1, 0, ['Ada', 'Ada B.']), (2, 5, ['U.S.']))
        for answer in answers
    ]  # fmt: skip
    for guesses in (
        ['bo', 'Bo Lee', 'oslo!', 'Ada the B', 'x', 'US'],
        ['', 'a', 'An Oslo town', 'Bo', 'Ada', 'the U.S.'],
    ):
        found.append(scored('super_glue/record', record, guesses))
    questions = [
        {'targets': answers[0], 'answers': answers}
        for answers in (['William - the - Great', 'William'], ['1 , 066'], ['the end'], ['A'], ['red red blue'])
    ]
    for guesses in (
        ['William', '1,066', 'End.', '', 'red blue'],
        ['william the great', '1 , 066', 'an end', 'B', 'red red red'],
    ):
        found.append(scored('squad', questions, guesses))
    wsc_cases = [
        ('The fuzzy bunny', 1, 'bunny'), ('bunny', 1, 'the fuzzy bunny'), ("Bob's hat", 1, 'Bob'), ('Bob', 0, "Bob's hat"),
        ('his old coat', 1, 'coat old'), ('Ann', 0, 'Sue'), ('Ann', 0, ''), ('Ann', 1, 'the'), ('Mr. Bond', 1, 'mr. bond '),
        ('cat', 0, 'cats'), ('the  cat', 1, 'cat'),
    ]  # fmt: skip
    found.append(scored(
        'wsc', [{'targets': t, 'targets_pretokenized': t, 'label': label} for t, label, _ in wsc_cases],
        [p for _, _, p in wsc_cases]))  # fmt: skip
    found.append(scored('dpr', [{'targets': t} for t in ('Ann', 'the bee', 'x')], ['Ann', 'The bee', 'x']))
    return found


def main():
    seqio.SentencePieceVocabulary  # noqa: B018 (T5 wants it importable)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        examples = {name: rows_of(make()) for name, make in pipelines(root).items()}
    written = {'files': FILES, 'examples': examples, 'scores': judged()}
    (HERE / 't5_tasks.json').write_text(json.dumps(written, indent=1, ensure_ascii=False) + '\n')
    data = os.environ.get('REMIXER_T5X_DATA')
    if data:
        real = {}
        for name, make in {**pipelines(pathlib.Path(data)), **other_layouts(pathlib.Path(data))}.items():
            rows = rows_of(make())
            print(name, len(rows), digest(rows))
            if len(rows) <= MOST_ROWS:
                real[name] = [len(rows), digest(rows)]
        (HERE / 't5_real_rows.json').write_text(json.dumps(real, indent=1) + '\n')


if __name__ == '__main__':
    main()
