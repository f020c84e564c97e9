"""Defines the packages and their folders, because `pyproject.toml` can either find packages or list their folders."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=['remixer_t5x*']), *find_packages('tasks'), 'remixer_t5x.configs'],
    package_dir={'remixer_t5x.configs': 'configs', 'remixer_tasks': 'tasks/remixer_tasks'},
)
