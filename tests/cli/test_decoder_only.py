"""Decoder-only models: train and infer commands, and the Python API."""

import json

import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from remixer_t5x.errors import UserError
from tests.support import feed_forward, saved_run
from tests.support.compare_runs import read_log

CONFIG = (
    saved_run.CONFIG.replace('models/t5_1_1.gin', 'models/hyper_mixer.gin')
    + """
include 'objectives/causal_lm.gin'
include 'model_types/decoder_only.gin'
TASK_FEATURE_LENGTHS = {'targets': 24}
"""
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return saved_run.write_run(tmp_path_factory.mktemp('runs') / 'run', CONFIG, steps=(2,))


def test_infer_continues_prompts(run, tmp_path):
    (tmp_path / 'prompts.txt').write_text('The cat\nat\n\n')
    out = tmp_path / 'out.jsonl'
    assert not main(['infer', f'--checkpoint={run}', f'--output={out}', f'--input={tmp_path}/prompts.txt'])
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer['input'] for answer in answers] == ['The cat', 'at', ''] and not any(
        'truncated' in row for row in answers
    )
    assert all(answer['score'] < 0 for answer in answers)
    loaded = remixer_t5x.load(str(run))
    assert loaded.lengths == {'inputs': 12, 'targets': 12} and not loaded.ends_inputs
    generated = loaded.generate(['The cat', 'at', ''])
    assert [answer.text for answer in generated] == [answer['prediction'] for answer in answers]
    (score,) = loaded.score('The cat', generated[0].text)
    assert np.isfinite(score)
    batch = loaded.make_batch('The cat', generated[0].text)
    metrics = loaded.loss(batch)
    np.testing.assert_allclose(-score, (metrics['loss'] - metrics['z_loss']) * metrics['tokens'], rtol=1e-4)
    with pytest.raises(UserError, match="for encode, got 'decoder_only'"):
        loaded.encode('The cat')


def test_a_saved_causal_language_model_keeps_its_lengths(run, tmp_path):
    lengths = {'inputs': 11, 'targets': 7}
    loaded = remixer_t5x.load(str(run), lengths=lengths)
    saved, shared, back = loaded.save(tmp_path / 'saved'), str(tmp_path / 'shared'), str(tmp_path / 'back')
    assert main(['convert', f'--checkpoint={saved}', f'--to_shared={shared}']) == 0
    assert main(['convert', f'--from_hf={shared}', f'--to={back}']) == 0
    for folder in (saved, shared, back):
        again = remixer_t5x.load(folder)
        assert again.lengths == lengths and not again.ends_inputs, folder
    flag = f'--gin.TASK_FEATURE_LENGTHS={lengths}'
    answer = loaded.generate('The cat')[0]
    (tmp_path / 'prompts.txt').write_text('The cat')
    # `infer` uses the saved lengths. Lengths set by a flag do not add an end token to prompts.
    for number, checkpoint in enumerate([[f'--checkpoint={tmp_path}/saved'], [f'--checkpoint={run}', flag]]):
        out = tmp_path / f'{number}.jsonl'
        assert main(['infer', *checkpoint, f'--input={tmp_path}/prompts.txt', f'--output={out}']) == 0
        row = json.loads(out.read_text())
        assert (row['prediction'], row['lengths']) == (answer.text, lengths)
        assert row['score'] == pytest.approx(answer.scores[0], rel=1e-4)


def test_a_prefix_language_model_is_finetuned_on_packed_pairs(tmp_path, capsys):
    rows = [json.dumps({'number': index, 'answer': 'even' if index % 2 == 0 else 'odd'}) for index in range(60)]
    (tmp_path / 'rows.jsonl').write_text('\n'.join(rows))
    flags = [
        '--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=data/own_pairs.gin',
        f'--gin.PAIRS={tmp_path}/rows.jsonl', '--gin.INPUTS="{number}"', '--gin.TARGETS=answer',
        '--gin.PAIRS_VALIDATION_FRACTION=0.2', '--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384',
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}", '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=32',
        '--gin_file=hardware/cpu.gin', '--gin_file=model_types/decoder_only.gin', '--gin.EVAL_BATCH_SIZE=4',
        '--gin_file=optimizers/adafactor_constant.gin', '--gin_file=runs/finetune.gin', '--gin.PREFIX_LM=True',
        '--gin.BATCH_SIZE=4', '--gin.INITIAL_CHECKPOINT_PATH=None', '--gin.TRAIN_STEPS=2', '--gin.EVAL_PERIOD=2',
        '--gin.LOG_PERIOD=1', f'--gin.MODEL_DIR={tmp_path}/run', '--gin.PACK=True',
        *(flag for flag in feed_forward.FLAGS if 'DECODER' in flag),
    ]  # fmt: skip
    assert main(['finetune', *flags]) == 0, capsys.readouterr().err
    assert 'language_model.LanguageModel.prefix = %PREFIX_LM' in (tmp_path / 'run/config.gin').read_text()
    (evaluation,) = [record for record in read_log(tmp_path / 'run') if record['kind'].startswith('eval/')]
    (held_out,) = [record for record in read_log(tmp_path / 'run') if record['kind'].startswith('held_out/')]
    assert isinstance(evaluation['accuracy'], float)
    # The targets are "even" and "odd", each with an end token.
    assert 5 / 4 < held_out['bits_per_byte'] * np.log(2) / held_out['loss'] < 4 / 3
