#!/usr/bin/env bash
# From a fresh clone to a trained model: makes a virtual environment, installs, trains a small Remixer on the
# documentation inside Python, and shows what it learned. No data is downloaded. Run it again to resume, or to look again.
#
#   scripts/quickstart.sh                  in .venv, into runs/quickstart
#   VENV=/path scripts/quickstart.sh       in another virtual environment, made if it is not there
#   MODEL_DIR=/path scripts/quickstart.sh  into another folder
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/environment.sh
prepare_environment ''
MODEL_DIR="${MODEL_DIR:-runs/quickstart}"
RUN=(--gin_file=experiments/quickstart.gin "--gin.MODEL_DIR=$MODEL_DIR")

say "training: a small Remixer, span corruption, on this computer"
"$VENV/bin/remixer-t5x" train "${RUN[@]}"

say 'held-out text with gaps, and what the model puts into them'
"$VENV/bin/remixer-t5x" fill_in "${RUN[@]}"

say 'done'
cat <<END
loss curve   $MODEL_DIR/loss.png
TensorBoard  $VENV/bin/pip install tensorboard && $VENV/bin/tensorboard --logdir $MODEL_DIR/tensorboard
checkpoint   $MODEL_DIR/checkpoints

Try next, on text of your own (here: this repository's documents):
  $VENV/bin/remixer-t5x train --gin_file=experiments/own_text.gin --gin.FILES='docs/*.md' --gin.TEXT_FORMAT=txt \\
    --gin.VOCAB_SIZE=600 --gin.TRAIN_STEPS=50 --gin.MODEL_DIR=runs/mine
END
