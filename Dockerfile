# remixer-t5x and its configs in one image.
#
#   docker build --tag remixer-t5x:cpu .
#   docker build --tag remixer-t5x:gpu --build-arg EXTRA=gpu .        gpu is CUDA 12, gpu-cuda13 is CUDA 13
#   docker build --tag remixer-t5x:tpu --build-arg EXTRA=tpu .
#
#   docker run --gpus=all --shm-size=16g --volume="$PWD/runs:/data" remixer-t5x:gpu \
#       train --gin_file=experiments/quickstart.gin --gin_file=hardware/gpu.gin --gin.MODEL_DIR=/data/quickstart
#
# The versions are those of requirements.lock. /data must be writable for user 1000. SIGTERM (docker stop) saves the run;
# give it time: docker stop --time=300.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim

# cpu, or an extra of pyproject.toml.
ARG EXTRA=cpu

WORKDIR /opt/remixer_t5x
COPY setup.py pyproject.toml MANIFEST.in README.md CHANGELOG.md LICENSE requirements.lock requirements-py311.lock ./
COPY remixer_t5x remixer_t5x
COPY tasks tasks
COPY configs configs
RUN if [ "$EXTRA" = cpu ]; then extras=train; else extras="train,$EXTRA"; fi \
    && pip install --no-cache-dir --constraint=requirements.lock ".[$extras]" \
    && remixer-t5x --version

RUN useradd --create-home --uid=1000 remixer && mkdir /data && chown remixer /data
USER remixer
WORKDIR /data
# Parsed corpora and vocabularies; on a volume they outlive the container.
ENV REMIXER_T5X_CACHE=/data/cache

ENTRYPOINT ["remixer-t5x"]
CMD ["--help"]
