"""finetune, eval, infer, report and data, with all inputs and outputs in a bucket."""

import io
import json
import subprocess
import sys

import pytest
import sentencepiece
import seqio
import tensorflow as tf

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.data import pipeline, task_batches
from tests.cli.test_task_commands import FINETUNE, current_folder, run  # noqa: F401 (fixtures)
from tests.support import paths
from tests.support.fake_gcs import FakeGcs

TEXT = '\n\n'.join(f'Paragraph {n} of a text about {n % 13} things, and {n % 5} more.' for n in range(60))


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    store = FakeGcs(tmp_path_factory.mktemp('store'), 'bucket')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment().items():
            patch.setenv(name, value)
        yield store
    store.close()


@pytest.fixture(scope='module')
def finetuned(current_folder, store):  # noqa: F811
    """Finetunes for 4 steps and returns the bucket, with checkpoints of steps 3 and 4 and the better one of 2 and 4."""
    folder = ['--gin.MODEL_DIR=gs://bucket/tuned', '--gin.INITIAL_CHECKPOINT_PATH=None', '--gin.PROFILE_PERIOD=3']
    periods = ['--gin.TRAIN_STEPS=4', '--gin.EVAL_PERIOD=2', '--gin.CHECKPOINT_PERIOD=1', '--gin.KEEP_CHECKPOINTS=2']
    assert run('finetune', '--gin_file=runs/finetune.gin', *FINETUNE, *folder, *periods) == 0
    return store


def read_records(store, name):
    return [json.loads(line) for line in store.read('bucket', name).decode().splitlines()]


def test_finetune_writes_logs_checkpoints_and_traces_to_a_bucket(finetuned):
    evaluations = [r for r in read_records(finetuned, 'tuned/metrics.jsonl') if r['kind'] == 'eval/glue_cola_v002']
    best = max(evaluations, key=lambda record: record['accuracy'])['step']
    complete = [name for name in finetuned.names('bucket', 'tuned/') if name.endswith('commit_success.txt')]
    steps = {name.rpartition('/')[0] for name in complete}
    assert {'tuned/checkpoints/3', 'tuned/checkpoints/4', f'tuned/best/glue_cola_v002/{best}'} <= steps
    assert not {'tuned/checkpoints/1', 'tuned/checkpoints/2'} & steps
    assert any(name.endswith('.xplane.pb') for name in finetuned.names('bucket', 'tuned/profile/'))
    (events,) = finetuned.names('bucket', 'tuned/tensorboard/events')
    raw = tf.data.TFRecordDataset(f'gs://bucket/{events}').as_numpy_iterator()
    read = [tf.compat.v1.Event.FromString(record) for record in raw]
    tags = {value.tag for event in read for value in event.summary.value}
    assert {'train/loss', 'eval/glue_cola_v002/accuracy'} <= tags and max(event.step for event in read) == 4


def test_eval_follows_a_bucket_and_infer_reads_it(finetuned, current_folder, capsys):  # noqa: F811
    assert run('eval', '--checkpoint=gs://bucket/tuned', '--follow=0', '--gin.EVAL_BATCH_SIZE=4') == 0
    assert [record['step'] for record in read_records(finetuned, 'tuned/eval/metrics.jsonl')] == [3, 4]
    trained = [r for r in read_records(finetuned, 'tuned/metrics.jsonl') if r['kind'] == 'eval/glue_cola_v002'][-1]
    assert read_records(finetuned, 'tuned/eval/metrics.jsonl')[-1]['accuracy'] == trained['accuracy']
    expected = read_records(finetuned, 'tuned/eval/predictions/glue_cola_v002-validation-4.jsonl')

    (current_folder / 'in.txt').write_text(''.join(f'text {i % 7}\n' for i in range(10)))
    infer = ('infer', '--input=in.txt', '--gin.INFER_BATCH_SIZE=4', '--output=out.jsonl')
    assert run(*infer, '--checkpoint=gs://bucket/tuned') == 0
    rows = [json.loads(line) for line in (current_folder / 'out.jsonl').read_text().splitlines()]
    assert [row['prediction'] for row in rows] == [row['prediction'] for row in expected]
    assert run('infer', '--input=in.txt', '--checkpoint=gs://bucket/turned') == 2
    assert 'does not contain a checkpoint; did you mean tuned?' in capsys.readouterr().err
    finetuned.fail('GET .*private', status=403)
    assert run('infer', '--input=in.txt', '--checkpoint=gs://bucket/private') == 2
    assert 'error: gs://bucket/private cannot be read: ' in capsys.readouterr().err
    finetuned.clear_faults()


