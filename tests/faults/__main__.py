"""Injects faults into training runs, restarts the command, and compares the result with an uninterrupted run.

Parameters, optimizer state, the loss of every step and the position in the data must be bit-equal.

    python -m tests.faults                               every fault once
    python -m tests.faults --trials 200 --only kill      one fault, 200 times
    python -m tests.faults --long                        200 kills, three trials of each other fault
    python -m tests.faults -- train --gin_file=my.gin    a custom run, which should take a minute or two

Runs are real processes, forked from one that has imported all libraries. Each trial is printed, and a table is printed
at the end. The exit code is 1 if a trial failed. MODEL_DIR is set here. A custom run should save checkpoints frequently
and log every step (`--gin.LOG_PERIOD=1`). Needs Linux, and root for read-only file systems; without root, the folder
loses its write permission instead.
"""

import argparse
import collections
import itertools
import pathlib
import random
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence

from remixer_t5x.cli import console
from tests.faults.bench import TRAIN_STEPS, Bench, TrialResult
from tests.faults.kinds import FAULTS, KILLS
from tests.support import compare_runs

LONG_KILLS, LONG_OTHERS = 200, 3


def run_trials(bench: Bench, name: str, count: int) -> Iterator[TrialResult | AssertionError]:
    """Yields the results of `count` trials of a fault. Removes the folder of a trial that succeeded."""
    done = 0
    bench.uninterrupted()
    while done < count:
        run = bench.folder / f'{name}_{done}'
        try:
            if name in KILLS:
                for result in itertools.islice(FAULTS[name](bench, run), count - done):
                    done += 1
                    yield result
                if done == count and compare_runs.last_step(run) < bench.last:
                    # Finishes the run after the last kill.
                    bench.finish(run, reached=compare_runs.last_step(run))
            else:
                done += 1
                yield FAULTS[name](bench, run)
            shutil.rmtree(run, ignore_errors=True)
        except AssertionError as failure:
            done += name in KILLS
            yield failure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trials, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', choices=FAULTS, action='append', help='a fault to inject (default: all); repeatable')
    parser.add_argument('--trials', type=int, default=1, help='number of trials of each fault')
    parser.add_argument(
        '--long', action='store_true', help=f'{LONG_KILLS} kills, and {LONG_OTHERS} trials of each other fault'
    )
    parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('runs/faults'), help='a new folder')
    parser.add_argument('--seed', type=int, help='seed of the random moments (default: random, printed)')
    parser.add_argument('--train_steps', type=int, default=TRAIN_STEPS, help='steps of the default run')
    parser.add_argument('command', nargs='*', help='after --: a command to run instead of a tiny pretraining')
    args = parser.parse_args(argv)
    console.silence_library_logs()
    folder = args.folder.absolute()
    folder.mkdir(parents=True)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f'seed {seed}; runs and their output in {folder}')
    bench = Bench(folder, args.command, random.Random(seed), args.train_steps)
    results: dict[str, list[TrialResult | AssertionError]] = collections.defaultdict(list)
    for name in args.only or FAULTS:
        count = (LONG_KILLS // 2 if name in KILLS else LONG_OTHERS) if args.long else args.trials
        for result in run_trials(bench, name, count):
            results[name].append(result)
            text = (
                f'{result.lost} steps lost. {result.note}' if isinstance(result, TrialResult) else f'FAILED: {result}'
            )
            print(f'{name} {len(results[name])}: {text}', flush=True)
    print(format_table(results))
    return int(any(isinstance(result, AssertionError) for result in itertools.chain.from_iterable(results.values())))


def format_table(results: dict[str, list[TrialResult | AssertionError]]) -> str:
    """Formats a Markdown table with a row for each fault."""
    rows = ['| fault | trials | survived | steps lost, median (max) |', '| --- | --- | --- | --- |']
    for name, trials_of in results.items():
        lost = [result.lost for result in trials_of if isinstance(result, TrialResult)]
        median = f'{statistics.median(lost):.0f} ({max(lost)})' if lost else '-'
        rows.append(f'| {name} | {len(trials_of)} | {len(lost)} | {median} |')
    return '\n'.join(rows)


if __name__ == '__main__':
    sys.exit(main())
