"""Packages whose folders `pyproject.toml` cannot express: it either finds packages or lists them with their folders."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=['remixer_t5x*']), *find_packages('tasks'), 'remixer_t5x.configs'],
    package_dir={'remixer_t5x.configs': 'configs', 'remixer_tasks': 'tasks/remixer_tasks'},
)
