"""Pretrains all encoder-decoders of size tiny on Python's documentation, and writes a report.

    python scripts/pretrain_all.py --steps 100 --out runs/all

All models are trained on the same data in the same order, with the same seed and optimizer. Run the script again to
resume interrupted runs.
"""

import argparse
import pathlib
import subprocess
import sys
import time

from remixer_t5x.extras.reports import curves, write

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / 'configs'
# Excluded models: those with special sizes or other model types, and remixer_scaled, whose layers are those of remixer.
EXCLUDED_MODELS = ('bert', 'gpt2', 'modern_bert', 'remixer_scaled', 't5_1_0')


def train(model: str, folder: pathlib.Path, args: argparse.Namespace) -> float:
    """Trains a model with `remixer-t5x train`, and returns the total time in seconds."""
    parts = ('data/python_docs', 'optimizers/adamw_rms', 'hardware/cpu', 'runs/pretrain')
    files = [f'models/{model}.gin', 'sizes/tiny.gin', *(f'{part}.gin' for part in parts)]
    settings = {
        'MODEL_DIR': folder,
        'TASK_FEATURE_LENGTHS': f"{{'inputs': {args.inputs}, 'targets': {args.targets}}}",
        'BATCH_SIZE': args.batch,
        'TRAIN_STEPS': args.steps,
        'WARMUP_STEPS': max(args.steps // 5, 1),
        'LOG_PERIOD': 1,
        'EVAL_PERIOD': args.steps,
        'EVAL_STEPS': 8,
        'CHECKPOINT_PERIOD': args.steps,
    }
    command = [sys.executable, '-m', 'remixer_t5x.cli.main', 'train', *(f'--gin_file={file}' for file in files)]
    start = time.perf_counter()
    with open(folder.with_suffix('.log'), 'w') as log:
        command += [f'--gin.{name}={value}' for name, value in settings.items()]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return time.perf_counter() - start


def last_losses(metrics_file: pathlib.Path) -> tuple[float, float]:
    """Returns the mean training loss of the last ten steps, and the last held-out loss."""
    losses = curves.read_series(metrics_file, 'loss')
    recent = [loss for _, loss in losses.pop('train')[-10:]]
    return sum(recent) / len(recent), list(losses.values())[0][-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = sorted(path.stem for path in (CONFIGS / 'models').glob('*.gin'))
    parser.add_argument('--models', default=','.join(model for model in shipped if model not in EXCLUDED_MODELS))
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--inputs', type=int, default=256)
    parser.add_argument('--targets', type=int, default=58)
    parser.add_argument('--out', default='runs/all')
    args = parser.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    models = args.models.split(',')
    print(f'{args.steps} steps of {args.batch} x ({args.inputs} + {args.targets}) tokens, size tiny')
    print(f'{"":20s} training loss, last ten steps   held out   seconds with start and compilation')
    for model in models:
        seconds = train(model, out / model, args)
        trained, held_out = last_losses(out / model / 'metrics.jsonl')
        print(f'{model:20s} {trained:30.4f} {held_out:10.4f} {seconds:9.0f}', flush=True)
    write.write([str(out / model) for model in models], str(out / 'report.html'))


if __name__ == '__main__':
    main()
