"""Stand-ins of the programs that the launch scripts call: gcloud, kubectl, and Slurm's sbatch, srun and scontrol.

Each refuses arguments that the real program does not document, and runs commands as processes of this machine. They
share a folder, $CLUSTER, in which hosts and buckets are folders, and `calls` has a line for each call. They import
nothing but the standard library (`kubectl.py` PyYAML too), so that a call is quick.
"""
