"""Breaks training runs in every way that machines and people break them, starts the same command again, and compares
with a run that nothing broke: parameters, optimizer, every step's loss and the place in the data must be bit-equal.

    python -m tests.faults                               every fault once
    python -m tests.faults --trials 200 --only kill      as often as you like
    python -m tests.faults --long                        200 kills, three trials of each other fault
    python -m tests.faults -- train --gin_file=my.gin    your own run; it should take a minute or two

Runs are real processes of the command line, forked from one that has imported everything. Each trial is printed, and
written to results.jsonl in the folder, with what the run said; a table comes at the end. Exit code 1 where one failed.
MODEL_DIR is set here; checkpoints should be frequent and LOG_PERIOD be 1 (`--gin.LOG_PERIOD=1`), so that every step is
compared. Needs Linux; a read-only file system needs root, without it a folder without write permission takes its place.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import random
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence

from remixer_t5x.cli import quiet
from tests.faults.bench import TRAIN_STEPS, Bench, Failed, Told
from tests.faults.kinds import FAULTS, KILLS
from tests.support import compare_runs

LONG_KILLS, LONG_OTHERS = 200, 3


def trials(bench: Bench, name: str, count: int) -> Iterator[Told | Failed]:
    """`count` trials of the fault; each folder is removed once its runs were as they must be."""
    done = 0
    bench.unbroken()
    while done < count:
        run = bench.folder / f'{name}_{done}'
        try:
            if name in KILLS:
                for told in itertools.islice(FAULTS[name](bench, run), count - done):
                    done += 1
                    yield told
                if done == count and compare_runs.last_step(run) < bench.last:
                    # The last one's run goes to its end as well.
                    bench.finish(run, reached=compare_runs.last_step(run))
            else:
                done += 1
                yield FAULTS[name](bench, run)
            shutil.rmtree(run, ignore_errors=True)
        except Failed as failure:
            done += name in KILLS
            yield failure


def main(argv: Sequence[str] | None = None, compiled: pathlib.Path | None = None) -> int:
    """`compiled`: as in `Bench`."""
    args = _arguments(argv)
    quiet.hush()
    folder = pathlib.Path(args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob('unbroken_*')):
        print(f'error: {folder} holds other trials; give a new --folder', file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f'seed {seed}; runs and their output in {folder}')
    bench = Bench(folder, args.command, random.Random(seed), args.train_steps, compiled)
    found: dict[str, list[Told | Failed]] = collections.defaultdict(list)
    for name in args.only or FAULTS:
        count = (LONG_KILLS // 2 if name in KILLS else LONG_OTHERS) if args.long else args.trials
        for told in trials(bench, name, count):
            found[name].append(told)
            _tell(folder, name, len(found[name]), told)
    print(table(found))
    return int(any(isinstance(told, Failed) for all_told in found.values() for told in all_told))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', type=lambda text: text.split(','), help=f'some of {", ".join(FAULTS)}')
    parser.add_argument('--trials', type=int, default=1, help='of each fault')
    parser.add_argument('--long', action='store_true', help=f'{LONG_KILLS} kills, {LONG_OTHERS} of each other fault')
    parser.add_argument('--folder', default='runs/faults')
    parser.add_argument('--seed', type=int, help='of the moments; printed where it is not given')
    parser.add_argument('--train_steps', type=int, default=TRAIN_STEPS, help='of the tiny pretraining')
    parser.add_argument('command', nargs='*', help='after --: what to run in place of a tiny pretraining')
    args = parser.parse_args(argv)
    for name in args.only or ():
        if name not in FAULTS:
            parser.error(f'--only {name} is no fault; there are {", ".join(FAULTS)}')
    return args


def _tell(folder: pathlib.Path, name: str, number: int, told: Told | Failed) -> None:
    failed = isinstance(told, Failed)
    record = {'fault': name, 'trial': number, **({'failed': str(told)} if failed else dataclasses.asdict(told))}
    with (folder / 'results.jsonl').open('a') as file:
        file.write(json.dumps(record) + '\n')
    if failed:
        print(f'{name} {number}: FAILED: {told}', flush=True)
    else:
        seconds = '' if told.seconds is None else f', next step after {told.seconds:.1f} s'
        print(f'{name} {number}: {told.lost} steps lost{seconds}{". " if told.note else ""}{told.note}', flush=True)


def table(found: dict[str, list[Told | Failed]]) -> str:
    """Markdown: a row for each fault."""
    rows = ['| fault | trials | survived | steps lost, median (most) | seconds to the next step, median (most) |']
    rows.append('| --- | --- | --- | --- | --- |')
    for name, all_told in found.items():
        good = [told for told in all_told if isinstance(told, Told)]
        lost, seconds = [told.lost for told in good], [told.seconds for told in good if told.seconds is not None]
        rows.append(f'| {name} | {len(all_told)} | {len(good)} | {_middle(lost, ".0f")} | {_middle(seconds, ".1f")} |')
    return '\n'.join(rows)


def _middle(values: list, form: str) -> str:
    return f'{statistics.median(values):{form}} ({max(values):{form}})' if values else '-'


if __name__ == '__main__':
    sys.exit(main())
