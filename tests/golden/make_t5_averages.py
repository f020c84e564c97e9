"""Writes t5_averages.json: metrics at several steps, and their averages and best steps from T5's `eval_utils`.

git clone https://github.com/google-research/text-to-text-transfer-transformer    # needs pandas and TensorFlow
python tests/golden/make_t5_averages.py text-to-text-transfer-transformer
"""

import importlib.util
import json
import pathlib
import sys

import numpy as np

STEPS = (100, 200, 300)


def main(t5: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location('eval_utils', t5 / 't5/evaluation/eval_utils.py')
    eval_utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(eval_utils)
    rng = np.random.default_rng(0)
    tags = [tag for tag in eval_utils.METRIC_NAMES if 'glue' in tag and 'average' not in tag]
    scores = {tag: [(step, float(rng.uniform(20, 95))) for step in STEPS] for tag in tags}
    table = eval_utils.compute_avg_glue(eval_utils.scores_to_df(scores))
    averages = {name: table[f'Average {name} Score'].tolist() for name in ('GLUE', 'SuperGLUE')}
    best, steps = eval_utils.metric_group_max(table)
    names = {tag: eval_utils.METRIC_NAMES[tag].name for tag in tags}
    results = {
        'steps': STEPS,
        'metrics': {tag: [value for _, value in values] for tag, values in scores.items()},
        'averages': averages,
        'best': {tag: [int(steps[name]), float(best[name])] for tag, name in names.items()},
    }
    pathlib.Path(__file__).with_name('t5_averages.json').write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]))
