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
import dataclasses
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
# Allowed growth over a session: as a fraction of the median, and as a number of threads or files.
FLAT_MEMORY, FLAT_SECONDS, FLAT_HANDLES = 0.02, 0.10, 2


@dataclasses.dataclass(frozen=True)
class Trend:
    """The median of a quantity in one session, and its growth after the warmup."""

    median: float
    growth: float

    @classmethod
    def of(cls, times: list[float], values: list[float]) -> 'Trend':
        """Computes the growth with the Theil-Sen slope, which is robust to outliers."""
        if len(values) < 3:
            return cls(float(np.median(values)) if values else float('nan'), 0.0)
        return cls(float(np.median(values)), float(stats.theilslopes(values, times)[0]) * (times[-1] - times[0]))


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
    """Prints the results of a session, and returns whether nothing grew."""
    samples = [sample for sample in samples if sample['session'] == session]
    start, end = samples[0]['minutes'], samples[-1]['minutes']
    warm = start + WARMUP * (end - start)
    samples = [sample for sample in samples if sample['minutes'] >= warm]
    steps = [record for record in timings if warm <= record['minutes'] <= end]
    memory, threads, files = (_trend(samples, name) for name in ('host_mib', 'threads', 'files'))
    seconds, device = _trend(steps, 'seconds_per_step'), _trend(steps, 'device_mib')
    text = (
        f'session {session + 1}: {end - start:.1f} min · host {memory.median:,.0f} MiB {memory.growth:+.1f} · '
        f'step {1000 * seconds.median:.1f} ms {1000 * seconds.growth:+.2f} · threads {threads.median:.0f} '
        f'{threads.growth:+.1f} · files {files.median:.0f} {files.growth:+.1f}'
    )
    if not np.isnan(device.median):
        text += f' · device {device.median:,.0f} MiB {device.growth:+.1f}'
    grown = [
        name
        for name, trend, limit in (
            ('host memory', memory, FLAT_MEMORY * memory.median),
            ('device memory', device, FLAT_MEMORY * device.median),
            ('step time', seconds, FLAT_SECONDS * seconds.median),
            ('threads', threads, FLAT_HANDLES),
            ('open files', files, FLAT_HANDLES),
        )
        if trend.growth > limit
    ]
    print(text + (f' · GROWS: {", ".join(grown)}' if grown else ''))
    return not grown


def _trend(records: list[dict[str, float]], name: str) -> Trend:
    records = [record for record in records if name in record]
    return Trend.of([record['minutes'] for record in records], [record[name] for record in records])


if __name__ == '__main__':
    sys.exit(main())
