"""`fill_in` shows gaps in held-out examples, with the true text and the model's prediction of each gap."""

import re

import gin

from remixer_t5x.cli.main import main
from tests.support import saved_run


def test_each_gap_is_shown_with_its_text_and_a_prediction(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'text.txt').write_text(''.join(f'Paragraph {i}, which is a line of text.\n\n' for i in range(400)))
    run = saved_run.write_run(tmp_path / 'run', steps=(1,))
    files = [f'--gin_file={file}' for file in (f'{tmp_path}/saved_run.gin', 'data/own_text.gin', 'hardware/cpu.gin')]
    sizes = ["--gin.TASK_FEATURE_LENGTHS={'inputs': 40, 'targets': 16}", '--gin.VOCAB_SIZE=384']
    flags = [f'--gin.FILES={tmp_path}/text.txt', '--gin.VOCABULARY=@vocabularies.byte()', f'--gin.MODEL_DIR={run}']
    assert main(['fill_in', *files, *flags, *sizes, '--num_examples=2']) == 0
    out = ' '.join(capsys.readouterr().out.split())
    texts = re.findall(r'text (.*?) \.\.\.', out)
    assert len(texts) == 2 and all('which is' in text for text in texts)
    gaps = re.findall(r'\[(\d+)\] was "(.*?)" the model says', out)
    assert gaps and all(f'[{number}]' in ' '.join(texts) for number, _ in gaps)
    assert f'from the newest checkpoint in {run}/checkpoints' in out
    gin.clear_config()
