"""Updates t5_tasks.json: the examples that T5's library makes from raw rows, and its scores of predictions.

The JSON file contains the inputs: `files` in their published formats, and the examples and predictions of `scores`.
TFDS's builders read the rows, T5's preprocessors format them, and T5's postprocessors and metrics score the
predictions. Of the real data in the folder REMIXER_T5X_DATA, only counts and hashes are recorded. Needs
google-research/text-to-text-transfer-transformer (commit e081111) and scikit-learn:
`REMIXER_T5X_DATA=... python tests/remixer_tasks/golden/make_t5_tasks.py`.
"""

import csv
import functools
import hashlib
import json
import os
import pathlib
import tempfile

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds
from t5.data import glue_utils, postprocessors, preprocessors
from t5.evaluation import metrics

HERE = pathlib.Path(__file__).parent
FIELDS = ('inputs', 'targets', 'answers', 'label', 'idx/question', 'idx/passage', 'idx/query')
# Larger splits are only printed, because testing them would take minutes.
MAX_ROWS = 2500
SUPER_GLUE = {
    'BoolQ': 'boolq', 'CB': 'cb', 'COPA': 'copa', 'MultiRC': 'multirc', 'ReCoRD': 'record', 'RTE': 'rte', 'WiC': 'wic',
    'WSC': 'wsc.fixed', 'AX-b': 'axb', 'AX-g': 'axg',
}  # fmt: skip
GLUE = {'CoLA': 'cola', 'SST-2': 'sst2', 'QQP': 'qqp', 'STS-B': 'stsb', 'QNLI': 'qnli', 'RTE': 'rte', 'WNLI': 'wnli'}


def to_dataset(builder, generated):
    """Returns a dataset of the examples that a TFDS builder generated."""
    features = builder.info.features
    records = [features.serialize_example(example) for _, example in generated]
    return tf.data.Dataset.from_tensor_slices(records).map(features.deserialize_example)


def super_glue(config, folder, file):
    """Returns T5's examples of a raw SuperGLUE file."""
    builder = tfds.text.super_glue.SuperGlue(config=config, data_dir=tempfile.mkdtemp())
    split = 'test' if 'test' in file.name or config.startswith('ax') else 'train'
    data = to_dataset(builder, builder._generate_examples(file, split))
    if config == 'axb':
        data = preprocessors.rekey(
            data, key_map={'premise': 'sentence1', 'hypothesis': 'sentence2', 'label': 'label', 'idx': 'idx'}
        )
    return glue_utils.get_glue_text_preprocessor(builder.builder_config)(data)


def wsc(file, only_true):
    builder = tfds.text.super_glue.SuperGlue(config='wsc.fixed', data_dir=tempfile.mkdtemp())
    data = to_dataset(builder, builder._generate_examples(file, 'test'))
    return preprocessors.wsc_simple(data, correct_referent_only=only_true)


def glue_builder(config):
    return tfds.text.glue.Glue(config=config, data_dir=tempfile.mkdtemp())


def glue(config, file):
    builder = glue_builder(config)
    split = {'test': 'test', 'wnli-test': 'test'}.get(file.stem, 'train')
    data = to_dataset(builder, builder._generate_examples(file, split))
    return glue_utils.get_glue_text_preprocessor(builder.builder_config)(data)


def csv_pairs(config, columns, file, rows=slice(None)):
    """Returns the rows of a CSV file with premise, hypothesis and label as examples of a GLUE configuration."""
    builder = glue_builder(config)
    with open(file, newline='') as opened:
        csv_rows = list(csv.DictReader(opened))[rows]
    generated = [
        (n, {columns[0]: row['premise'], columns[1]: row['hypothesis'], 'label': row['label'], 'idx': n})
        for n, row in enumerate(csv_rows)
    ]
    data = to_dataset(builder, generated)
    return glue_utils.get_glue_text_preprocessor(builder.builder_config)(data)


def pronouns(file):
    builder = tfds.text.DefinitePronounResolution(data_dir=tempfile.mkdtemp())
    data = to_dataset(builder, builder._generate_examples(file))
    return preprocessors.definite_pronoun_resolution_simple(data)


def squad(file):
    from tensorflow_datasets.datasets.squad.squad_dataset_builder import Builder

    builder = Builder(config='v1.1', data_dir=tempfile.mkdtemp(), version='3.0.0')
    generated = ((key, {**example}) for key, example in builder._generate_examples(file))
    return preprocessors.squad(to_dataset(builder, generated))


