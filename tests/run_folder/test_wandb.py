"""Weights & Biases in offline mode: the records in the files that the library writes."""

import json
import math
import struct

import pytest
from etils import epath

from remixer_t5x.run_folder import trackers
from tests.support.real_processes import Process

pytest.importorskip('wandb', reason="wandb is not installed (pip install 'remixer-t5x[wandb]')")
# LevelDB log format: a header of 7 bytes, blocks of 32 KiB, and a checksum, length and type before each record.
BLOCK, HEADER = 32768, 7


def records_of(path):
    """Reads the records of a .wandb file as the library's messages."""
    from wandb.proto import wandb_internal_pb2

    data, offset, content = path.read_bytes(), HEADER, b''
    while offset + HEADER <= len(data):
        remaining = BLOCK - offset % BLOCK
        if remaining < HEADER:
            offset += remaining
            continue
        size, kind = struct.unpack('<HB', data[offset + 4 : offset + HEADER])
        if not kind:
            break
        content += data[offset + HEADER : offset + HEADER + size]
        offset += HEADER + size
        # 1 is a complete record; 2, 3 and 4 are its first, middle and last parts.
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(content)
            content = b''


def process(folder, step):
    """Simulates one process of a run: starts at `step`, and logs two steps."""
    warnings = []
    settings = {'TRAIN_STEPS': '5', 'MODEL': '@seq2seq.Seq2Seq()'}
    tracked = trackers.TrackedRun(epath.Path(folder), step, settings)
    tracker = trackers.BackgroundTrackers(
        [trackers.WandB(project='test', tags=('a',), mode='offline')], tracked, warnings.append
    )
    for number in (step + 1, step + 2):
        tracker.write('train', number, {'loss': 1 / number, 'z_loss': math.nan}, {'tokens_per_second': 9.0})
    tracker.close(600.0)
    assert not warnings, warnings


def main(folder):
    process(folder, 0)
    process(folder, 2)


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path):
    folder = tmp_path / 'my run'
    folder.mkdir()
    child = Process(main, folder, output=tmp_path / 'output.txt')
    assert child.wait() == 0, child.output()
    # The library must not print anything.
    assert 'wandb:' not in child.output()
    records = [list(records_of(path)) for path in sorted(folder.glob('wandb/offline-run-*/*.wandb'))]
    assert len(records) == 2
    identity = (folder / trackers.WANDB_ID_FILE).read_text()
    history = []
    for part in records:
        (run,) = {(r.run.run_id, r.run.project, r.run.display_name, *r.run.tags) for r in part if r.HasField('run')}
        assert run == (identity, 'test', 'my run', 'a')
        config = {item.key or item.nested_key[0]: item.value_json for r in part for item in r.run.config.update}
        assert json.loads(config['TRAIN_STEPS']) == '5'
        history += [
            {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            for record in part
            if record.HasField('history')
        ]
    points = {(json.loads(h['step']), json.loads(h['train/loss'])) for h in history if 'train/loss' in h}
    assert points == {(step, 1 / step) for step in (1, 2, 3, 4)}
    assert all(json.loads(h['train/tokens_per_second']) == 9.0 for h in history if 'train/loss' in h)
