"""Measures how much the held-out loss of encoder-decoders increases when the inputs of the examples are swapped.

Each target is paired with the inputs of the next example, which does not change the loss of a model that ignores its
inputs.
The examples are the first 1,024 validation examples, or all if there are fewer, of the task that the model was trained
on.

    python scripts/studies/input_dependence.py MODEL_DIR [MODEL_DIR ...]
"""

import argparse

import numpy as np

import remixer_t5x
from remixer_t5x.config import loading
from remixer_t5x.data import pipeline, task_batches

BATCH_SIZE, NUM_BATCHES = 64, 16


def measure_losses(model_dir: str) -> tuple[float, float]:
    """Returns the held-out losses, in nats per target token, with the correct inputs and with swapped inputs."""
    trained = remixer_t5x.load(model_dir)
    sources = loading.ConfigSources([f'{model_dir}/config.gin'])
    task, lengths = loading.load_macro_values(sources, 'MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS')
    dataset = pipeline.DatasetConfig(task, lengths, BATCH_SIZE, 'validation', False)
    losses, tokens = [], []
    for batch in task_batches.EvalBatches(dataset, limit=NUM_BATCHES):
        inputs = batch['encoder_input_tokens']
        # The last batch may contain rows of padding.
        rolled = inputs.copy()
        is_example = np.any(inputs > 0, axis=1)
        rolled[is_example] = np.roll(inputs[is_example], -1, axis=0)
        means = [trained.loss({**batch, 'encoder_input_tokens': rows}) for rows in (inputs, rolled)]
        losses.append([mean['cross_ent_loss'] for mean in means])
        tokens.append(means[0]['tokens'])
    correct, swapped = np.average(losses, axis=0, weights=tokens)
    return correct, swapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model_dirs', nargs='+', metavar='MODEL_DIR')
    print('| model | correct inputs | swapped inputs | difference |\n|---|---|---|---|')
    for model_dir in parser.parse_args().model_dirs:
        correct, swapped = measure_losses(model_dir)
        print(f'| {model_dir} | {correct:.3f} | {swapped:.3f} | {swapped - correct:+.3f} |', flush=True)


if __name__ == '__main__':
    main()
