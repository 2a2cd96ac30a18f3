#!/usr/bin/env bash
# bash examples/embodiment/train_reward_model.sh [NAME] [overrides]: fit a reward model as config/NAME.yaml says, and
# with flags (--positive-dir DIR --negative-dir DIR --output-checkpoint FILE ...) as these say.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export EMBODIED_PATH="${EMBODIED_PATH:-$here}"
if [[ "${1:-}" == --* ]]; then
  exec python -m guerdon.fit.train_reward_model "$@"
fi
name="train_reward_model"
if [ $# -gt 0 ] && [[ "$1" != *=* ]]; then
  name="$1"
  shift
fi
exec guerdon train-reward --config-path "$here/config" --config-name "$name" "$@"
