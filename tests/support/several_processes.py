"""A server that test_several_processes asks for real processes of the command line, which it forks: TensorFlow is
imported once.

Each line it reads is a JSON list of processes, each with `output` (a file), `cache` (a folder for compiled programs),
`devices` (of a virtual CPU), `commands` (argument lists, one after the other), and perhaps `join` (fields of
`distributed.Processes`, where several commands run over several processes; a single command has flags for that).
Answers a list of process ids, then of exit codes.
"""

import json
import os
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import jax
import matplotlib.pyplot  # noqa: F401 (imported once, for all)
import seqio
import tensorboardX  # noqa: F401
import tensorflow as tf

from remixer_t5x.cli import evaluate, finetune, infer, main, train  # noqa: F401
from remixer_t5x.devices import processes

LENGTHS = {'inputs': 16, 'targets': 12}
VOCABULARY = seqio.ByteVocabulary(extra_ids=0)


def register(file):
    """The task `lines` in `file`: one file, so that there are fewer than processes, and seqio's own source of files,
    which reads in parallel."""

    def both(dataset):
        return dataset.map(lambda line: {'inputs': line, 'targets': tf.strings.substr(line, 0, 4)})

    def exact(targets, predictions):
        return {'exact': 100.0 * sum(a == b for a, b in zip(targets, predictions, strict=True)) / len(targets)}

    seqio.TaskRegistry.add(
        'lines',
        source=seqio.TextLineDataSource({'train': file, 'validation': file}),
        preprocessors=[both, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={name: seqio.Feature(VOCABULARY) for name in LENGTHS},
        metric_fns=[exact],
        shuffle_buffer_size=16,
    )


def work(process):
    jax.config.update('jax_num_cpu_devices', process['devices'])
    # The same programs again, in other processes.
    jax.config.update('jax_compilation_cache_dir', process['cache'])
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
    join = processes.Processes(**process.get('join', {}))
    with processes.together(join, main._tell, saves=True):
        return max(main.main(argv) for argv in process['commands'])


def serve():
    for line in sys.stdin:
        children = []
        for process in json.loads(line):
            child = os.fork()
            if child == 0:
                out = os.open(process['output'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                code = 1
                try:
                    code = work(process)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        print(json.dumps(children), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == '__main__':
    register(sys.argv[1])
    serve()