def pipelines(root):
    """Returns functions that make T5's dataset of each 'task/split' with a file in `root`."""
    readers = {}
    for folder, config in SUPER_GLUE.items():
        for name, split in (('train', 'train'), ('val', 'validation'), ('test', 'test'), (folder, 'test')):
            file = root / 'super_glue' / folder / f'{name}.jsonl'
            if not file.exists():
                continue
            if folder == 'WSC':
                if split == 'train':
                    readers['super_glue_wsc_v102_simple_train/train'] = functools.partial(wsc, file, True)
                else:
                    readers[f'super_glue_wsc_v102_simple_eval/{split}'] = functools.partial(wsc, file, False)
            else:
                readers[f'super_glue_{config}_v102/{split}'] = functools.partial(super_glue, config, folder, file)
        for name, split in (('train', 'train'), ('dev32', 'validation')):
            file = root / 'fewglue' / folder / f'{name}.jsonl'
            if file.exists() and folder != 'WSC':
                readers[f'fewglue_{config}_v001/{split}'] = functools.partial(super_glue, config, folder, file)
    for folder, config in GLUE.items():
        for name, split in (('train', 'train'), ('dev', 'validation'), ('test', 'test')):
            file = root / 'glue' / folder / f'{name}.tsv'
            if file.exists():
                readers[f'glue_{config}_v002/{split}'] = functools.partial(glue, config, file)
    matched = root / 'glue/MNLI/dev_matched.tsv'
    if matched.exists():
        readers['glue_mnli_matched_v002/validation'] = functools.partial(glue, 'mnli_matched', matched)
    if (root / 'dpr_wsc/train.c.txt').exists():
        readers['dpr_v001_simple/train'] = functools.partial(pronouns, root / 'dpr_wsc/train.c.txt')
    if (root / 'dpr_wsc/test.c.txt').exists():
        readers['dpr_v001_simple/test'] = functools.partial(pronouns, root / 'dpr_wsc/test.c.txt')
    if (root / 'squad/dev-v1.1.json').exists():
        readers['squad_v010_allanswers/validation'] = functools.partial(squad, root / 'squad/dev-v1.1.json')
    return readers


def other_layouts(root):
    """Returns such functions for files in layouts that TFDS does not support."""
    cola = [root / 'glue/CoLA' / f'{name}.tsv' for name in ('in_domain_train', 'in_domain_dev', 'out_of_domain_dev')]
    pair, mnli = ('sentence1', 'sentence2'), root / 'nli_datasets/mnli/dev.csv'
    folder = root / 'nli_datasets'
    readers = {
        'glue_cola_v002/train': functools.partial(glue, 'cola', cola[0]),
        'glue_cola_v002/validation': lambda: glue('cola', cola[1]).concatenate(glue('cola', cola[2])),
        'glue_wnli_v002/test': functools.partial(glue, 'wnli', root / 'dpr_wsc/wnli-test.tsv'),
    }
    for config in ('rte', 'wnli'):
        for split, name in (('train', 'train'), ('validation', 'dev')):
            file = folder / config / f'{name}.csv'
            readers[f'glue_{config}_v002/{split}'] = functools.partial(csv_pairs, config, pair, file)
    for kind, rows in (('matched', slice(0, 9815)), ('mismatched', slice(9815, None))):
        readers[f'glue_mnli_{kind}_v002/validation'] = functools.partial(
            csv_pairs, f'mnli_{kind}', ('premise', 'hypothesis'), mnli, rows
        )
    return readers


def to_python(value):
    if isinstance(value, bytes):
        return value.decode()
    return [to_python(item) for item in value] if value.ndim else value.item()


def read_rows(dataset):
    return [
        {name: to_python(value) for name, value in example.items() if name in FIELDS}
        for example in dataset.as_numpy_iterator()
    ]


def digest(rows):
    lines = sorted(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return hashlib.sha256('\n'.join(lines).encode()).hexdigest()


def find_functions(task):
    """Returns the postprocessor and the metric functions that T5 registers for a task."""
    if task == 'dpr':
        return lambda text, **_: text, [metrics.accuracy]
    if task == 'wsc':
        return postprocessors.wsc_simple, [metrics.accuracy]
    if task == 'squad':
        return postprocessors.qa, [metrics.squad]
    suite, _, config = task.partition('/')
    builder = tfds.text.super_glue.SuperGlue if suite == 'super_glue' else tfds.text.glue.Glue
    get_metrics = glue_utils.get_super_glue_metric if suite == 'super_glue' else glue_utils.get_glue_metric
    return glue_utils.get_glue_postprocess_fn(builder.builder_configs[config]), get_metrics(config)


def encode_strings(value):
    if isinstance(value, list):
        return [encode_strings(item) for item in value]
    return value.encode() if isinstance(value, str) else value


def score(task, examples, predictions):
    """Returns T5's metrics of predicted texts; `examples` are preprocessed and contain strings."""
    postprocess, functions = find_functions(task)
    as_bytes = [{name: encode_strings(value) for name, value in example.items()} for example in examples]
    targets = [postprocess(e['targets'], example=b, is_target=True) for e, b in zip(examples, as_bytes, strict=True)]
    outputs = [postprocess(p, example=b, is_target=False) for p, b in zip(predictions, as_bytes, strict=True)]
    values = {}
    for function in functions:
        values.update({name: float(value) for name, value in function(targets, outputs).items()})
    return {'task': task, 'examples': examples, 'predictions': predictions, 'metrics': values}


def main():
    seqio.SentencePieceVocabulary  # noqa: B018 (T5 imports it)
    golden = json.loads((HERE / 't5_tasks.json').read_text())
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in golden['files'].items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        examples = {name: read_rows(make()) for name, make in pipelines(root).items()}
    scores = [score(case['task'], case['examples'], case['predictions']) for case in golden['scores']]
    golden = {'files': golden['files'], 'examples': examples, 'scores': scores}
    (HERE / 't5_tasks.json').write_text(json.dumps(golden, indent=1, ensure_ascii=False) + '\n')
    data = os.environ.get('REMIXER_T5X_DATA')
    if data:
        real_rows = {}
        for name, make in {**pipelines(pathlib.Path(data)), **other_layouts(pathlib.Path(data))}.items():
            rows = read_rows(make())
            print(name, len(rows), digest(rows))
            if len(rows) <= MAX_ROWS:
                real_rows[name] = [len(rows), digest(rows)]
        (HERE / 't5_real_rows.json').write_text(json.dumps(real_rows, indent=1) + '\n')


if __name__ == '__main__':
    main()
