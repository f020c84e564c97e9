"""Writes t5_names.json: the names of t5's tasks and mixtures, and the rates of the tasks in each mixture.

Needs t5 0.9.4 (pip install t5==0.9.4):
    python tests/remixer_tasks/golden/make_t5_names.py
"""

import json
import pathlib

import seqio
import t5.data.mixtures

HERE = pathlib.Path(__file__).parent


def main():
    t5.data.mixtures  # noqa: B018 (registers)
    mixtures = {}
    for name in sorted(seqio.MixtureRegistry.names()):
        rates = seqio.MixtureRegistry.get(name)._task_to_rate
        # Rates that are functions depend on the data.
        mixtures[name] = {task: None if callable(rate) else float(rate) for task, rate in rates.items()}
    names = {'tasks': sorted(seqio.TaskRegistry.names()), 'mixtures': mixtures}
    (HERE / 't5_names.json').write_text(json.dumps(names) + '\n')


if __name__ == '__main__':
    main()
