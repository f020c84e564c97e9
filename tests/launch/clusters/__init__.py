"""Fakes of the programs that the launch scripts call: gcloud, kubectl, and Slurm's sbatch, srun and scontrol.

The fakes reject arguments that the real programs do not document, and run commands as local processes. They share the
folder $CLUSTER, in which hosts and buckets are folders and the file `calls` contains a line for each call. They import
only the standard library (and PyYAML in `kubectl.py`), so that they start quickly.
"""
