"""Trains for hours with evaluations, checkpoints and resumes, and checks for growth of memory, step time, threads and
open files.

    python -m tests.faults.soak                                    two hours, stopped and resumed eight times
    python -m tests.faults.soak --minutes 10 --sessions 2          a short run
    python -m tests.faults.soak -- train --gin_file=my_run.gin     a custom run (MODEL_DIR is set by --folder)

Each session is a process that is stopped by SIGTERM and resumed by the next session. Host memory, threads and open
files are sampled every two seconds; step time and device memory are read from the run's log. Prints a line for each
session and writes samples.jsonl to the folder. The exit code is 1 if something grew.
"""

import argparse
import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
from scipy import stats

RUN = [
    *('train', '--gin_file=experiments/python_docs.gin'),
    *('--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=64', '--gin.REMIXER_DIM=64'),
    *('--gin.TRAIN_STEPS=100000000', '--gin.WARMUP_STEPS=1000', '--gin.LOG_PERIOD=20'),
    *('--gin.EVAL_PERIOD=200', '--gin.CHECKPOINT_PERIOD=50'),
]
SAMPLE_SECONDS = 2.0
# Fraction of each session to ignore, because of compilation and first allocations.
WARMUP = 0.25
# The quantities: name in the records, label, and the allowed growth over a session, as a fraction of the median or as a
# number of threads or files.
QUANTITIES = (
    ('host_mib', 'host MiB', 0.02, True),
    ('device_mib', 'device MiB', 0.02, True),
    ('seconds_per_step', 'seconds per step', 0.10, True),
    ('threads', 'threads', 2, False),
    ('files', 'open files', 2, False),
)


def main() -> int:
    args = _arguments()
    folder = pathlib.Path(args.folder)
    if (folder / 'samples.jsonl').exists():
        print(f'error: {folder} holds another soak; use a new --folder', file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, '-m', 'remixer_t5x.cli.main']
    command = [*program, *(args.command or RUN), f'--gin.MODEL_DIR={folder / "run"}']
    samples: list[dict[str, float]] = []
    begun = time.monotonic()
    for session in range(args.sessions):
        deadline = begun + 60 * args.minutes * (session + 1) / args.sessions
        code = _run_session(command, folder, session, begun, deadline, samples)
        if code != 128 + signal.SIGTERM:
            print(f'error: session {session + 1} ended with {code}; see {folder / f"session_{session + 1}.log"}')
            return 1
    timings = _read_timings(folder / 'run' / 'metrics.jsonl', begun)
    flat = all([_report(session, samples, timings) for session in range(args.sessions)])
    print('flat' if flat else 'NOT FLAT')
    return 0 if flat else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=120)
    parser.add_argument('--sessions', type=int, default=8)
    parser.add_argument('--folder', default='runs/soak')
    parser.add_argument('command', nargs='*', help='after --: a command to run instead of a small pretraining')
    return parser.parse_args()


def _run_session(command, folder, session, begun, deadline, samples) -> int:
    """Runs `command` until `deadline`, stops it with SIGTERM, and returns its exit code."""
    with (folder / f'session_{session + 1}.log').open('w') as log, (folder / 'samples.jsonl').open('a') as samples_file:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        watched = psutil.Process(process.pid)
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with watched.oneshot():
                    sample = {
                        'session': session,
                        'minutes': (time.monotonic() - begun) / 60,
                        'clock': time.time(),
                        'host_mib': watched.memory_info().rss / 2**20,
                        'threads': watched.num_threads(),
                        'files': watched.num_fds(),
                    }
            except psutil.Error:
                break
            samples.append(sample)
            samples_file.write(json.dumps(sample) + '\n')
            samples_file.flush()
            time.sleep(SAMPLE_SECONDS)
        process.send_signal(signal.SIGTERM)
        return process.wait()


def _read_timings(path: pathlib.Path, begun: float) -> list[dict[str, float]]:
    """Returns the timing of each training record, with the minutes since the start."""
    offset = time.time() - (time.monotonic() - begun)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {'minutes': (record['timing']['clock'] - offset) / 60, **record['timing']}
        for record in records
        if record['kind'] == 'train' and 'seconds_per_step' in record['timing']
    ]


def _report(session: int, samples: list[dict[str, float]], timings: list[dict[str, float]]) -> bool:
    """Prints the median and the growth of each quantity in a session, and returns whether nothing grew."""
    samples = [sample for sample in samples if sample['session'] == session]
    start, end = samples[0]['minutes'], samples[-1]['minutes']
    warm = start + WARMUP * (end - start)
    text, grown = f'session {session + 1}: {end - start:.1f} min', []
    for name, label, limit, is_fraction in QUANTITIES:
        records = samples if name in samples[0] else timings
        records = [record for record in records if name in record and warm <= record['minutes'] <= end]
        times, values = [record['minutes'] for record in records], [record[name] for record in records]
        if not values:
            continue
        median, growth = float(np.median(values)), 0.0
        if len(values) > 2:
            # The Theil-Sen slope is robust to outliers.
            growth = float(stats.theilslopes(values, times)[0]) * (times[-1] - times[0])
        text += f' · {label} {median:,.4g} {growth:+.2g}'
        if growth > limit * (median if is_fraction else 1):
            grown.append(label)
    print(text + (f' · GROWS: {", ".join(grown)}' if grown else ''))
    return not grown


if __name__ == '__main__':
    sys.exit(main())
