#!/usr/bin/env bash
# Creates a virtual environment, installs this checkout, trains a small Remixer to translate English sentences to
# logical forms, and prints its answers before and after training. Downloads no data. Run the script again to resume.
#
#   scripts/quickstart.sh                   in .venv, into runs/quickstart
#   scripts/quickstart.sh --model=t5_1_1    another model, into runs/quickstart_t5_1_1; passes other flags on
#   VENV=path scripts/quickstart.sh         in another virtual environment, created if missing
#   MODEL_DIR=path scripts/quickstart.sh    into another folder
#
# .venv and runs/ are in this checkout. Relative paths in VENV, MODEL_DIR and flags refer to the current folder.
set -euo pipefail
FOLDER="$PWD"
[[ "${VENV:-/}" == /* ]] || VENV="$FOLDER/$VENV"
cd "$(dirname "$0")/.."

source scripts/environment.sh
prepare_environment ''
if [[ " $* " =~ \ --model[=\ ]([^\ ]+) ]]; then
    suffix="_${BASH_REMATCH[1]//\//_}"
fi
VENV="$(cd "$VENV" && pwd)"
MODEL_DIR="${MODEL_DIR:-$PWD/runs/quickstart${suffix:-}}"

say "training on this computer: English sentences to logical forms, into $MODEL_DIR"
cd "$FOLDER"
"$VENV/bin/remixer-t5x" train --gin_file=experiments/quickstart.gin "--gin.MODEL_DIR=$MODEL_DIR" "$@"

say 'try next'
if [[ -z ${suffix:-} ]]; then
    printf 'The same with T5.1.1:\n  scripts/quickstart.sh --model=t5_1_1\n'
else
    printf 'Several models and seeds, with a table and a report:\n  %s compare train %s\n' "$VENV/bin/remixer-t5x" \
        '--gin_file=experiments/quickstart.gin --models=t5_1_1,remixer --seeds=0,1 --folder=runs/compared'
fi
cat <<END
Your own text (here: the documentation of this repository):
  $VENV/bin/remixer-t5x train --gin_file=experiments/own_text.gin --gin.FILES='docs/*.md' --gin.TEXT_FORMAT=txt \\
    --gin.VOCAB_SIZE=600 --gin.TRAIN_STEPS=50 --gin.MODEL_DIR=runs/mine
END