def test_report_and_load_read_a_bucket(finetuned, current_folder, tmp_path):  # noqa: F811
    assert main(['report', 'gs://bucket/tuned', f'--out={tmp_path}/report.html']) == 0
    page = (tmp_path / 'report.html').read_text()
    assert 'glue_cola_v002' in page and 'gs://bucket/tuned' in page
    trained = remixer_t5x.load('gs://bucket/tuned')
    assert trained.source == 'gs://bucket/tuned/checkpoints/4'
    # A new process, so that this command imports TensorFlow, whose log lines must not be printed.
    done = subprocess.run(
        [sys.executable, '-m', 'remixer_t5x.cli.main', 'report', 'gs://bucket/nowhere'],
        env=paths.environment(**finetuned.environment()), cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith('error: gs://bucket/nowhere is not a run')


def test_text_and_vocabulary_are_read_from_a_bucket(store, capsys):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split('\n')), model_writer=model, vocab_size=64, hard_vocab_limit=False,
        minloglevel=2, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    )  # fmt: skip
    store.write('bucket', 'vocabulary/sentencepiece.model', model.getvalue())
    store.write('bucket', 'text/a.txt', TEXT[:1000].encode())
    store.write('bucket', 'text/b.txt', TEXT[1000:].encode())
    flags = ['--gin.FILES=gs://bucket/text/*.txt', '--gin.VOCABULARY=@vocabularies.sentencepiece()']
    flags += ['--gin.VOCABULARY_PATH=gs://bucket/vocabulary/sentencepiece.model', '--gin.VOCAB_SIZE=256']
    flags += ["--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 14}"]
    assert main(['data', '--gin_file=data/own_text.gin', *flags]) == 0
    output = capsys.readouterr().out
    # Span corruption keeps different words, depending on how paragraphs are joined.
    assert 'inputs, 32 tokens' in output and any(word in output for word in ('things', 'text', 'more', 'raph'))
    flags[2] = '--gin.VOCABULARY_PATH=gs://bucket/vocabulary/nothing.model'
    assert main(['data', '--gin_file=data/own_text.gin', *flags]) == 2
    err = capsys.readouterr().err
    assert 'gs://bucket/vocabulary/nothing.model' in err and 'not found' in err


def test_a_position_in_files_of_a_bucket_is_exact(store):
    for number in range(3):
        text = ''.join(f'file {number} line {line}\n' for line in range(20))
        store.write('bucket', f'lines/{number}.txt', text.encode())
    feature = seqio.Feature(seqio.ByteVocabulary(0))
    task = seqio.Task(
        'bucket_lines',
        source=seqio.TextLineDataSource({'train': 'gs://bucket/lines/*.txt'}),
        preprocessors=[
            lambda data: data.map(lambda line: {'inputs': line, 'targets': line}),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={'inputs': feature, 'targets': feature},
        shuffle_buffer_size=8,
    )
    config = pipeline.DatasetConfig(task, {'inputs': 24, 'targets': 24}, 4)
    assert pipeline.prepare_data(config, 384).record['data']['bucket_lines']['files'] == 3

    def targets(batches, count):
        return [next(batches)['decoder_target_tokens'].tolist() for _ in range(count)]

    batches = task_batches.TrainBatches(config)
    targets(batches, 3)
    position, expected = batches.capture_states(), targets(batches, 12)
    resumed = task_batches.TrainBatches(config)
    resumed.restore_states(position)
    assert targets(resumed, 12) == expected
