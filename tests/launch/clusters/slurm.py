"""A fake of `sbatch`, `srun` and `scontrol requeue` (slurm.schedmd.com): a job of several tasks on one machine.

`sbatch` starts a controller in the background, which runs a copy of the script, and runs it again if the job was
requeued. Tests requeue a preempted job themselves, as Slurm does with --requeue.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from tests.launch.clusters.fake_commands import CLUSTER, parse_options, record_call, refuse, start_detached

NUMBER, JOB = r'[1-9]\d*', '7'
SBATCH = {
    **{'nodes': NUMBER, 'gpus-per-node': NUMBER, 'ntasks-per-node': NUMBER, 'cpus-per-task': NUMBER},
    **{'job-name': r'\w+', 'time': r'(\d+-)?\d+:\d+:\d+', 'signal': r'(B:)?[A-Z]+@\d+', 'open-mode': 'append|truncate'},
    **{'output': '.+', 'partition': r'\w+', 'account': r'\w+'},
}
SRUN = {'cpus-per-task': NUMBER, 'kill-on-bad-exit': '[01]', 'wait': r'\d+', 'gpu-bind': 'none|closest|single:.+'}


def sbatch(words: list[str]) -> int:
    end = next((index for index, word in enumerate(words) if not word.startswith('-')), len(words))
    if end == len(words):
        refuse('no script')
    script, arguments = words[end], words[end + 1 :]
    directives = re.findall(r'^#SBATCH (\S+)$', pathlib.Path(script).read_text(), re.M)
    # Options of the command line override those of the script.
    _, options = parse_options([*directives, *words[:end]], SBATCH, ('requeue', 'exclusive'))
    if 'requeue' not in options:
        refuse('a job must have --requeue to survive a preemption')
    spool = CLUSTER / 'spool'
    spool.mkdir()
    script_copy = shutil.copy(script, spool / 'slurm_script')
    tasks = int(options.get('nodes', 1)) * int(options.get('ntasks-per-node', 1))
    start_detached(
        *(sys.executable, '-m', __spec__.name, 'controller', str(script_copy), *arguments),
        SLURM_JOB_ID=JOB,
        SLURM_SUBMIT_DIR=os.getcwd(),
        SLURM_NTASKS=str(tasks),
        SLURM_NTASKS_PER_NODE=options.get('ntasks-per-node', '1'),
        SLURM_CPUS_PER_TASK=options['cpus-per-task'],
        JAX_COORDINATOR_PORT=os.environ['PORT'],
    )
    print(f'Submitted batch job {JOB}')
    return 0


def controller(command: list[str]) -> int:
    """Runs the job until it ends without being requeued."""
    requeue, restarts = CLUSTER / 'requeue', 0
    while True:
        environment = {**os.environ, 'SLURM_RESTART_COUNT': str(restarts)}
        job = subprocess.Popen(['bash', *command], env=environment, start_new_session=True)
        (CLUSTER / 'job').write_text(str(job.pid))
        code = job.wait()
        if not requeue.exists():
            (CLUSTER / 'ended').write_text(str(code))
            return 0
        requeue.unlink()
        restarts += 1


def srun(words: list[str]) -> int:
    end = next(index for index, word in enumerate(words) if not word.startswith('-'))
    _, options = parse_options(words[:end], SRUN, ('label', 'exclusive'))
    # Since Slurm 22.05, srun does not inherit the number from sbatch: by default, a task has one CPU.
    if options.get('cpus-per-task') != os.environ['SLURM_CPUS_PER_TASK']:
        refuse('the tasks do not get the CPUs of the job')
    count, per_node = int(os.environ['SLURM_NTASKS']), int(os.environ['SLURM_NTASKS_PER_NODE'])
    started = [
        subprocess.Popen(
            words[end:],
            env={
                **os.environ,
                'SLURM_STEP_NODELIST': '127.0.0.1',
                'SLURM_STEP_TASKS_PER_NODE': str(per_node),
                'SLURM_PROCID': str(number),
                'SLURM_LOCALID': str(number % per_node),
            },
        )
        for number in range(count)
    ]
    codes = [task.wait() for task in started]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(words: list[str]) -> int:
    if words != ['requeue', JOB]:
        refuse('requeue requires the number of the job')
    (CLUSTER / 'requeue').touch()
    return 0


def main(program: str, words: list[str]) -> int:
    if program != 'controller':
        record_call()
    return {'sbatch': sbatch, 'srun': srun, 'scontrol': scontrol, 'controller': controller}[program](words)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1], sys.argv[2:]))
